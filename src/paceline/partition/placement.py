"""A cut: which nodes each part has, what that takes and holds, and what flows over its borders.

    part     0            1        2             in the order of the pipeline, one worker each
    nodes    0 1 2        3 4      5
    worker   1            0        2             a slow worker gets fewer layers, at any place

A part's memory, with k copies of optimizer state and m micro-batches alive in it:

    parameters (1 + gradient 1 + k)  +  buffers  +  m x activations kept
                                     +  M x what crossed its border: room is made for all at once
                                     +  (M - m) x what is kept for gradients that come late

What a micro-batch leaves behind for the backward pass is counted by tensors, so what computing
needs for a moment and what Python and torch take themselves comes on top. Above 300 lines, since a
price and who is allowed to have it are read together.
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
    """What one part of a cut takes and holds, on its worker.

    Args:
        nodes: their numbers.
        worker: its number.
        forward_s, backward_s: of a micro-batch, computing alone; late_s: what of it is computed at
            the end of an update.
        border_forward_s, border_backward_s: to receive and to send, over both of its borders.
        cut_ties: tied parameters of which it holds a copy, and another part one, too.
        update_s: an update's: the optimizer's, and to add up the gradients of these copies.
        first_s: an update's: that its first micro-batch takes longer.
        parameter_bytes: tied ones that it uses included.
        activation_bytes: that one micro-batch leaves until its backward pass.
        out_bytes: forward over the border behind it, of a micro-batch; gradient_bytes: back.
        memory_bytes: at most.
        live: micro-batches that are alive in it at most.
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
    parameter_bytes: int
    activation_bytes: int
    out_bytes: int
    gradient_bytes: int
    memory_bytes: int
    live: int

    @property
    def work_s(self) -> float:
        """Computing, of a micro-batch."""
        return self.forward_s + self.backward_s + self.late_s

    @property
    def border_s(self) -> float:
        """Receiving and sending, of a micro-batch."""
        return self.border_forward_s + self.border_backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A cut that has its price.

    Args:
        parts: in the order of the pipeline.
        micro_batches: M, that the price is of.
    """

    parts: tuple[PartPrice, ...]
    micro_batches: int

    @property
    def loads_s(self) -> tuple[float, ...]:
        """What each part's worker is busy with one micro-batch."""
        return tuple(
            one.work_s + one.border_s + (one.update_s + one.first_s) / self.micro_batches
            for one in self.parts
        )

    @property
    def step_s(self) -> float:
        """Of an update, as the table of `partition` has it: what a cut is chosen by."""
        loads = self.loads_s
        return sum(loads) + (self.micro_batches - 1) * max(loads)

    @property
    def cut_bytes(self) -> int:
        """Over all borders, forward and back, of an update."""
        a_batch = sum(one.out_bytes + one.gradient_bytes for one in self.parts)
        return a_batch * self.micro_batches

    @property
    def balance(self) -> float:
        """The mean of what workers are busy over the most: 1 is even."""
        return self.balance_of(len(self.parts))

    def balance_of(self, num_workers: int) -> float:
        """Where each has every such part."""
        loads = [sum(self.loads_s[number::num_workers]) for number in range(num_workers)]
        return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0

    @property
    def memory_bytes(self) -> int:
        """Of the worker that needs most."""
        return max(one.memory_bytes for one in self.parts)

    def part_of(self) -> dict[int, int]:
        """The part of each node."""
        return {node: number for number, one in enumerate(self.parts) for node in one.nodes}


def place(
    graph: WorkGraph, pipeline: Pipeline, part_of: Sequence[int], order: Sequence[int] = ()
) -> Placement:
    """The price of a cut that is given, node by node.

    Args:
        part_of: each node's part; no edge leads to an earlier one.
        order: each part's worker; in their order where nothing is said.

    Raises:
        ConfigError: an edge leads to an earlier part, a part is empty, or it is of another number.
    """
    num_parts = pipeline.num_parts
    if len(part_of) != len(graph) or set(part_of) != set(range(num_parts)):
        raise ConfigError(
            f"a cut into {num_parts} parts says a part for each of {len(graph)} nodes"
        )
    for edge in graph.edges:
        for target in edge.targets:
            if edge.source >= 0 and target < len(graph) and part_of[target] < part_of[edge.source]:
                raise ConfigError(f"{edge.name} leads back to an earlier part")
    borders = [
        sum(1 << node for node, part in enumerate(part_of) if part < number)
        for number in range(num_parts + 1)
    ]
    who = tuple(order) or tuple(range(num_parts))
    return Placement(
        parts=tuple(
            part_between(
                graph, pipeline, number, (borders[number], borders[number + 1]), who[number]
            )
            for number in range(num_parts)
        ),
        micro_batches=pipeline.micro_batches,
    )


