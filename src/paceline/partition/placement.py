"""Price a cut: each part's nodes, its time and memory, and the traffic over its borders.

    part     0            1        2             in the order of the pipeline, one worker each
    nodes    0 1 2        3 4      5
    worker   1            0        2             a slow worker gets fewer layers, at any place

A part's memory, with k copies of optimizer state and m of M micro-batches alive in it:

    parameters (1 + gradient 1 + k)  +  buffers  +  m x activations kept
                                     +  M x inputs from its border: allocated for all at once
                                     +  (M - m) x what is kept for late gradients
                                     +  the largest late gradient, while it is added

What is kept for the backward pass is counted tensor by tensor; temporary buffers of operations, and
the memory of Python and torch themselves, are not included. Above 300 lines, since a price and the
rules for which prices are allowed are read together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..plan import format_bytes
from .graph import WorkGraph
from .pipeline import Pipeline
from .schedules import SCHEDULES, ScheduleRun, StageTimes, run_schedule, with_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPrice:
    """The time and memory that one part of a cut takes on its worker.

    Args:
        nodes: numbers of the part's nodes.
        worker: number of its worker.
        forward_s, backward_s: computing per micro-batch.
        late_s: computing per micro-batch that is put off to the end of the update.
        border_forward_s, border_backward_s: receiving and sending per micro-batch, over both
            borders.
        cut_ties: names of tied parameters of which another part holds a copy, too.
        update_s: per update: the optimizer, and adding up the gradients of these copies.
        first_s: per update: how much longer its first micro-batch takes.
        late_first_s: likewise of the work that is put off.
        parameter_bytes: with the tied parameters that it uses.
        activation_bytes: kept for one micro-batch until its backward pass.
        out_bytes: sent forward over the border after it, per micro-batch.
        gradient_bytes: received back over the border after it, per micro-batch.
        memory_bytes: held at most.
        live: micro-batches alive in it at most.
    """

    nodes: tuple[int, ...]
    worker: int
    forward_s: float
    backward_s: float
    late_s: float
    border_forward_s: float
    border_backward_s: float
    cut_ties: tuple[str, ...]
    update_s: float
    first_s: float
    late_first_s: float
    parameter_bytes: int
    activation_bytes: int
    out_bytes: int
    gradient_bytes: int
    memory_bytes: int
    live: int

    @property
    def work_s(self) -> float:
        """Seconds of computing per micro-batch, late work included."""
        return self.forward_s + self.backward_s + self.late_s

    @property
    def border_s(self) -> float:
        """Seconds of receiving and sending per micro-batch."""
        return self.border_forward_s + self.border_backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A cut and its price.

    Args:
        parts: in the order of the pipeline.
        micro_batches: M, the number that the price is for.
    """

    parts: tuple[PartPrice, ...]
    micro_batches: int

    @property
    def loads_s(self) -> tuple[float, ...]:
        """Seconds per micro-batch that each part's worker is busy."""
        return tuple(
            part.work_s
            + part.border_s
            + (part.update_s + part.first_s + part.late_first_s) / self.micro_batches
            for part in self.parts
        )

    @property
    def step_s(self) -> float:
        """Seconds of an update by the formula of `partition`, by which cuts are compared."""
        loads = self.loads_s
        return sum(loads) + (self.micro_batches - 1) * max(loads)

    @property
    def cut_bytes(self) -> int:
        """Bytes over all borders, forward and back, per update."""
        micro_batch_bytes = sum(part.out_bytes + part.gradient_bytes for part in self.parts)
        return micro_batch_bytes * self.micro_batches

    @property
    def balance(self) -> float:
        """The mean load over the largest, for a worker per part; 1 is even."""
        return self.balance_of(len(self.parts))

    def balance_of(self, num_workers: int) -> float:
        """Return the balance where worker r of ``num_workers`` has parts r, r + num_workers, ..."""
        loads = [sum(self.loads_s[number::num_workers]) for number in range(num_workers)]
        return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0

    @property
    def memory_bytes(self) -> int:
        """The memory of the part that holds most."""
        return max(part.memory_bytes for part in self.parts)

    def part_of(self) -> dict[int, int]:
        """Return the number of each node's part."""
        return {node: number for number, part in enumerate(self.parts) for node in part.nodes}


