"""Cut a model for its workers: the first worker measures and chooses, and all use its cut.

    a mini-batch of the data -> the arguments of the model    -> operations (splits/tracing)
         -> proved: rows do not depend on each other          -> costs of pieces, measured
         -> the cut, and micro-batches (partition/)           -> this worker's part, and all borders

A model that would compute something else in parts is refused here, before anything runs: outputs
without a row per sample, code that reads ``self.training`` itself, buffers that each forward pass
changes. With batch norm in training each worker's mini-batch stays whole, so each is normalised by
itself, as where nothing but the data is divided. Above 300 lines, since a cut and its proofs are
read together.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.base import LinkCost
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
from ..splits.clocks import TimedClock
from ..splits.measuring import Measurement, measure, measure_in_turns
from ..splits.parts import ModelPart, make_parts
from ..splits.tracing import TracedModel, trace, untouched
from ..system.processors import num_cores
from .batch_norm import refuse_without_statistics, training_batch_norms
from .borders import Flow, Inputs, find_borders, find_flow, leaves_of, sent_bytes
from .chunks import TensorShape
from .group import Ranks, measured_link, tell_all
from .modes import modes_kept
from .own_code import FollowedCode, are_equal, difference, set_by_forward

_CLOSE = 1e-4
BUFFER_CHANGES = (
    "{}: a buffer that each forward pass in training changes, but a split model makes one pass for "
    "each micro-batch, not for each batch; use --split data or shard"
)
_UNEVEN = 1.15
"""The ratio of speeds from which on a faster worker gets more work."""
_MOST_ROUNDS = 3
"""The largest number of rounds in which the workers' speeds are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """The cut, as every worker knows it.

    Args:
        parts: all parts, in order.
        code: the model's own code, which is not run.
        borders: what crosses each border: inputs, ..., outputs.
        flow: where gradients cross the borders.
        form: form of the model's outputs, as a pytree spec.
        shares: for each worker of a copy, the share of its mini-batch that each micro-batch is.
        order: a copy's workers in the order of their parts.
        schedule: name of the schedule that micro-batches follow in training.
        fixed_rows: the only possible number of rows of a micro-batch; None: any number.
        balance: predicted mean load over the largest.
        note: description of the cut, for the plan.
        sent_bytes: bytes between all workers per update.
        frozen: names of modules whose buffers a forward pass would change in training mode.
        batch_norms: names of the batch norm layers in training; with these, a mini-batch is whole.
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
    batch_norms: tuple[str, ...] = ()


FEW = 4
"""Number of samples with which a model is traced."""
_MEASURED_S = 1.0
"""About how long a step on the measured batch may take, in seconds; costs of larger micro-batches
are on the line through it and a smaller one, which carries the error of both."""


def measured_s(model: nn.Module, args: Sequence[Tensor]) -> float:
    """Return the median seconds that an update takes this worker, forward and backward."""
    with untouched(model):
        return statistics.median(TimedClock(2).updates(lambda: model(*args), model))


