"""Runs a script in one configuration and judges it: a cell of docs/scripts.md.

    plain          the script by itself  ==  its twin, to the last bit
    full-sync      every worker          ==  the twin, to CLOSE; the inline engine where a worker's
                                             part of a batch is not what one process would see
    all others     what holds under any protocol: facts, equal weights, each sample once, the loss

A run that takes longer than LIMIT_S is ended and counts as a finding. This module must not know
any script by name.

Longer than a file should be: the one place that defines what is right.
"""

import contextlib
import itertools
import math
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

import one_script
import paceline
from paceline.context import Context
from paceline.errors import PacelineError
from paceline.replica.seeding import kept_random_state
from paceline.report.trials import TrialsSummary, TrialSummary
from paceline.script import worker
from paceline.trace.records import Header
from runs import Run, leases_of, run_script

from .base import PLAIN, Configuration, Noted, Numbers, Record, Refusal, Script, Text
from .stand_in import Drawn, Plain

CLOSE = 1e-9
LIMIT_S = 30
RIGHT, REFUSED, DIFFERS = "=", "refused", "DIFFERS"


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether a script is right in a configuration; the sentence or the difference in words."""

    verdict: str
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a script: the notes of each worker, or why it ended.

    Attributes:
        runs: of several workers; more than one where the script trains in trials.
        num_steps: that were done before it ended, of several workers.
    """

    noted: Sequence[Noted] = ()
    error: BaseException | None = None
    runs: Sequence[Run] = ()
    num_steps: int = 0


class TookTooLong(BaseException):
    """A run did not end in time; no ``except Exception`` catches it."""


# -- running ----------------------------------------------------------------------------------


def cell(script: Script, configuration: Configuration) -> Cell:
    """Run ``script`` in this configuration and judge the outcome."""
    with tempfile.TemporaryDirectory(prefix="script-") as scratch, kept_random_state():
        folder = Path(scratch)
        if configuration == PLAIN:
            outcome = alone(script.text, folder, None)
        else:
            outcome = launched(script, configuration, folder / "found")
        if outcome.error is not None:
            return judge_end(outcome, script.refused.get(configuration.name))
        refusal = script.refused.get(configuration.name)
        if refusal is not None and refusal.is_sure:
            return Cell(DIFFERS, f"it ran, where it is to be refused with {refusal.says!r}")
        difference = next(differences(script, configuration, outcome, folder), None)
    return Cell(RIGHT) if difference is None else Cell(DIFFERS, difference)


def alone(text: Text, folder: Path, stand_in: Plain | None) -> Outcome:
    """Run in this process, as plain ``python`` would, or with a stand-in for Paceline."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder)
    worker.start_context(None, Context())  # type: ignore[arg-type]
    connect: Callable[[], Any] = paceline.connect if stand_in is None else lambda: stand_in
    error = None
    with contextlib.chdir(folder), mock.patch.object(paceline, "connect", connect):
        seed_everything()
        try:
            with ended_after(LIMIT_S):
                text(record)
        except (Exception, TookTooLong) as caught:
            error = caught
    worker.start_context(None, Context())  # type: ignore[arg-type]
    return Outcome(noted=[record.noted], error=error)


def launched(script: Script, at: Configuration, folder: Path, **settings: Any) -> Outcome:
    """Run with several workers, as ``paceline launch`` does."""
    folder.mkdir(parents=True)
    settings = {"workers": at.workers, "protocol": at.protocol, **settings}
    path, error, runs = Path(one_script.__file__), None, list[Run]()
    try:
        with ended_after(LIMIT_S):
            run = run_script(path, folder, script.name, str(folder), **settings)
            runs = [run]
            if isinstance(run.summary, TrialsSummary):
                runs = [trial_of(run.folder, one) for one in run.summary.trials]
    except (Exception, TookTooLong) as caught:
        error = caught
    files = sorted(folder.glob("worker-*.pt"))
    noted = [torch.load(one, weights_only=False) for one in files]
    return Outcome(noted=noted, error=error, runs=runs, num_steps=count_pushes(folder))


def trial_of(folder: Path, one: TrialSummary) -> Run:
    """A trial as a run."""
    return Run(folder=folder / one.name, summary=one.summary)


def count_pushes(folder: Path) -> int:
    """The number of pushes, also of a run that ended early."""
    trace = folder / "run" / "trace.jsonl"
    return len(Run(folder=trace.parent, summary=None).pushes) if trace.exists() else 0  # type: ignore[arg-type]


def seed_everything() -> None:
    """The random state of an unseeded script: the same as for its twin."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in code that does not end; the alarm of a test continues afterwards."""

    def ring(*_: object) -> None:
        raise TookTooLong(f"it did not end within {seconds:g} s")

    old_ring = signal.signal(signal.SIGALRM, ring)
    rest_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, rest_s)
        signal.signal(signal.SIGALRM, old_ring)


