"""Run a script in a process of its own under observation, end it, and explain failures.

    paceline doctor  --starts, in a process group of its own-->  child.py: the script
                     <--a file, replaced at each stage--

The time limit holds from each step to the next, so that it does not matter how many are needed. What
the script prints goes into a file. The child ends the script when all is known; what is left of its
process group (workers of loaders, processes that it forked) is killed. This module must not know how
anything is observed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from ...errors import ConfigError
from ...system.interpreter import safe_path_flag
from ...system.signals import die_with_parent, ended_by_signals
from .observation import Observation
from .record import StepRecord

_POLL_S = 0.05
_GRACE_S = 10.0
_MARGIN_S = 60.0
"""Added after the first step: a compiler may be at work, which has a limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """A script to run, and the limits of its observation.

    Attributes:
        script: its path.
        args: its own arguments.
        price_s: seconds for pricing fixes; 0: none is tried.
        only: only fixes whose name begins with this are tried; empty: all are.
        first_s: seconds until the first step; between steps, a margin is added.
    """

    script: Path
    args: tuple[str, ...] = ()
    price_s: float = 60.0
    only: str = ""
    first_s: float = 120.0


def observe(run: ScriptRun) -> Observation:
    """Run a script until everything is measured.

    Raises:
        ConfigError: there is nothing to observe; its message says why, and what to do.
    """
    results, is_over, why_not = _run(run, {"price_s": run.price_s, "only": run.only})
    observation = results.get("observation")
    if observation is None:
        raise ConfigError(why_not)
    ended = _ending(results, is_over) if results.get("how") or is_over else ""
    return replace(Observation.read(observation), ended=ended)


def record(run: ScriptRun, text: str, num_steps: int) -> StepRecord:
    """Run a text in the script's place, and record its losses and gradients.

    Args:
        num_steps: how many steps to record.

    Raises:
        ConfigError: it does not make that many steps; its message says why.
    """
    results, _, why_not = _run(run, {"text": text, "num_steps": num_steps})
    if not results.get("record"):
        raise ConfigError(why_not)
    return StepRecord.read(results["record"])


def _run(run: ScriptRun, request: dict[str, Any]) -> tuple[dict[str, Any], bool, str]:
    """Return the process's results, whether its time was over, and why results may be missing."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        file, output = Path(folder) / "found.json", Path(folder) / "output"
        with output.open("wb") as log, ended_by_signals(lambda number: False):
            process = _begin(run, {**request, "file": str(file)}, log)
            try:
                is_over = _await(process, run, file)
            finally:
                _end(process)
        results = _read(file)
        return results, is_over, _why_not(results, run, is_over, process.returncode, output)


def _begin(run: ScriptRun, request: dict[str, Any], log: Any) -> "Popen[bytes]":
    command = [
        sys.executable, *safe_path_flag(), "-m", f"{__package__}.child", json.dumps(request),
        str(run.script), *run.args,
    ]  # fmt: skip
    return Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip


def _await(process: "Popen[bytes]", run: ScriptRun, file: Path) -> bool:
    """Wait until the process ends or makes no step for too long; return whether it did not end."""
    last_step_s, limit_s, num_steps = time.monotonic(), run.first_s, 0
    while process.poll() is None:
        steps = _read(file).get("steps", 0)
        if steps > num_steps:
            last_step_s, limit_s, num_steps = time.monotonic(), run.first_s + _MARGIN_S, steps
        if time.monotonic() - last_step_s > limit_s:
            return True
        time.sleep(_POLL_S)
    return False


def _end(process: "Popen[bytes]") -> None:
    """End a process and its whole group, with the processes that it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return results


def _ending(results: dict[str, Any], is_over: bool) -> str:
    """Return how the script ended before everything was measured."""
    if is_over:
        return "it stopped making steps before all was measured"
    if results.get("tried"):
        return (
            f"{results['tried']} does not work here, and ended it: {results['why']} "
            f"({results['where']}); no fix after it was tried"
        )
    if results["how"] == "failed":
        return f"it failed before all was measured: {results['why']} ({results['where']})"
    return "it ended before all was measured"


def _why_not(
    results: dict[str, Any], run: ScriptRun, is_over: bool, code: int | None, output: Path
) -> str:
    """Return one sentence on why there is nothing to observe."""
    script = run.script
    static = f"paceline doctor {script} --static reads it without running it"
    steps = results.get("steps", 0)
    if is_over and not steps:
        return (
            f"{script} made no step of a torch optimizer in {run.first_s:g} s (--wait); "
            f"if it needs more time to start, increase --wait, else {static}"
        )
    if is_over:
        return (
            f"{script} made at least {steps} steps of a torch optimizer, and then none in "
            f"{run.first_s + _MARGIN_S:g} s; if steps take that long increase --wait, else "
            f"{static}"
        )
    before = "before enough training steps" if steps else "before a training step"
    how = results.get("how")
    last = _last_line(output)
    if how == "failed":
        return f"{script} fails {before}: {results['why']} ({results['where']})"
    if how == "exit" and code not in (0, None):
        message = last or results["why"]
        return (
            f"{script} ends with exit code {code} {before}, and prints: {message!r}; "
            f"pass its arguments after its name: paceline doctor {script} ..."
        )
    if how in ("returned", "exit"):
        return (
            f"{script} ends before enough steps of a torch optimizer in its own process; if it "
            f"trains in processes that it starts, pass arguments with which it does not; {static}"
        )
    by = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return f"{script} was ended {by} {before}{f', and prints: {last!r}' * bool(last)}"


def _last_line(output: Path) -> str:
    lines = output.read_bytes()[-4000:].decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]