def make_cut(
    model: nn.Module,
    inputs: Inputs,
    mini_batch: int,
    ranks: Ranks,
    name: SplitName,
    seconds: Callable[[nn.Module, Sequence[Tensor]], float] = measured_s,
) -> ModelCut:
    """Choose the cut; all workers get the same.

    Args:
        mini_batch: samples of the largest mini-batch of a worker.
        name: how the model is divided; gpipe if it names no schedule.
        seconds: measures this worker's seconds, while all others measure theirs, too.

    Raises:
        ConfigError: the model cannot be cut into so many parts, or would compute something else.
    """
    name = name if name.schedule else replace(name, schedule="gpipe")
    few = inputs(min(mini_batch, FEW))
    code = followed(model, few)
    traced = code.traced
    _refuse_too_few(traced, name)
    refuse_other_results(model, traced, few)
    norms = training_batch_norms(model, is_frozen=model.training)
    frozen = _refuse_changes(model, few, norms)
    seat = ranks.everyone.rank
    at_once, link = _num_at_once(ranks.everyone), _link(ranks)
    few_s, speeds = _measured_speeds(lambda: seconds(model, few), ranks.everyone, name, at_once)
    most = min(mini_batch, max(FEW, int(_MEASURED_S * len(few[0]) / max(few_s, 1e-9))))
    choices = _measured(traced, inputs, (most, mini_batch), name.parts, is_whole=bool(norms))
    # As many workers measure as compute at a time: they share memory bandwidth.
    choice = _choose(choices, name, speeds, link) if seat < at_once else None
    chosen = tell_all(ranks.everyone, choice)[0]
    _refuse_other_pieces(traced, chosen, seat)
    parts, rows = make_parts(traced, chosen["part_of"]), _rows(mini_batch, chosen["each"])
    is_fixed = traced.how == "torch.export"
    if is_fixed:
        parts = make_parts(trace(model, inputs(rows)), chosen["part_of"])
    sizes = (rows, rows) if is_fixed else (2, 3)
    borders, form = find_borders(model, parts, inputs, sizes)
    with untouched(model):
        flow = find_flow(parts, inputs(sizes[0]), is_known=not traced.kept)
    return ModelCut(
        parts=parts, code=code, borders=borders, flow=flow, form=form,
        shares=micro_batch_shares(name.parts, chosen["each"], EndSizes(*chosen["ends"])),
        order=tuple(chosen["order"]), balance=chosen["balance"], note=chosen["note"],
        schedule=name.schedule, fixed_rows=rows if is_fixed else None,
        sent_bytes=sent_bytes(model, borders, mini_batch, name), frozen=frozen, batch_norms=norms,
    )  # fmt: skip


def _refuse_other_pieces(traced: TracedModel, chosen: dict[str, Any], seat: int) -> None:
    """Raise ConfigError where this worker's model has other pieces than the first worker's."""
    if (num_pieces := len(traced.pieces)) != (num_first := len(chosen["part_of"])):
        raise ConfigError(
            f"worker {seat} finds {num_pieces} pieces in the model, and worker 0 {num_first}: "
            "build the same model in all"
        )


def followed(model: nn.Module, args: Sequence[Tensor]) -> FollowedCode:
    """Trace a model whose operations can be divided over workers.

    Raises:
        ConfigError: workers would not compute what the model computes.
    """
    with modes_kept(model):
        sets = set_by_forward(model.train(), args)
        traced = trace(model, args)
        other = trace(model.eval(), args)
    if difference(traced.graph_module, other.graph_module):
        how = ", traced by torch.export," if traced.how == "torch.export" else ""
        raise ConfigError(
            f"{type(model).__name__}{how} reads ``self.training`` outside of torch's layers, "
            "which a cut would freeze: let a layer do it (nn.Dropout), or use --split data"
        )
    return FollowedCode(traced, sets)


def _refuse_too_few(traced: TracedModel, name: SplitName) -> None:
    """Raise ConfigError where there are more parts than pieces, naming what was kept whole."""
    num_parts = name.parts * name.parts_each
    if (num_pieces := len(traced.pieces)) >= num_parts:
        return
    kept = "; ".join(f"{part.name or 'it'} is kept whole: {part.why}" for part in traced.kept[:2])
    raise ConfigError(
        f"{name} needs {num_parts} parts, but {type(traced.module).__name__} has {num_pieces} "
        f"piece{'s' * (num_pieces > 1)} that can be cut apart{f' ({kept})' if kept else ''}: use "
        "fewer parts, or --split shard"
    )


