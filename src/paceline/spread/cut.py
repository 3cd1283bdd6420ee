"""Where a model is cut for its workers: measured by the first of them, the same in all.

    a mini-batch of the data -> what the script calls the model with -> operations (splits/tracing)
         -> proved: rows are computed by themselves       -> costs of pieces, measured
         -> the cut, and micro-batches (partition/)        -> this worker's part, and all borders

What a cut would compute otherwise than the model is refused here, before anything runs: batch norm
in training, outputs that are no rows, code that reads ``self.training`` itself, buffers that each
forward pass changes. Above 300 lines, since all that a cut is proved by stands beside it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..exchange.group import MemberGroup
from ..partition.cuts import FastestCut, MicroBatches, fastest_cut
from ..partition.graph import WorkGraph
from ..partition.names import SplitName
from ..partition.pipeline import (
    ALIKE,
    MICRO_BATCHES_EACH,
    EndSizes,
    Pipeline,
    micro_batch_shares,
    workers,
)
from ..partition.placement import Placement
from ..splits.clocks import TimedClock, measure_loopback
from ..splits.measuring import measure
from ..splits.parts import ModelPart, make_parts
from ..splits.tracing import TracedModel, trace, untouched
from ..system.processors import num_cores
from .borders import Flow, Inputs, find_borders, find_flow, leaves_of, sent_bytes
from .chunks import TensorShape
from .group import Ranks, tell_all
from .modes import modes_kept, refuse_batch_norm
from .own_code import FollowedCode, are_equal, difference, set_by_forward

_CLOSE = 1e-4
BUFFER_CHANGES = (
    "{}: a buffer that each forward pass in training changes, and where a model is split there is "
    "one for each micro-batch, not for each batch; use --split data or shard"
)
_UNEVEN = 1.15
"""So many times faster than another one a worker gets more to do."""
_MOST_ROUNDS = 3
"""Of measuring how fast workers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """What a worker knows of the cut.

    Args:
        parts: of all, in their order.
        code: the model's own, which is not run.
        borders: what crosses each: inputs, ..., outputs.
        flow: where gradients cross them.
        form: what the model gives, as torch's trees have it.
        shares: of each worker's mini-batch, by its number in the copy, what each micro-batch is.
        order: of a copy's workers, whose part comes first.
        schedule: what micro-batches follow in training.
        fixed_rows: of each micro-batch, where it can be no other; None: any number.
        balance: that is predicted, the mean over the most.
        note: for the plan.
        sent_bytes: between all workers, an update.
        frozen: modules whose buffers a forward pass would change if they were in training.
    """

    parts: tuple[ModelPart, ...]
    code: FollowedCode
    borders: tuple[tuple[TensorShape, ...], ...]
    flow: Flow
    form: Any
    shares: tuple[tuple[float, ...], ...]
    order: tuple[int, ...]
    schedule: str
    fixed_rows: int | None
    balance: float
    note: str
    sent_bytes: int
    frozen: tuple[str, ...] = ()


FEW = 4
"""Samples with which operations are found."""
_MEASURED_S = 0.4
"""About how long the batch that is measured may take for a step."""


def measured_s(model: nn.Module, given: Sequence[Tensor]) -> float:
    """What this worker takes for these, forward and backward."""
    with untouched(model):
        return sum(TimedClock().both(lambda: model(*given), model))


def make_cut(
    model: nn.Module,
    inputs: Inputs,
    mini_batch: int,
    ranks: Ranks,
    name: SplitName,
    seconds: Callable[[nn.Module, Sequence[Tensor]], float] = measured_s,
) -> ModelCut:
    """The cut; all workers come to the same.

    Args:
        mini_batch: samples of a worker's, the most.
        name: with its schedule; gpipe where it says none.
        seconds: measures how fast this worker is, while all others do, too.

    Raises:
        ConfigError: the model cannot be cut into so many parts, or would compute something else.
    """
    name = name if name.schedule else replace(name, schedule="gpipe")
    given = inputs(min(mini_batch, FEW))
    code = followed(model, given)
    traced = code.traced
    _refuse_too_few(traced, name)
    refuse_other_results(model, traced, given)
    frozen = _refuse_changes(model, given)
    seat = ranks.everyone.rank
    took_s, speeds = _measured_speeds(lambda: seconds(model, given), ranks.everyone, name)
    most = min(mini_batch, max(FEW, int(_MEASURED_S * len(given[0]) / max(took_s, 1e-9))))
    cores, own = num_cores() / torch.get_num_threads(), None
    if seat < max(1, cores):  # as many as compute at a time, since they take memory's time, too
        own = _choose(traced, inputs, (most, mini_batch), name, speeds)
    chosen = tell_all(ranks.everyone, own)[0]
    _refuse_other_pieces(traced, chosen, seat)
    parts, rows = make_parts(traced, chosen["part_of"]), _rows(mini_batch, chosen["most"])
    is_fixed = traced.how == "torch.export"
    if is_fixed:
        parts = make_parts(trace(model, inputs(rows)), chosen["part_of"])
    sizes = (rows, rows) if is_fixed else (2, 3)
    borders, form = find_borders(model, parts, inputs, sizes)
    with untouched(model):
        flow = find_flow(parts, inputs(sizes[0]), is_known=not traced.kept)
    return ModelCut(
        parts=parts, code=code, borders=borders, flow=flow, form=form,
        shares=micro_batch_shares(name.parts, chosen["most"], EndSizes(*chosen["ends"])),
        order=tuple(chosen["order"]), balance=chosen["balance"], note=chosen["note"],
        schedule=name.schedule,
        fixed_rows=rows if is_fixed else None,
        sent_bytes=sent_bytes(model, borders, mini_batch, name), frozen=frozen,
    )  # fmt: skip