# -- judging ----------------------------------------------------------------------------------


def judge_end(outcome: Outcome, refusal: Refusal | None) -> Cell:
    """Judge a run that raised: an announced refusal, or a finding."""
    error = outcome.error
    words = gist(error)
    if refusal is None or not isinstance(error, PacelineError):
        return Cell(DIFFERS, words)
    if re.search(refusal.says, str(error)) is None:
        return Cell(DIFFERS, f"ended, but not with {refusal.says!r}: {words}")
    if refusal.is_early and outcome.num_steps:
        return Cell(DIFFERS, f"refused after {outcome.num_steps} steps, not before the first")
    return Cell(REFUSED, str(error).partition("\n")[0])


def gist(error: BaseException | None) -> str:
    """An error in one line: for one from a worker, its message and location."""
    lines = str(error).splitlines() or [""]
    told = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-2]}"
    return f"{type(error).__name__}: {told}"


def differences(script: Script, at: Configuration, found: Outcome, folder: Path) -> Iterator[str]:
    """Describe the first violation in words."""
    stand_in = Drawn(at.workers) if script.shuffles and at != PLAIN else Plain(at.workers)
    twin = alone(script.twin(at), folder / "twin", stand_in)
    if twin.error is not None:
        yield f"its plain twin fails: {gist(twin.error)}"
        return
    [plain] = twin.noted
    if at == PLAIN:
        yield from unequal(plain, found.noted[0], 0.0)
        return
    if script.counts_itself and not at.is_lockstep:
        return
    yield from facts_differ(plain, found.noted)
    for run in found.runs:
        yield from run_differs(script, run)
    if not at.is_lockstep:
        return
    if not script.is_repeatable:
        yield from numbers_differ("used", all_used([plain]), all_used(found.noted), 0.0)
        return
    if script.is_exact:
        yield from lockstep_differs(plain, found.noted)
        return
    inline = launched(script, at, folder / "inline", engine="inline")
    if inline.error is not None:
        yield f"inline: {gist(inline.error)}"
        return
    for one, other in zip(inline.noted, found.noted, strict=True):
        yield from unequal(one, other, CLOSE)


def unequal(expected: Noted, found: Noted, tolerance: float) -> Iterator[str]:
    """Compare every kind of note."""
    for kind in fields(Noted):
        yield from numbers_differ(
            kind.name, getattr(expected, kind.name), getattr(found, kind.name), tolerance
        )


def numbers_differ(kind: str, expected: Numbers, found: Numbers, tolerance: float) -> Iterator[str]:
    """Compare names, the number of notes of each, and the values."""
    if expected.keys() != found.keys():
        yield f"{kind}: noted {sorted(found)} and not {sorted(expected)}"
        return
    for name, values in expected.items():
        if len(values) != len(found[name]):
            yield f"{kind} {name}: noted {len(found[name])} times and not {len(values)}"
            continue
        for number, (one, other) in enumerate(zip(values, found[name], strict=True)):
            if not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True):
                yield f"{kind} {name}, entry {number}: {shown(other)} and not {shown(one)}"
                break


def shown(value: torch.Tensor) -> str:
    """A value, or the first values."""
    return " ".join(f"{one:.9g}" for one in value.flatten()[:4].tolist())


