"""Runs a script in a process of its own under observation, and ends it; or says why it could not.

    paceline doctor  --begins, in a group of its own-->  child.py: the script
                     <--a file, replaced at each stage--

Time is given from one step to the next, so that it does not matter how many are wanted. What the
script prints goes into a file. When all is known the child ends the script; what is left of its
group (workers of loaders, what it forked) is killed. This module must not know how anything is
observed.
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
from ...system.signals import die_with_parent, ended_by_signals
from .observation import Observation
from .record import StepRecord

_LOOK_S = 0.05
_GRACE_S = 10.0
_MARGIN_S = 60.0
"""After the first step: a compiler may be at work, which has a limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What is run, and how long.

    Attributes:
        price_s: seconds for prices; 0: none. only: how the name of a fix begins that is tried;
            empty: all are.
        first_s: to the first step; so much and a margin from each step to the next.
    """

    script: Path
    args: tuple[str, ...] = ()
    price_s: float = 60.0
    only: str = ""
    first_s: float = 120.0


def observe(asked: ScriptRun) -> Observation:
    """Run it until all is known.

    Raises:
        ConfigError: there is nothing to observe; says why, and what to do.
    """
    words = {"price_s": asked.price_s, "only": asked.only}
    found, is_over, why_not = _run(asked, words)
    seen = found.get("observation")
    if seen is None:
        raise ConfigError(why_not)
    told = _how(found, is_over) if found.get("how") or is_over else ""
    return replace(Observation.read(seen), ended=told)


def record(asked: ScriptRun, text: str, num_steps: int) -> StepRecord:
    """Run this text in the script's place, and keep the losses and gradients of so many steps.

    Raises:
        ConfigError: it does not come so far; says why.
    """
    found, _, why_not = _run(asked, {"text": text, "num_steps": num_steps})
    if not found.get("record"):
        raise ConfigError(why_not)
    return StepRecord.read(found["record"])


def _run(asked: ScriptRun, words: dict[str, Any]) -> tuple[dict[str, Any], bool, str]:
    """What the process found, whether its time was over, and why it would have found nothing."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        file, output = Path(folder) / "found.json", Path(folder) / "output"
        with output.open("wb") as log, ended_by_signals(lambda number: False):
            process = _begin(asked, {**words, "file": str(file)}, log)
            try:
                is_over = _await(process, asked, file)
            finally:
                _end(process)
        found = _read(file)
        return found, is_over, _why_not(found, asked, is_over, process.returncode, output)


def _begin(asked: ScriptRun, words: dict[str, Any], log: Any) -> "Popen[bytes]":
    command = [
        sys.executable, "-m", f"{__package__}.child", json.dumps(words), str(asked.script),
        *asked.args,
    ]  # fmt: skip
    return Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip


def _await(process: "Popen[bytes]", asked: ScriptRun, file: Path) -> bool:
    """Until it ends or makes no step for too long; whether that is so."""
    heard_s, limit_s, steps = time.monotonic(), asked.first_s, 0
    while process.poll() is None:
        made = _read(file).get("steps", 0)
        if made > steps:
            heard_s, limit_s, steps = time.monotonic(), asked.first_s + _MARGIN_S, made
        if time.monotonic() - heard_s > limit_s:
            return True
        time.sleep(_LOOK_S)
    return False


def _end(process: "Popen[bytes]") -> None:
    """End its group, what it began included."""
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
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _how(found: dict[str, Any], is_over: bool) -> str:
    """How the script ended before all was known."""
    if is_over:
        return "it made no step any more before all was measured"
    if found["how"] == "failed":
        return f"it failed before all was measured: {found['why']} ({found['where']})"
    return "it ended before all was measured"


def _why_not(
    found: dict[str, Any], asked: ScriptRun, is_over: bool, code: int | None, output: Path
) -> str:
    """Why there is nothing to observe, in one sentence."""
    script = asked.script
    static = f"paceline doctor {script} --static reads it without running it"
    steps = found.get("steps", 0)
    if is_over and not steps:
        return (
            f"{script} made no step of an optimizer of torch in {asked.first_s:g} s (--wait); "
            f"if it starts more slowly give it more, else {static}"
        )
    if is_over:
        return (
            f"{script} made steps of an optimizer of torch, {steps} at least, and then none in "
            f"{asked.first_s + _MARGIN_S:g} s; if they take so long give it more (--wait), else "
            f"{static}"
        )
    before = "before enough training steps" if steps else "before a training step"
    how = found.get("how")
    last = _last_line(output)
    if how == "failed":
        return f"{script} fails {before}: {found['why']} ({found['where']})"
    if how == "exit" and code not in (0, None):
        said = last or found["why"]
        return (
            f"{script} ends with exit code {code} {before}, and says: {said!r}; "
            f"its arguments stand behind its name: paceline doctor {script} ..."
        )
    if how in ("returned", "exit"):
        return (
            f"{script} ends before enough steps of an optimizer of torch in its own process; if it "
            f"trains in processes that it begins, give it arguments with which it does not; {static}"
        )
    by = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return f"{script} was ended {by} {before}{f', and says: {last!r}' * bool(last)}"


def _last_line(output: Path) -> str:
    rows = output.read_bytes()[-4000:].decode(errors="replace").splitlines()
    return next((row.strip() for row in reversed(rows) if row.strip()), "")[:200]