def _refuse_other_pieces(traced: TracedModel, chosen: dict[str, Any], seat: int) -> None:
    """Raise ConfigError where this worker has found another model than the first."""
    if (found := len(traced.pieces)) != (wanted := len(chosen["part_of"])):
        raise ConfigError(
            f"worker {seat} finds {found} pieces in the model, and worker 0 {wanted}: build it "
            "alike in all"
        )


def followed(model: nn.Module, given: Sequence[Tensor]) -> FollowedCode:
    """The model's operations, where workers that hold parts of them compute what it computes.

    Raises:
        ConfigError: they would not.
    """
    refuse_batch_norm(model, is_frozen=model.training)
    with modes_kept(model):
        sets = set_by_forward(model.train(), given)
        traced = trace(model, given)
        other = trace(model.eval(), given)
    if difference(traced.graph_module, other.graph_module):
        how = ", followed by torch.export," if traced.how == "torch.export" else ""
        raise ConfigError(
            f"{type(model).__name__}{how} computes by ``self.training`` outside of torch's layers, "
            "which a cut would freeze: let a layer do it (nn.Dropout), or use --split data"
        )
    return FollowedCode(traced, sets)


def _refuse_too_few(traced: TracedModel, name: SplitName) -> None:
    """Raise ConfigError where there are more parts than pieces, with what keeps pieces together."""
    wanted = name.parts * name.parts_each
    if (found := len(traced.pieces)) >= wanted:
        return
    kept = "; ".join(f"{one.name or 'it'} is kept whole: {one.why}" for one in traced.kept[:2])
    raise ConfigError(
        f"{name} is {wanted} parts, and {type(traced.module).__name__} has {found} "
        f"piece{'s' * (found > 1)} that can be cut apart{f' ({kept})' if kept else ''}: use fewer "
        "parts, or --split shard"
    )


def refuse_other_results(model: nn.Module, traced: TracedModel, given: Sequence[Tensor]) -> None:
    """Raise ConfigError where rows of a batch are not computed each by itself."""
    if any(not one.ndim or len(one) != len(given[0]) for one in given):
        raise ConfigError(
            f"{type(model).__name__} is called with tensors {[list(one.shape) for one in given]}: "
            "a split model's inputs have a row for each sample"
        )
    if len(given[0]) < 2:
        return
    middle = len(given[0]) // 2
    halves = [[one[:middle] for one in given], [one[middle:] for one in given]]
    with modes_kept(model), untouched(model), torch.no_grad():
        whole = leaves_of(model.eval()(*given))
        parts = [leaves_of(model(*half)) for half in halves]
    for one, first, second in zip(whole, *parts, strict=True):
        is_rows = one.ndim and len(one) == len(first) + len(second)
        if not is_rows or not torch.allclose(
            one, torch.cat([first, second]), rtol=_CLOSE, atol=_CLOSE, equal_nan=True
        ):
            raise ConfigError(
                f"{type(model).__name__} gives something else for a batch than for its halves: its "
                "samples depend on each other, or its output is no row for each (a loss: let the "
                "model return outputs, and the script compute the loss); use --split data"
            )


def _refuse_changes(model: nn.Module, given: Sequence[Tensor]) -> tuple[str, ...]:
    """Modules whose buffers a forward pass in training changes, all of them frozen.

    Raises:
        ConfigError: one is not, and micro-batches would change it several times an update.
    """
    with modes_kept(model), untouched(model), torch.no_grad():
        before = {name: one.clone() for name, one in model.named_buffers()}
        model.train()(*given)
        changed = [n for n, one in model.named_buffers() if not are_equal(before.get(n), one)]
    owners = {name: name.rpartition(".")[0] for name in changed}
    for name, owner in owners.items():
        if model.get_submodule(owner).training or not model.training:
            raise ConfigError(BUFFER_CHANGES.format(name))
    return tuple(dict.fromkeys(owners.values()))


