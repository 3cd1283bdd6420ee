"""Whether N workers compute what one process does, as a table, and what is to blame where not.

    for each N, number format, batches      the largest difference of a parameter or buffer
    where it is too large                   the layers that break; the same row without them;
                                            what the losses and weights of its first update say

An update of full-sync is the mean of its pushes, each weighted by its samples: sum_i (n_i / n) g_i.
That is the gradient of the whole batch where the loss is a mean over samples and no layer looks
beyond its sample. This module must not know how a run is carried out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..config import MOST_PROCESSES
from ..errors import ConfigError, WorkerError
from ..report.text import table
from ..workloads import load_task
from ..workloads.base import Task
from .layers import BreakingLayer
from .subjects import DTYPES, Case, Compared, Dtype, ScriptSubject, Subject, TaskSubject, Update

ALLOWED: dict[Dtype, float] = {"float64": 1e-12, "float32": 1e-6}
"""Largest absolute difference of a parameter after the updates of a row."""
_CLOSE: dict[Dtype, float] = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative difference of two losses that are the same."""

CauseKind = Literal["layer", "mean of means", "sum", "other mean", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case and what came of it; ``is_equal`` by what `ALLOWED` allows."""

    case: Case
    found: Compared

    @property
    def is_equal(self) -> bool:
        return self.found.difference <= ALLOWED[self.case.dtype]

    def to_json(self) -> dict[str, object]:
        """An element of ``rows``."""
        difference = self.found.difference
        return {
            "workers": self.case.workers,
            "dtype": self.case.dtype,
            "batches": list(self.found.sizes),
            "parts": _parts(self),
            "set_aside": list(self.case.frozen),
            "largest_difference": difference if math.isfinite(difference) else None,
            "where": self.found.name,
            "allowed": ALLOWED[self.case.dtype],
            "is_equal": self.is_equal,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that makes workers compute another thing.

    Args:
        what: the layer, parameter or mistake, by name.
        why: in words.
        fix: what to write instead.
    """

    kind: CauseKind
    what: str
    why: str
    fix: str

    def to_json(self) -> dict[str, object]:
        """An element of ``causes``."""
        return {"kind": self.kind, "what": self.what, "why": self.why, "fix": self.fix}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of ``paceline verify``.

    Attributes:
        rows: a row a case.
        causes: of the first row that is not equal.
        aside: that row again, with the layers among the causes set aside; None: there are none.
        notes: what could not be computed, and why.
    """

    subject: str
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    aside: Row | None
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return bool(self.rows) and all(row.is_equal for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """The result of ``paceline verify --json``."""
        return {
            "subject": self.subject,
            "is_equal": self.is_equal,
            "rows": [row.to_json() for row in self.rows],
            "causes": [one.to_json() for one in self.causes],
            "set_aside": None if self.aside is None else self.aside.to_json(),
            "notes": list(self.notes),
        }


def verify(
    spec: str | Task,
    workers: Sequence[int],
    args: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Verified:
    """Run ``spec`` by one and by several workers, and compare.

    Args:
        spec: a task, built in, ``package.module:task`` or made here; or a script (a path that ends
            in .py).
        workers: numbers >= 1; each has its rows.
        args: the script's own.
        say: is told what is being done.

    Raises:
        ConfigError: there is no such task or script, or it cannot be run small.
    """
    for number in workers:
        if not 1 <= number <= MOST_PROCESSES:
            raise ConfigError(f"-n takes numbers from 1 to {MOST_PROCESSES}, got {number}")
    subject = _subject(spec, args)
    rows: list[Row] = []
    notes: list[str] = []
    for dtype in DTYPES:
        for case in _cases(workers, dtype):
            say(f"{subject.name}: {dtype}, {_workers(case.workers)}, {_kind(case)} batches")
            try:
                rows.append(Row(case=case, found=subject.compare(case)))
            except WorkerError as error:
                if dtype != "float64":
                    raise
                notes.append(f"float64: it cannot be computed so: {_last_line(error)}")
                break
    different = [row for row in rows if not row.is_equal]
    causes, aside = _explain(subject, different[0]) if different else ((), None)
    return Verified(
        subject=subject.name, rows=tuple(rows), causes=causes, aside=aside, notes=tuple(notes)
    )


def _subject(spec: str | Task, args: Sequence[str]) -> Subject:
    if isinstance(spec, Task):
        return TaskSubject(spec)
    if spec.endswith(".py"):
        return ScriptSubject(Path(spec), args)
    if args:
        raise ConfigError(f"arguments are for a script, {spec} is a task: leave {args[0]!r} out")
    return TaskSubject(load_task(spec))


def _cases(workers: Sequence[int], dtype: Dtype) -> Iterator[Case]:
    for number in dict.fromkeys(workers):
        yield Case(workers=number, dtype=dtype, is_even=True)
        if number > 1:
            yield Case(workers=number, dtype=dtype, is_even=False)


# -- what is to blame ------------------------------------------------------------------------------


def _explain(subject: Subject, row: Row) -> tuple[tuple[Cause, ...], Row | None]:
    """The causes of a difference, and the row without the layers among them."""
    layers = subject.breaking_layers(row.case)
    causes = [_cause_of_layer(one) for one in layers]
    aside = None
    if layers:
        case = replace(row.case, frozen=tuple(one.name for one in layers))
        aside = row = Row(case=case, found=subject.compare(case))
    if not row.is_equal:
        causes.append(_cause_of_loss(row) or _unknown(row))
    return tuple(causes), aside


def _cause_of_layer(layer: BreakingLayer) -> Cause:
    name = f"{layer.name or 'the model'} ({layer.kind})"
    if layer.cause == "random":
        return Cause(
            kind="layer",
            what=name,
            why="it draws random numbers, which are others in each worker's part; in the mean an "
            "update is the same",
            fix="nothing, where randomness is meant; p=0 or eval() makes runs comparable",
        )
    is_batch_norm = "BatchNorm" in layer.kind
    why = "its output for a sample depends on the other samples of the batch, and a worker has "
    why += "only its part of them"
    if is_batch_norm:
        why = "it normalises each worker's part of the batch by itself, not the whole batch"
    return Cause(
        kind="layer",
        what=name,
        why=why,
        fix="GroupNorm or LayerNorm, which look at one sample; or parts as large as one worker's "
        "batch was: --mini-batch-size"
        if is_batch_norm
        else "let it look at one sample at a time; or parts as large as one worker's batch was: "
        "--mini-batch-size",
    )


def _cause_of_loss(row: Row) -> Cause | None:
    """What the first update tells, which all made at the same parameters; None: nothing."""
    alone, shared, dtype = row.found.alone, row.found.shared, row.case.dtype
    shares = [count / sum(shared.samples) for count in shared.samples]
    if cause := _cause_of_weights(shared, shares):
        return cause

    def is_whole(value: float) -> bool:
        return math.isclose(value, alone.losses[0], rel_tol=_CLOSE[dtype], abs_tol=_CLOSE[dtype])

    weighted = sum(share * loss for share, loss in zip(shares, shared.losses, strict=True))
    total = sum(shared.losses)
    if not math.isfinite(total) or is_whole(weighted):
        return None
    if is_whole(total):
        return Cause(
            kind="sum",
            what="the loss",
            why=f"it is a sum over samples: the parts' losses add up to {total:.6g}, the loss of "
            "the whole batch, and an update averages them",
            fix="divide it by the samples at hand: reduction='mean', or loss / len(inputs)",
        )
    if is_whole(total / len(shared.losses)):
        return Cause(
            kind="mean of means",
            what="the loss",
            why=f"it is divided by a fixed number, so parts of {_each(shared.samples)} samples "
            f"count the same: their plain mean is {total / len(shared.losses):.6g}, the loss of "
            f"the whole batch, by their samples it is {weighted:.6g}",
            fix="divide by the samples at hand: reduction='mean', or loss / len(inputs)",
        )
    return Cause(
        kind="other mean",
        what="the loss",
        why=f"it is no mean over samples: {alone.losses[0]:.6g} for the whole batch, "
        f"{weighted:.6g} for its parts by their samples",
        fix="a mean over tokens or weights: step.weight = how many there are; a loss over pairs "
        "of samples: parts as large as one worker's batch was, --mini-batch-size",
    )


def _cause_of_weights(shared: Update, shares: Sequence[float]) -> Cause | None:
    """Parts that count otherwise than by their samples."""
    pairs = zip(shares, shared.weights, strict=True)
    if all(math.isclose(one, other, abs_tol=1e-9) for one, other in pairs):
        return None
    return Cause(
        kind="mean of means",
        what="step.weight",
        why=f"parts of {_each(shared.samples)} samples weigh "
        f"{' and '.join(f'{one:.3f}' for one in shared.weights)}: a mean of the parts' means is "
        "not the mean over the batch where parts differ in size",
        fix="leave step.weight out, or set it to the samples: step.weight = len(inputs)",
    )


def _unknown(row: Row) -> Cause:
    return Cause(
        kind="unknown",
        what=row.found.name,
        why=f"it differs by {row.found.difference:.3g}, most of all; every layer gives each sample "
        "the same output, and the losses agree",
        fix="look at what the loop does to gradients or weights beside loss.backward() and "
        "optimizer.step()",
    )


# -- in lines --------------------------------------------------------------------------------------


def render_verified(one: Verified) -> list[str]:
    """The table, the verdict, and each cause with its fix."""
    head = ("workers", "format", "batches", "parts of the first", "largest difference", "verdict")
    rows = [_cells(row) for row in one.rows]
    if one.aside is not None:
        rows.append(_cells(one.aside))
    lines = [*table(head, rows), ""]
    counts = ", ".join(dict.fromkeys(str(row.case.workers) for row in one.rows))
    formats = " and ".join(
        f"{dtype} to {ALLOWED[dtype]:g}"
        for dtype in dict.fromkeys(row.case.dtype for row in one.rows)
    )
    if one.is_equal:
        lines.append(f"equal: {counts} workers compute what one does ({formats})")
    else:
        number = sum(not row.is_equal for row in one.rows)
        lines.append(f"different: {number} of {len(one.rows)} rows")
    for cause in one.causes:
        lines += [f"{cause.what}: {cause.why}", f"  fix: {cause.fix}"]
    if one.aside is not None and one.aside.is_equal:
        lines.append("without what is set aside several workers compute what one does")
    return [*lines, *(f"note: {note}" for note in one.notes)]


def _cells(row: Row) -> tuple[str, ...]:
    aside = f", without {', '.join(row.case.frozen)}" if row.case.frozen else ""
    where = "" if row.is_equal else f" at {row.found.name}"
    return (
        f"{row.case.workers}",
        row.case.dtype,
        ", ".join(map(str, row.found.sizes)),
        _parts(row),
        f"{row.found.difference:.1e}",
        ("equal" if row.is_equal else f"different{where}") + aside,
    )


def _parts(row: Row) -> str:
    """``7 + 6``; of many: ``3 x 7 + 2 x 6``."""
    each, more = divmod(row.found.sizes[0], row.case.workers)
    counts = [(more, each + 1), (row.case.workers - more, each)]
    return " + ".join(
        f"{size}" if count == 1 else f"{count} x {size}" for count, size in counts if count
    )


def _each(sizes: Sequence[int]) -> str:
    return " and ".join(str(one) for one in sorted(set(sizes), reverse=True))


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def _kind(case: Case) -> str:
    return "even" if case.is_even else "uneven"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith("the other workers")]
    return lines[-1].strip() if lines else type(error).__name__