def place(
    graph: WorkGraph, pipeline: Pipeline, part_of: Sequence[int], order: Sequence[int] = ()
) -> Placement:
    """Price the cut that puts each node into a given part.

    Args:
        part_of: part of each node; no edge may lead to an earlier part.
        order: worker of each part; empty: part p is on worker p.

    Raises:
        ConfigError: an edge leads to an earlier part, a part is empty, or the number of parts is
            not the pipeline's.
    """
    num_parts = pipeline.num_parts
    if len(part_of) != len(graph) or set(part_of) != set(range(num_parts)):
        raise ConfigError(
            f"a cut into {num_parts} parts needs a part for each of {len(graph)} nodes"
        )
    for edge in graph.edges:
        for target in edge.targets:
            if edge.source >= 0 and target < len(graph) and part_of[target] < part_of[edge.source]:
                raise ConfigError(f"{edge.name} leads back to an earlier part")
    borders = [
        sum(1 << node for node, part in enumerate(part_of) if part < number)
        for number in range(num_parts + 1)
    ]
    order = tuple(order) or tuple(range(num_parts))
    return Placement(
        parts=tuple(
            part_between(
                graph, pipeline, number, (borders[number], borders[number + 1]), order[number]
            )
            for number in range(num_parts)
        ),
        micro_batches=pipeline.micro_batches,
    )


def part_between(
    graph: WorkGraph, pipeline: Pipeline, number: int, borders: tuple[int, int], worker: int
) -> PartPrice:
    """Price the part between two borders.

    Args:
        number: number of the part, in the order of the pipeline.
        borders: the sets of nodes before and after the part.
        worker: number of the part's worker.
    """
    before, after = borders
    inside = after & ~before
    numbers = [i for i in range(len(graph)) if inside >> i & 1]
    nodes = [graph.nodes[i] for i in numbers]
    speed = pipeline.workers[worker].speed
    entering, leaving = list(graph.crossing(before)), list(graph.crossing(after))
    crossing = entering + leaving
    ties = [tie for tie in graph.ties if any(inside >> i & 1 for i in tie.nodes)]
    cut_ties = [tie for tie in ties if not all(inside >> i & 1 for i in tie.nodes)]
    parameter_bytes = sum(n.parameter_bytes for n in nodes) + sum(t.num_bytes for t in ties)
    buffer_bytes = sum(node.buffer_bytes for node in nodes)
    entering_bytes = sum(edge.num_bytes for edge in entering)
    kept_bytes = sum(node.activation_bytes for node in nodes) + entering_bytes
    late_bytes = sum(node.late_bytes for node in nodes) + entering_bytes
    added_bytes = max((node.late_gradient_bytes for node in nodes), default=0)
    return PartPrice(
        nodes=tuple(numbers),
        worker=worker,
        forward_s=sum(node.forward_s for node in nodes) / speed,
        backward_s=sum(node.backward_s for node in nodes) / speed,
        late_s=sum(node.late_s for node in nodes) / speed,
        border_forward_s=sum(pipeline.message_s(edge.num_bytes) for edge in crossing),
        border_backward_s=sum(pipeline.message_s(edge.gradient_bytes) for edge in crossing),
        cut_ties=tuple(tie.name for tie in cut_ties),
        update_s=parameter_bytes * pipeline.update_s_per_byte / speed
        + sum(2.0 * pipeline.message_s(tie.num_bytes) for tie in cut_ties),
        first_s=sum(node.first_s for node in nodes if not node.late_bytes) / speed,
        late_first_s=sum(node.first_s for node in nodes if node.late_bytes) / speed,
        parameter_bytes=parameter_bytes,
        activation_bytes=kept_bytes,
        out_bytes=sum(edge.num_bytes for edge in leaving),
        gradient_bytes=sum(edge.gradient_bytes for edge in leaving),
        memory_bytes=held_bytes(
            pipeline, number, parameter_bytes, buffer_bytes, kept_bytes, late_bytes, added_bytes
        ),
        live=pipeline.live(number),
    )