def _measured_speeds(
    measure_s: Callable[[], float], everyone: MemberGroup, name: SplitName
) -> tuple[float, list[float]]:
    """What this worker takes, and the speeds of a copy's: all measure at once, and again where they
    differ, since one whose neighbour still loads something is not slow."""
    found = list[list[float]]()
    while len(found) < _MOST_ROUNDS:
        tell_all(everyone, len(found))
        found.append(tell_all(everyone, measure_s()))
        if len(set(speeds := _speeds(found[-1], name))) == 1:
            break
    else:
        speeds = _speeds([statistics.median(one) for one in zip(*found, strict=True)], name)
    return found[-1][everyone.rank], speeds


def _speeds(seconds: Sequence[float], name: SplitName) -> list[float]:
    """Of a copy's workers beside the first of all; of several copies the slowest counts.

    What is not much slower or faster is as fast.
    """
    slowest = [max(seconds[number :: name.parts]) for number in range(name.parts)]
    found = [seconds[0] / one for one in slowest]
    is_even = max(found) < _UNEVEN * min(found)
    return [1.0] * name.parts if is_even else found


def _choose(
    traced: TracedModel,
    inputs: Inputs,
    sizes: tuple[int, int],
    name: SplitName,
    speeds: Sequence[float],
) -> dict[str, Any]:
    """What the first worker finds best, as plain data.

    Args:
        sizes: the most samples that are measured, and those of a mini-batch.
    """
    each = name.parts_each
    cores = num_cores() / torch.get_num_threads() / name.copies
    choices = _measured(traced, inputs, sizes, name.parts)
    if each > 1:  # worker k has parts k, k + P, ...: whose they are is not chosen
        speeds = [1.0] * (name.parts * each)
    setting = Pipeline(
        workers=workers(name.parts * each, speeds=speeds), link=measure_loopback(),
        schedule=name.schedule, parts_each=each,
    )  # fmt: skip
    found = fastest_cut(choices, setting, cores)
    cut, part_of = found.placement, found.placement.part_of()
    return {
        "part_of": [part_of[node] for node in range(len(found.graph))],
        "most": found.micro_batches // name.parts,
        "ends": found.ends,
        "balance": cut.balance_of(name.parts),
        "order": [one.worker for one in cut.parts] if each == 1 else list(range(name.parts)),
        "note": _note(found, name) + _of_speeds(cut, speeds),
    }


def _measured(
    traced: TracedModel, inputs: Inputs, sizes: tuple[int, int], num_workers: int
) -> Iterator[MicroBatches]:
    """How many micro-batches a mini-batch can be, and what pieces take for each.

    Args:
        sizes: the most samples that are measured, and those of a mini-batch.
    """
    largest, mini_batch = sizes
    if traced.how == "torch.export":  # its sizes are fixed: traced anew
        for most in MICRO_BATCHES_EACH:
            if mini_batch % most == 0:
                given = inputs(mini_batch // most)
                graph = measure(trace(traced.module, given), given).graph
                yield MicroBatches(most * num_workers, graph)
        return
    least = max(1, largest // MICRO_BATCHES_EACH[-1])
    large = measure(traced, inputs(largest)).graph
    if least == largest:  # one sample
        yield MicroBatches(num_workers, large)
        return
    small = measure(traced, inputs(least)).graph

    def graph_at(rows: int, size: float) -> WorkGraph:
        return small.at(rows * size, least, large, largest)

    for most in MICRO_BATCHES_EACH:
        if most <= mini_batch:
            at = partial(graph_at, _rows(mini_batch, most))
            yield MicroBatches(most * num_workers, at(1.0), at)


def _note(found: FastestCut, name: SplitName) -> str:
    """The cut in one line of the plan."""
    cut, graph, said = found.placement, found.graph, list[str]()
    for one in cut.parts:
        first = graph.nodes[one.nodes[0]].name.partition(" .. ")[0]
        last = graph.nodes[one.nodes[-1]].name.rpartition(" .. ")[2]
        said.append(first if first == last else f"{first} .. {last}")
    return (
        f"{replace(name, schedule='')}: {' | '.join(said)}; {found.micro_batches} micro-batches by "
        f"{name.schedule}{_of_ends(found.ends)}, balance {cut.balance_of(name.parts):.0%}, "
        f"{found.seconds * 1e3:.1f} ms a step predicted, without the optimizer"
    )


def _of_ends(ends: EndSizes) -> str:
    if ends == ALIKE:
        return ""
    return f", the first {ends.first:g} and the last {ends.last:g} times as large as others"


def _of_speeds(cut: Placement, speeds: Sequence[float]) -> str:
    if len(set(speeds)) == 1:
        return ""
    said = ", ".join(f"{speeds[one.worker]:.2f}" for one in cut.parts)
    return f"; workers' speeds, part by part: {said}"


def _rows(mini_batch: int, most: int) -> int:
    """Of the largest micro-batch."""
    return max(1, -(-mini_batch // most))
