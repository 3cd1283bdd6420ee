"""The complaints about a run that was struck; none if all is right.

    no hang      it ends within a limit, and ten seconds after the first TERM or Ctrl-C
    in words     no traceback; what ended it can end a run, and is said
    each once    after --resume auto each sample of each epoch is in exactly one update, and the
                 weights are those that the trace's updates make
    nothing left no process, no temporary file, nothing but the run in the run's folder

This module must not know how a run is struck.
"""

import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from havoc_plan import Plan, Strike
from havoc_run import AWAITED, Launch, Outcome, carry_out
from paceline.errors import ConfigError
from paceline.events import Apply
from paceline.report.summary import summarize
from paceline.trace.records import Heard, Resumed
from runs import Run, leases_of

KINDS = ("hang", "traceback", "words", "lost", "doubled", "weights", "left")
CLOSE = 1e-9
MOST_ASKED_S = 10.0
_TRACEBACK = re.compile(r"Traceback \(|Exception ignored|Fatal Python error: (?!Segm)|Error in sys")
_FOR_GOOD = ("KILL", "SEGV", "HUP", "TERM", "INT")
"""Allowed ends of a launcher."""
_DEADLY = ("KILL", "SEGV", "STOP")
"""Allowed ends of other processes; the rest is reported by the launcher."""
_WORDS = ("it is not restarted", "after the last update")
"""Of these, allowed with ``--respawn``: a permanent death, or one at the end of a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan, its outcome, and the ``complaints`` about it by kind."""

    plan: Plan
    outcome: Outcome
    complaints: dict[str, list[str]]


def trial(plan: Plan, folder: Path) -> Trial:
    """Run a plan and judge it."""
    outcome = carry_out(plan, folder)
    return Trial(plan=plan, outcome=outcome, complaints=judge(plan, outcome))


def judge(plan: Plan, outcome: Outcome) -> dict[str, list[str]]:
    """The complaints by kind, one of `KINDS`."""
    complaints: dict[str, list[str]] = {}
    struck = [one for i, one in enumerate(plan.strikes) if i in outcome.struck]
    for number, launch in enumerate(outcome.launches):
        for kind, complaint in _of_launch(plan, launch, struck if number == 0 else []):
            complaints.setdefault(kind, []).append(f"launch {number}: {complaint}")
    if outcome.launches[-1].code == 0:
        for kind, complaint in _of_samples(plan, outcome):
            complaints.setdefault(kind, []).append(complaint)
    return complaints


def _of_launch(plan: Plan, launch: Launch, struck: list[Strike]) -> list[tuple[str, str]]:
    complaints = []
    if launch.code is None:
        complaints.append(("hang", f"it did not end within {launch.took_s:.0f} s"))
    if launch.asked_s > MOST_ASKED_S:
        complaints.append(("hang", f"it ended {launch.asked_s:.1f} s after TERM or INT"))
    if match := _TRACEBACK.search(launch.screen):
        complaints.append(("traceback", launch.screen[match.start() :][:2000]))
    if launch.code not in (0, None) and (wrong := _of_end(plan, launch, struck)):
        complaints.append(("words", wrong))
    complaints += [("left", one) for one in launch.left]
    return complaints


def _of_end(plan: Plan, launch: Launch, struck: list[Strike]) -> str:
    """The complaints about an early end of the run."""
    code = launch.code
    assert code is not None
    told = {one.signal for one in struck if one.target == "launcher"}
    told |= {"TERM"} if AWAITED in launch.screen else set()
    if code < 0 or code > 128:
        name = signal.Signals(abs(code) % 128).name.removeprefix("SIG")
        if name not in told or name not in _FOR_GOOD:
            return f"it ended by {name}, which nobody sent"
        return "" if code < 0 or "interrupted" in launch.screen else "it did not say why it ended"
    if code != 1 or "error: " not in launch.screen:
        return f"exit {code}: {launch.screen[-500:]}"
    hit = [one for one in struck if one.signal in _DEADLY and one.kind in ("worker", "forkserver")]
    words = _WORDS if plan.respawn else ("",)
    if not hit or not any(word in launch.screen for word in words):
        return f"it need not have ended: {launch.screen[-800:]}"
    return ""


def _of_samples(plan: Plan, outcome: Outcome) -> list[tuple[str, str]]:
    try:
        run = Run(folder=outcome.run, summary=summarize(outcome.run))
    except ConfigError as error:
        return [("words", str(error))]
    complaints = []
    used = run.used()
    for epoch in range(max(plan.epochs, len(used))):
        here = used[epoch] if epoch < len(used) else Counter()
        wanted = set(range(plan.samples)) if epoch < plan.epochs else set()
        if lost := [one for one in wanted if not here[one]]:
            complaints.append(("lost", f"epoch {epoch}: samples {lost}"))
        if doubled := [one for one, times in here.items() if times > (one in wanted)]:
            complaints.append(("doubled", f"epoch {epoch}: samples {doubled}"))
    alive = _pids(run)  # others ended before the run was launched again
    finals = [one for one in outcome.finals if int(one.stem.rpartition("-")[2]) in alive]
    if not finals:
        complaints.append(("lost", "no worker came to the end of its script"))
    wanted_weights = expected(run, plan.samples)
    for final in finals:
        off = (torch.load(final)["weight"] - wanted_weights).abs()
        if float(off.max()) > CLOSE:
            places = off.gt(CLOSE).nonzero().flatten().tolist()
            text = (
                f"{final.name}: {len(places)} weights are not what the updates make, from "
                f"{places[0]} to {places[-1]}, by up to {float(off.max()):.4g}"
            )
            complaints.append(("weights", text))
    return complaints


def _pids(run: Run) -> set[int]:
    """Process numbers of the workers since the start or last resume of the run."""
    pids: set[int] = set()
    for record in run.records:
        if isinstance(record, Resumed):
            pids.clear()
        elif isinstance(record, Heard) and record.pid is not None:
            pids.add(record.pid)
    return pids


def expected(run: Run, num_samples: int) -> torch.Tensor:
    """The weights that follow from the updates of the trace."""
    weights = torch.zeros(num_samples, dtype=torch.float64)
    orders = run.every_order()
    leases = leases_of(orders)
    for order in orders:
        if isinstance(order, Apply):
            for ticket, weight in zip(order.tickets, order.weights, strict=True):
                for lease in leases[ticket[:2]]:
                    weights[lease.start : lease.stop] -= weight / lease.num_samples
    return weights