def refuse_other_results(model: nn.Module, traced: TracedModel, args: Sequence[Tensor]) -> None:
    """Raise ConfigError where the rows of a batch depend on each other."""
    if any(not x.ndim or len(x) != len(args[0]) for x in args):
        raise ConfigError(
            f"{type(model).__name__} is called with tensors {[list(x.shape) for x in args]}: "
            "a split model's inputs have a row for each sample"
        )
    if len(args[0]) < 2:
        return
    middle = len(args[0]) // 2
    halves = [[x[:middle] for x in args], [x[middle:] for x in args]]
    with modes_kept(model), untouched(model), torch.no_grad():
        outputs = leaves_of(model.eval()(*args))
        half_outputs = [leaves_of(model(*half)) for half in halves]
    for whole, first, second in zip(outputs, *half_outputs, strict=True):
        is_rows = whole.ndim and len(whole) == len(first) + len(second)
        if not is_rows or not torch.allclose(
            whole, torch.cat([first, second]), rtol=_CLOSE, atol=_CLOSE, equal_nan=True
        ):
            refuse_without_statistics(model)
            raise ConfigError(
                f"{type(model).__name__} returns something else for a batch than for its halves: "
                "its samples depend on each other, or its output has no row for each sample (for a "
                "loss, return outputs and compute the loss in the script); use --split data"
            )