def part_between(
    graph: WorkGraph, pipeline: Pipeline, number: int, borders: tuple[int, int], worker: int
) -> PartPrice:
    """The price of the part between two borders."""
    before, after = borders
    inside = after & ~before
    nodes = [i for i in range(len(graph)) if inside >> i & 1]
    own = [graph.nodes[i] for i in nodes]
    speed = pipeline.workers[worker].speed
    entering, leaving = list(graph.crossing(before)), list(graph.crossing(after))
    tied = [tie for tie in graph.ties if any(inside >> i & 1 for i in tie.nodes)]
    cut = [tie for tie in tied if not all(inside >> i & 1 for i in tie.nodes)]
    parameter_bytes = sum(one.parameter_bytes for one in own) + sum(one.num_bytes for one in tied)
    live = pipeline.live(number)
    entered = sum(one.num_bytes for one in entering)
    kept = sum(one.activation_bytes for one in own) + entered
    return PartPrice(
        nodes=tuple(nodes),
        worker=worker,
        forward_s=sum(one.forward_s for one in own) / speed,
        backward_s=sum(one.backward_s for one in own) / speed,
        late_s=sum(one.late_s for one in own) / speed,
        border_forward_s=sum(pipeline.message_s(one.num_bytes) for one in entering + leaving),
        border_backward_s=sum(pipeline.message_s(one.gradient_bytes) for one in entering + leaving),
        cut_ties=tuple(tie.name for tie in cut),
        update_s=parameter_bytes * pipeline.update_s_per_byte / speed
        + sum(2.0 * pipeline.message_s(tie.num_bytes) for tie in cut),
        first_s=sum(one.first_s for one in own) / speed,
        parameter_bytes=parameter_bytes,
        activation_bytes=kept,
        out_bytes=sum(one.num_bytes for one in leaving),
        gradient_bytes=sum(one.gradient_bytes for one in leaving),
        memory_bytes=(2 + pipeline.state_copies) * parameter_bytes
        + sum(one.buffer_bytes for one in own)
        + live * kept
        + (pipeline.micro_batches - live) * (entered + sum(one.late_bytes for one in own)),
        live=live,
    )


def pipeline_step(
    placement: Placement,
    pipeline: Pipeline,
    cores: float,
    schedule: str = "",
    each: Sequence[Placement] = (),
) -> ScheduleRun:
    """A cut in virtual time, by its pipeline's schedule or another one; without its update.

    Args:
        each: the same cut at the size of each micro-batch; none: all are alike.
    """
    actions = SCHEDULES[schedule or pipeline.schedule](
        pipeline.num_workers, pipeline.micro_batches, pipeline.parts_each
    )
    times = [stage_times(one) for one in each]
    if any(one.late_s for one in placement.parts):
        actions = with_weights(actions)
    return run_schedule(actions, stage_times(placement), cores, times)


def stage_times(placement: Placement) -> list[StageTimes]:
    """What each part is busy with a micro-batch."""
    return [
        StageTimes(
            one.forward_s + one.border_forward_s,
            one.backward_s + one.border_backward_s,
            one.late_s * placement.micro_batches,
        )
        for one in placement.parts
    ]


def is_allowed(placement: Placement, pipeline: Pipeline) -> bool:
    """Whether all parts fit their workers and train, and what must not be cut apart is not."""
    cuts = any(one.cut_ties for one in placement.parts)
    if pipeline.trains_each and not all(one.parameter_bytes for one in placement.parts):
        return False
    return not too_large(placement, pipeline) and not (pipeline.keeps_ties and cuts)


def even_cut(graph: WorkGraph, pipeline: Pipeline) -> Placement:
    """As many layers for each, in their order; the first parts have one more where it must be.

    Raises:
        ConfigError: there are more parts than nodes.
    """
    return place(graph, pipeline, even_parts(graph, pipeline.num_parts))


def even_parts(graph: WorkGraph, num_parts: int) -> tuple[int, ...]:
    """Each node's part in the even cut; an operation without parameters goes with the layer before.

    Example:
        >>> from paceline.partition.graph import chain
        >>> even_parts(chain("abcde", seconds=[1.0] * 5, num_bytes=4), 4)
        (0, 0, 1, 2, 3)
    """
    check_parts(len(graph), num_parts)
    weights = [one.num_layers for one in graph.nodes]
    if sum(weight > 0 for weight in weights) < num_parts:
        weights = [1] * len(graph)
    layers = [i for i, weight in enumerate(weights) if weight]
    share, more = divmod(len(layers), num_parts)
    starts, at = set(), 0
    for part in range(num_parts - 1):
        at += share + (part < more)
        starts.add(layers[at])
    found, part = [], 0
    for i in range(len(graph)):
        part += i in starts
        found.append(part)
    return tuple(found)


def check_parts(num_pieces: int, num_parts: int, why: str = "") -> None:
    """Raises ConfigError where there are more parts than pieces.

    Args:
        why: these are no more.
    """
    if num_parts > num_pieces:
        s = "s" * (num_pieces != 1)
        raise ConfigError(
            f"{num_parts} parts are wanted, but this model has only {num_pieces} piece{s} that can "
            f"be apart{f' ({why})' if why else ''}; write -n {num_pieces}, or split the data"
        )


def too_large(placement: Placement, pipeline: Pipeline) -> str:
    """Which part does not fit its worker's memory, and by how much; empty: all fit."""
    for number, one in enumerate(placement.parts):
        most = pipeline.workers[one.worker].memory_bytes
        if most is not None and one.memory_bytes > most:
            over = format_bytes(one.memory_bytes - most)
            return (
                f"part {number} needs {format_bytes(one.memory_bytes)}, and worker {one.worker} "
                f"has {format_bytes(most)}: {over} too many"
            )
    return ""