def held_bytes(
    pipeline: Pipeline,
    number: int,
    parameter_bytes: int,
    buffer_bytes: int,
    kept_bytes: int,
    late_bytes: int,
    added_bytes: int,
) -> int:
    """Return the memory of part ``number``, as drawn above.

    Args:
        kept_bytes, late_bytes: of a micro-batch, until its backward pass and after it.
        added_bytes: of its largest late gradient.
    """
    live = pipeline.live(number)
    state_bytes = (2 + pipeline.state_copies) * parameter_bytes + buffer_bytes
    rest_bytes = (pipeline.micro_batches - live) * late_bytes
    return state_bytes + live * kept_bytes + rest_bytes + added_bytes


def pipeline_step(
    placement: Placement,
    pipeline: Pipeline,
    cores: float,
    schedule: str = "",
    each: Sequence[Placement] = (),
) -> ScheduleRun:
    """Run a cut in virtual time, without the optimizer's update.

    Args:
        schedule: empty: the pipeline's.
        each: the same cut, priced at the size of each micro-batch; empty: all are alike.
    """
    actions = SCHEDULES[schedule or pipeline.schedule](
        pipeline.num_workers, pipeline.micro_batches, pipeline.parts_each
    )
    times = [stage_times(cut) for cut in each]
    if any(part.late_s or part.late_first_s for part in placement.parts):
        actions = with_weights(actions)
    return run_schedule(actions, stage_times(placement), cores, times)


def stage_times(placement: Placement) -> list[StageTimes]:
    """Return the seconds that each part is busy, its messages included."""
    return [
        StageTimes(
            part.forward_s + part.border_forward_s,
            part.backward_s + part.border_backward_s,
            part.late_s * placement.micro_batches + part.late_first_s,
            part.first_s,
        )
        for part in placement.parts
    ]


def is_allowed(placement: Placement, pipeline: Pipeline) -> bool:
    """Whether a cut meets the limits on memory, ties and trained parts of its pipeline."""
    cuts_ties = any(part.cut_ties for part in placement.parts)
    if pipeline.trains_each and not all(part.parameter_bytes for part in placement.parts):
        return False
    return not too_large(placement, pipeline) and not (pipeline.keeps_ties and cuts_ties)


def even_cut(graph: WorkGraph, pipeline: Pipeline) -> Placement:
    """Give each part the same number of layers, in order; the first parts take one more if needed.

    Raises:
        ConfigError: there are more parts than nodes.
    """
    return place(graph, pipeline, even_parts(graph, pipeline.num_parts))


def even_parts(graph: WorkGraph, num_parts: int) -> tuple[int, ...]:
    """Return the part of each node in the even cut; nodes without parameters follow the last layer.

    Example:
        >>> from paceline.partition.graph import chain
        >>> even_parts(chain("abcde", seconds=[1.0] * 5, num_bytes=4), 4)
        (0, 0, 1, 2, 3)
    """
    check_parts(len(graph), num_parts)
    counts = [node.num_layers for node in graph.nodes]
    if sum(count > 0 for count in counts) < num_parts:
        counts = [1] * len(graph)
    layers = [i for i, count in enumerate(counts) if count]
    share, rest = divmod(len(layers), num_parts)
    starts, start = set(), 0
    for part in range(num_parts - 1):
        start += share + (part < rest)
        starts.add(layers[start])
    parts, part = [], 0
    for i in range(len(graph)):
        part += i in starts
        parts.append(part)
    return tuple(parts)


def check_parts(num_pieces: int, num_parts: int, why: str = "") -> None:
    """Raise ConfigError where there are more parts than pieces.

    Args:
        num_pieces: pieces that the model can be cut into.
        why: the reason why there are no more pieces.
    """
    if num_parts > num_pieces:
        s = "s" * (num_pieces != 1)
        raise ConfigError(
            f"{num_parts} parts are wanted, but this model has only {num_pieces} piece{s} that can "
            f"be cut apart{f' ({why})' if why else ''}; write -n {num_pieces}, or split the data"
        )


def too_large(placement: Placement, pipeline: Pipeline) -> str:
    """Say which part does not fit its worker's memory, and by how much; empty: all fit."""
    for number, part in enumerate(placement.parts):
        limit = pipeline.workers[part.worker].memory_bytes
        if limit is not None and part.memory_bytes > limit:
            over = format_bytes(part.memory_bytes - limit)
            return (
                f"part {number} needs {format_bytes(part.memory_bytes)}, but worker {part.worker} "
                f"has {format_bytes(limit)}: {over} too little"
            )
    return ""
