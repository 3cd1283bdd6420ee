"""Whether N workers compute what one process does, as a table, and the causes if not.

    for each N, number format, batches      the largest difference of a parameter or buffer
    where it is too large                   the layers that break; the same row without them;
                                            what the losses and weights of its first update show

An update of full-sync is the mean of its pushes, each weighted by its samples: sum_i (n_i / n) g_i.
That is the gradient of the whole batch where the loss is a mean over samples and no layer depends
on other samples. This module must not know how a run is carried out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..config import MOST_PROCESSES
from ..errors import ConfigError, WorkerError
from ..workloads import load_task
from ..workloads.base import Task
from .cases import DTYPES, Dtype, FirstUpdate, Verifiable, VerifyCase
from .layers import BreakingLayer
from .of_script import ScriptSubject
from .of_task import TaskSubject
from .verdict import Cause, Verified, VerifyRow

_CLOSE: dict[Dtype, float] = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative difference of two losses that are the same."""

_OWN_BATCHES = (
    "the script's own batch sampler makes the batches: there is one row for them, instead of one "
    "for batches that N divides and one for others"
)


def verify(
    spec: str | Task,
    workers: Sequence[int],
    args: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Verified:
    """Run ``spec`` by one worker and by several, and compare.

    Args:
        spec: a task, built in, ``package.module:task`` or made here; or a script (a path that ends
            in .py).
        workers: numbers >= 1; each gets its rows.
        args: the script's own.
        say: gets a line for each case.

    Raises:
        ConfigError: there is no such task or script, or it cannot be run small.
    """
    for number in workers:
        if not 1 <= number <= MOST_PROCESSES:
            raise ConfigError(f"-n takes numbers from 1 to {MOST_PROCESSES}, got {number}")
    subject = _subject(spec, args)
    rows: list[VerifyRow] = []
    notes: list[str] = []
    for dtype in DTYPES:
        for case in _cases(workers, dtype):
            if not case.is_even and rows[-1].found.has_own_batches:
                continue  # they would be the same batches again
            say(f"{subject.name}: {dtype}, {_workers(case.workers)}, {_kind(case)} batches")
            try:
                rows.append(VerifyRow(case=case, found=subject.compare(case)))
            except WorkerError as error:
                if dtype != "float64":
                    raise
                notes.append(f"float64: it cannot be computed: {_last_line(error)}")
                break
    if any(row.found.has_own_batches for row in rows):
        notes.append(_OWN_BATCHES)
    different = [row for row in rows if not row.is_equal]
    causes, aside = _explain(subject, different[0]) if different else ((), None)
    return Verified(
        subject=subject.name, rows=tuple(rows), causes=causes, aside=aside, notes=tuple(notes)
    )


def _subject(spec: str | Task, args: Sequence[str]) -> Verifiable:
    if isinstance(spec, Task):
        return TaskSubject(spec)
    if spec.endswith(".py"):
        return ScriptSubject(Path(spec), args)
    if args:
        raise ConfigError(
            f"arguments are for a script, but {spec} is a task: leave out {args[0]!r}"
        )
    return TaskSubject(load_task(spec))


def _cases(workers: Sequence[int], dtype: Dtype) -> Iterator[VerifyCase]:
    for number in dict.fromkeys(workers):
        yield VerifyCase(workers=number, dtype=dtype, is_even=True)
        if number > 1:
            yield VerifyCase(workers=number, dtype=dtype, is_even=False)


# -- causes ---------------------------------------------------------------------------------------


def _explain(subject: Verifiable, row: VerifyRow) -> tuple[tuple[Cause, ...], VerifyRow | None]:
    """The causes of a difference, and the row without the layers among them."""
    layers = subject.breaking_layers(row.case)
    causes = [_cause_of_layer(layer) for layer in layers]
    aside = None
    if layers:
        case = replace(row.case, frozen=tuple(layer.name for layer in layers))
        aside = row = VerifyRow(case=case, found=subject.compare(case))
    if not row.is_equal and subject.draws(row.case):
        causes.append(_DRAWING)
    elif not row.is_equal:
        causes.append(_cause_of_loss(row) or _unknown(row))
    return tuple(causes), aside


_LARGE_PARTS = (
    "parts as large as one worker's batch was: --mini-batch-size, and in a script "
    'prepare(..., batch="per-worker")'
)
_DRAWING = Cause(
    kind="random",
    what="the loop",
    why="a step draws random numbers outside the named layers (noise, mixing, sampling), which "
    "differ between workers and hide any other difference",
    fix="nothing, if the randomness is intended; to compare draw them per sample, in the data set",
)


def _cause_of_layer(layer: BreakingLayer) -> Cause:
    name = f"{layer.name or 'the model'} ({layer.kind})"
    if layer.cause == "random":
        return Cause(
            kind="layer",
            what=name,
            why="it draws random numbers, which differ in each worker's part; on average an "
            "update is the same",
            fix="nothing, if the randomness is intended; p=0 or eval() makes runs comparable",
        )
    is_batch_norm = "BatchNorm" in layer.kind
    why = "its output for a sample depends on the other samples of the batch, and a worker has "
    why += "only its part of them"
    if is_batch_norm:
        why = "it normalises each worker's part of the batch separately, not the whole batch"
    return Cause(
        kind="layer",
        what=name,
        why=why,
        fix=f"GroupNorm or LayerNorm, which look at one sample; or {_LARGE_PARTS}"
        if is_batch_norm
        else f"let it look at one sample at a time; or {_LARGE_PARTS}",
    )


def _cause_of_loss(row: VerifyRow) -> Cause | None:
    """The cause that the first update shows, made at equal parameters; None: none."""
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
        why=f"it is not a mean over samples: {alone.losses[0]:.6g} for the whole batch, "
        f"{weighted:.6g} for its parts by their samples",
        fix="a mean over tokens or weights: step.weight = how many there are; a loss over pairs "
        f"of samples: {_LARGE_PARTS}",
    )


def _cause_of_weights(shared: FirstUpdate, shares: Sequence[float]) -> Cause | None:
    """The cause where parts do not count by their samples; None: they do."""
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


def _unknown(row: VerifyRow) -> Cause:
    return Cause(
        kind="unknown",
        what=row.found.name,
        why=f"it differs most, by {row.found.difference:.3g}; every layer gives each sample "
        "the same output, and the losses agree",
        fix="look at what the loop does to gradients or weights besides loss.backward() and "
        "optimizer.step()",
    )


def _each(sizes: Sequence[int]) -> str:
    return " and ".join(str(one) for one in sorted(set(sizes), reverse=True))


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def _kind(case: VerifyCase) -> str:
    return "even" if case.is_even else "uneven"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith("the other workers")]
    return lines[-1].strip() if lines else type(error).__name__