def facts_differ(plain: Noted, found: Sequence[Noted]) -> Iterator[str]:
    """Check what holds under any protocol for notes of workers; those of main alone count, too."""
    for one in found:
        known = {name: plain.facts[name] for name in one.facts if name in plain.facts}
        yield from numbers_differ("facts", known, one.facts, CLOSE)
        yield from numbers_differ("epochs", found[0].epochs, one.epochs, CLOSE)
        yield from numbers_differ("weights", found[0].weights, one.weights, CLOSE)
    if missing := plain.facts.keys() - found[0].facts.keys():
        yield f"facts: the first worker did not note {sorted(missing)}"
    for kind in ("epochs", "weights"):
        counts = {name: len(values) for name, values in getattr(plain, kind).items()}
        mine = {name: len(values) for name, values in getattr(found[0], kind).items()}
        if counts != mine:
            yield f"{kind}: noted {mine} times and not {counts}"
    for name, values in found[0].weights.items():
        if not all(bool(value.isfinite().all()) for value in values):
            yield f"weights {name}: not finite"


def run_differs(script: Script, run: Run) -> Iterator[str]:
    """What a trace says: epochs, samples, the loss."""
    if (ended := run.num_epochs_ended()) != script.epochs:
        yield f"{ended} epochs ended and not {script.epochs}"
    header = run.records[0]
    assert isinstance(header, Header)
    positions = range(-(-script.num_samples // header.number("samples_each", 1)))
    for epoch, every in enumerate(run.used()):
        # Where several make a lease, the last one may reach beyond the end of a stream.
        used = Counter({one: times for one, times in every.items() if one in positions})
        if script.uses_all and used != Counter(positions):
            lost = [one for one in positions if used[one] == 0]
            twice = [one for one, times in used.items() if times > 1]
            yield f"epoch {epoch}: samples never used {lost}, twice {twice}"
        elif any(times > 1 for times in used.values()):
            yield f"epoch {epoch}: a sample was used twice"
    losses = losses_by_epoch(run)
    if any(math.isinf(loss) for loss in losses):
        yield f"the losses of the epochs are {losses}"
    if script.falls and losses and not losses[-1] < losses[0]:
        yield f"the loss does not fall: {losses}"


def losses_by_epoch(run: Run) -> list[float]:
    """The mean over an epoch's pushes; empty where the script's way of going back tells no loss."""
    leases = leases_of(run.every_order())
    losses: dict[int, list[float]] = {}
    for push in run.pushes:
        if not math.isnan(push.loss) and leases[push.ticket[:2]]:
            losses.setdefault(leases[push.ticket[:2]][0].epoch, []).append(push.loss)
    return [sum(epoch) / len(epoch) for _, epoch in sorted(losses.items())]


def lockstep_differs(plain: Noted, found: Sequence[Noted]) -> Iterator[str]:
    """full-sync: what one process does with the whole batch."""
    for one in found:
        yield from numbers_differ("weights", plain.weights, one.weights, CLOSE)
        yield from numbers_differ("moments", plain.moments, one.moments, CLOSE)
        yield from numbers_differ("epochs", plain.epochs, one.epochs, CLOSE)
        yield from numbers_differ("steps", plain.steps, one.steps, CLOSE)
    mean = {name: of_all(found, "parts", name, averaged) for name in plain.parts}
    yield from numbers_differ("parts", plain.parts, mean, CLOSE)
    used = {name: of_all(found, "used", name, joined) for name in plain.used}
    each = {name: [one.sort().values for one in plain.used[name]] for name in plain.used}
    yield from numbers_differ("used", each, used, 0.0)


def all_used(noted: Sequence[Noted]) -> Numbers:
    """The samples of a whole run, in order."""
    return {"samples": [joined([step for one in noted for step in one.used["samples"]])]}


def of_all(
    found: Sequence[Noted],
    kind: str,
    name: str,
    combined: Callable[[list[torch.Tensor]], torch.Tensor],
) -> list[torch.Tensor]:
    """Step by step, what all workers noted together; a worker may have had no part in the last."""
    rows = [getattr(one, kind).get(name, []) for one in found]
    return [
        combined([one for one in step if one is not None]) for step in itertools.zip_longest(*rows)
    ]


def averaged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).mean(dim=0)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).sort().values