def _refuse_changes(
    model: nn.Module, args: Sequence[Tensor], norms: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of modules whose buffers a forward pass in training mode changes.

    Args:
        norms: batch norm layers, of which the mini-batches are whole.

    Raises:
        ConfigError: one of them is not frozen: micro-batches would change it more than once per
            update.
    """
    with modes_kept(model), untouched(model), torch.no_grad():
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.train()(*args)
        changed = [name for name, b in model.named_buffers() if not are_equal(before.get(name), b)]
    owners = {name: name.rpartition(".")[0] for name in changed}
    owners = {name: owner for name, owner in owners.items() if owner not in norms}
    for name, owner in owners.items():
        if model.get_submodule(owner).training or not model.training:
            raise ConfigError(BUFFER_CHANGES.format(name))
    return tuple(dict.fromkeys(owners.values()))


def _link(ranks: Ranks) -> LinkCost:
    """Measure messages between two workers, the way a copy's workers send them."""
    seats = range(ranks.everyone.size)
    return measured_link(ranks.near(ranks.part("link", seats)))


def _num_at_once(everyone: MemberGroup) -> int:
    """Return how many workers compute at a time: the fewest of any machine, so that all agree."""
    counts: list[int] = tell_all(everyone, max(1, num_cores() // torch.get_num_threads()))
    return min(counts)


def _measured_speeds(
    measure_s: Callable[[], float], everyone: MemberGroup, name: SplitName, at_once: int
) -> tuple[float, list[float]]:
    """Measure the seconds of this worker, and the speeds of a copy's workers.

    As many workers measure at once as compute at a time: of more, some would seem slow because they
    happened to wait for a core. They measure again if their speeds differ: a worker may seem slow
    only because its neighbour is still loading something.
    """
    rounds = list[list[float]]()
    while len(rounds) < _MOST_ROUNDS:
        own_s = 0.0
        for first in range(0, everyone.size, at_once):
            tell_all(everyone, len(rounds))
            if first <= everyone.rank < first + at_once:
                own_s = measure_s()
        rounds.append(tell_all(everyone, own_s))
        if len(set(speeds := _speeds(rounds[-1], name))) == 1:
            break
    else:
        medians = [statistics.median(worker_s) for worker_s in zip(*rounds, strict=True)]
        speeds = _speeds(medians, name)
    return rounds[-1][everyone.rank], speeds


def _speeds(seconds: Sequence[float], name: SplitName) -> list[float]:
    """Return the speeds of a copy's workers relative to worker 0; the slowest of copies counts.

    Speeds that differ little are returned as equal.
    """
    slowest = [max(seconds[number :: name.parts]) for number in range(name.parts)]
    speeds = [seconds[0] / worker_s for worker_s in slowest]
    is_even = max(speeds) < _UNEVEN * min(speeds)
    return [1.0] * name.parts if is_even else speeds


def _choose(
    choices: Iterable[MicroBatches], name: SplitName, speeds: Sequence[float], link: LinkCost
) -> dict[str, Any]:
    """Choose the fastest cut, as plain data."""
    each = name.parts_each
    cores = num_cores() / torch.get_num_threads() / name.copies
    if each > 1:  # worker k has parts k, k + P, ...: their order is fixed
        speeds = [1.0] * (name.parts * each)
    setting = Pipeline(
        workers=workers(name.parts * each, speeds=speeds), link=link,
        schedule=name.schedule, parts_each=each,
    )  # fmt: skip
    fastest = fastest_cut(choices, setting, cores)
    cut, part_of = fastest.placement, fastest.placement.part_of()
    return {
        "part_of": [part_of[node] for node in range(len(fastest.graph))],
        "each": fastest.micro_batches // name.parts,
        "ends": fastest.ends,
        "balance": cut.balance_of(name.parts),
        "order": [part.worker for part in cut.parts] if each == 1 else list(range(name.parts)),
        "note": _note(fastest, name) + _note_of_speeds(cut, speeds),
    }


def _measured(
    traced: TracedModel,
    inputs: Inputs,
    sizes: tuple[int, int],
    num_workers: int,
    *,
    is_whole: bool = False,
) -> Iterator[MicroBatches]:
    """Measure, and yield the possible numbers of micro-batches with the costs of each.

    Args:
        sizes: samples of the largest batch that is measured, and of a mini-batch.
        is_whole: whether each mini-batch must be one micro-batch.
    """
    largest, mini_batch = sizes
    numbers = (1,) if is_whole else MICRO_BATCHES_EACH
    if traced.how == "torch.export":  # its sizes are fixed: trace it again
        for each in numbers:
            if mini_batch % each == 0:
                args = inputs(mini_batch // each)
                graph = measure(trace(traced.module, args), args).graph
                yield MicroBatches(each * num_workers, graph)
        return
    least = min(largest, max(2 if is_whole else 1, largest // MICRO_BATCHES_EACH[-1]))
    measured = measure_in_turns(
        [Measurement(traced, inputs(size)) for size in sorted({least, largest})]
    )
    small, large = measured[0].graph, measured[-1].graph
    if least == largest:  # as few samples as can be measured
        yield MicroBatches(num_workers, large)
        return

    def graph_at(rows: int, size: float) -> WorkGraph:
        return small.at(rows * size, least, large, largest)

    for each in numbers:
        if each <= mini_batch:
            graph_of = partial(graph_at, _rows(mini_batch, each))
            yield MicroBatches(each * num_workers, graph_of(1.0), None if is_whole else graph_of)


def _note(fastest: FastestCut, name: SplitName) -> str:
    """Describe the cut in one line of the plan."""
    cut, graph, layers = fastest.placement, fastest.graph, list[str]()
    for part in cut.parts:
        first = graph.nodes[part.nodes[0]].name.partition(" .. ")[0]
        last = graph.nodes[part.nodes[-1]].name.rpartition(" .. ")[2]
        layers.append(first if first == last else f"{first} .. {last}")
    shares = micro_batch_shares(name.parts, fastest.micro_batches // name.parts, fastest.ends)
    return (
        f"{replace(name, schedule='')}: {' | '.join(layers)}; {sum(map(len, shares))} "
        f"micro-batches by {name.schedule}{_note_of_ends(fastest.ends, shares)}, "
        f"balance {cut.balance_of(name.parts):.0%}, "
        f"{fastest.seconds * 1e3:.1f} ms a step predicted, without the optimizer"
    )


def _note_of_ends(ends: EndSizes, shares: Sequence[Sequence[float]]) -> str:
    if ends == ALIKE:
        return ""
    return f", the first {shares[0][0]:.0%} and the last {shares[-1][-1]:.0%} of a mini-batch"


def _note_of_speeds(cut: Placement, speeds: Sequence[float]) -> str:
    if len(set(speeds)) == 1:
        return ""
    part_speeds = ", ".join(f"{speeds[part.worker]:.2f}" for part in cut.parts)
    return f"; workers' speeds, part by part: {part_speeds}"


def _rows(mini_batch: int, each: int) -> int:
    """Return the rows of the largest of ``each`` micro-batches."""
    return max(1, -(-mini_batch // each))
