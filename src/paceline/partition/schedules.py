"""Generate pipeline schedules, and run them in virtual time.

A schedule says which rank computes which micro-batch when. There are P ranks and M micro-batches; F
is forward, B backward; the number is the micro-batch. Two stages, four micro-batches, a backward
pass as long as a forward one:

    gpipe        all forward, then all backward: M micro-batches are alive in each stage

        rank 0   F0 F1 F2 F3 .. .. B3 B2 B1 B0          backward in the other order: what was
        rank 1   .. F0 F1 F2 F3 B3 B2 B1 B0 ..          computed last is freed first

    1f1b         a backward pass runs as soon as it can: at most P - stage are alive

        rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
        rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    interleaved  1f1b, each rank with several stages (0 and 2, 1 and 3): the pipeline fills with
                 shorter ones, and more micro-batches are alive; P divides M

        rank 0   F0 F1 F0'F1'F2 ...                     F0 in stage 0, F0' in stage 2
        rank 1   .. F0 F1 F0'B0'...

Micro-batches need not be of one size: other ranks wait while the first one passes through the
stages and while the last one comes back, so with 1f1b these two may be smaller
(`pipeline.micro_batch_shares`), but not so small that a rank then waits for their larger neighbour.

A schedule is a pure generator: it yields the actions of one rank after the other, in the order in
which that rank computes them. Its duration is found by running it: an action begins when its rank
is free and its inputs are ready (F of the stage before, B of the stage after). Where the ranks are
processes that share fewer cores, those that compute at the same time share the cores evenly. A bit
above 300 lines, since schedules are read beside the rules by which they run.

Sources: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019; D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for
DNN Training", SOSP 2019 (1f1b), and "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021 (interleaved).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError, ProtocolError

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
_ROUNDING = 1e-12


class PipelineAction(NamedTuple):
    """A rank computes a stage on a micro-batch.

    Attributes:
        kind: `FORWARD`, `BACKWARD`, or `WEIGHTS`: late gradients of all micro-batches at once, for
            which no other rank waits (`with_weights`).
    """

    rank: int
    kind: str
    stage: int
    micro_batch: int


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Iterator[PipelineAction]:
    """Yield all forward passes, then all backward ones; a rank takes its stages in turn.

    Example:
        >>> " ".join(f"{action.kind}{action.micro_batch}" for action in gpipe(1, 3))
        'F0 F1 F2 B2 B1 B0'
    """
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        for stage in stages:
            for number in range(micro_batches):
                yield PipelineAction(rank, FORWARD, stage, number)
        for stage in reversed(stages):
            for number in reversed(range(micro_batches)):
                yield PipelineAction(rank, BACKWARD, stage, number)


def one_f_one_b(
    ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> Iterator[PipelineAction]:
    """Yield P - 1 - rank forward passes, then one forward and one backward pass in turn.

    Example:
        >>> rank_0 = [action for action in one_f_one_b(2, 3) if action.rank == 0]
        >>> " ".join(f"{action.kind}{action.micro_batch}" for action in rank_0)
        'F0 F1 B0 F2 B1 B2'
    """
    if stages_per_rank != 1:
        raise ConfigError("1f1b has one stage for each worker; interleaved has several")
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        for number in range(micro_batches + ahead):
            if number < micro_batches:
                yield PipelineAction(rank, FORWARD, rank, number)
            if number >= ahead:
                yield PipelineAction(rank, BACKWARD, rank, number - ahead)


def interleaved(
    ranks: int, micro_batches: int, stages_per_rank: int = 2
) -> Iterator[PipelineAction]:
    """Yield 1f1b over stages ``rank, rank + P, ...``: P micro-batches through each of them in turn.

    Raises:
        ConfigError: P does not divide M.
    """
    if micro_batches % ranks:
        raise ConfigError(
            f"interleaved needs a multiple of the number of workers: {micro_batches} micro-batches "
            f"are not a multiple of {ranks}; write --micro-batches "
            f"{(micro_batches // ranks + 1) * ranks}"
        )
    total, turn = micro_batches * stages_per_rank, ranks * stages_per_rank

    def action(rank: int, kind: str, number: int) -> PipelineAction:
        chunk = number // ranks % stages_per_rank
        chunk = chunk if kind == FORWARD else stages_per_rank - 1 - chunk
        micro_batch = number // turn * ranks + number % ranks
        return PipelineAction(rank, kind, chunk * ranks + rank, micro_batch)

    for rank in range(ranks):
        ahead = min(total, 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks)
        for number in range(total + ahead):
            if number < total:
                yield action(rank, FORWARD, number)
            if number >= ahead:
                yield action(rank, BACKWARD, number - ahead)


def with_weights(actions: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    """Add late gradients to a schedule: for each stage, those of all micro-batches at the end.

    Example:
        >>> " ".join(action.kind for action in with_weights(gpipe(1, 2)))
        'F F B B W'
    """
    last: dict[tuple[int, int], PipelineAction] = {}
    for action in actions:
        yield action
        last[action.rank, action.stage] = action
    for action in last.values():
        yield action._replace(kind=WEIGHTS)


PipelineSchedule = Callable[[int, int, int], Iterator[PipelineAction]]

SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def live_micro_batches(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Return how many micro-batches are alive in a stage at most, with a rank for each stage.

    Example:
        >>> [live_micro_batches("1f1b", stage, 3, 8) for stage in range(3)]
        [3, 2, 1]
    """
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


class ComputedSpan(NamedTuple):
    """An action, and the seconds at which its computing starts and stops."""

    action: PipelineAction
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """The timeline of a schedule.

    Args:
        seconds: until the last rank is done.
        spans: the span of each action, in the order in which they end.
        num_ranks: P.
        peak_live: for each stage, how many micro-batches are alive at most, that is between the
            start of their forward and the end of their backward pass.
    """

    seconds: float
    spans: tuple[ComputedSpan, ...]
    num_ranks: int
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they spend waiting."""
        busy_s = sum(span.stop_s - span.start_s for span in self.spans)
        return 1.0 - busy_s / (self.seconds * self.num_ranks) if self.seconds else 0.0


_KINDS = (FORWARD, BACKWARD, WEIGHTS)
"""The kind of action that each field of `StageTimes` is for."""


class StageTimes(NamedTuple):
    """Seconds that a stage is busy.

    Attributes:
        forward_s, backward_s: with a micro-batch, its messages included.
        weights_s: at the end of an update, with the late gradients of all micro-batches.
        first_s: additional seconds of the first backward pass, which allocates gradients.
    """

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    first_s: float = 0.0

    def of(self, action: PipelineAction, first_backward: dict[int, PipelineAction]) -> float:
        """Return the seconds of an action that begins now.

        Args:
            first_backward: of each stage; an action that is one is noted there.
        """
        seconds: float = self[_KINDS.index(action.kind)]
        if action.kind == BACKWARD and first_backward.setdefault(action.stage, action) is action:
            seconds += self.first_s
        return seconds


def run_schedule(
    actions: Iterable[PipelineAction],
    stages: Sequence[StageTimes],
    cores: float = float("inf"),
    each: Sequence[Sequence[StageTimes]] = (),
) -> ScheduleRun:
    """Run a schedule in virtual time.

    Args:
        stages: times of each stage.
        cores: that the ranks share, one for each rank that computes; infinite: each has its own.
        each: times of each stage for each micro-batch; empty: all are as in ``stages``. Weights,
            of all micro-batches at once, always are.

    Raises:
        ProtocolError: the schedule waits for itself.
    """
    queues: dict[int, list[PipelineAction]] = {}
    for action in actions:
        queues.setdefault(action.rank, []).append(action)
    places, done = dict.fromkeys(queues, 0), set[tuple[str, int, int]]()
    first_backward = dict[int, PipelineAction]()  # by stage
    running: dict[int, tuple[float, float]] = {}  # rank -> seconds left, start
    spans, now_s = list[ComputedSpan](), 0.0
    while True:
        for rank, queue in queues.items():
            if rank in running or places[rank] == len(queue):
                continue
            action = queue[places[rank]]
            if _needed(action, len(stages)) <= done:
                is_own = bool(each) and action.kind != WEIGHTS
                times = (each[action.micro_batch] if is_own else stages)[action.stage]
                running[rank] = (times.of(action, first_backward), now_s)
        if not running:
            break
        share = min(1.0, cores / len(running))
        least_s = min(left_s for left_s, _ in running.values())
        now_s += least_s / share
        for rank, (left_s, start_s) in list(running.items()):
            if left_s - least_s > _ROUNDING * left_s:
                running[rank] = (left_s - least_s, start_s)
                continue
            del running[rank]
            action = queues[rank][places[rank]]
            places[rank] += 1
            done.add(action[1:])
            spans.append(ComputedSpan(action, start_s, now_s))
    if any(places[rank] < len(queue) for rank, queue in queues.items()):
        raise ProtocolError("a pipeline schedule waits for itself")
    peak = tuple(_peak_live(spans, stage) for stage in range(len(stages)))
    return ScheduleRun(seconds=now_s, spans=tuple(spans), num_ranks=len(queues), peak_live=peak)


def _needed(action: PipelineAction, num_stages: int) -> set[tuple[str, int, int]]:
    """Return the kind, stage and micro-batch of what must be computed before an action."""
    if action.kind == FORWARD:
        return {(FORWARD, action.stage - 1, action.micro_batch)} if action.stage else set()
    if action.kind == WEIGHTS:  # needs only its own rank's actions, which precede it there
        return set()
    needed = {(FORWARD, action.stage, action.micro_batch)}
    if action.stage < num_stages - 1:
        needed.add((BACKWARD, action.stage + 1, action.micro_batch))
    return needed


def _peak_live(spans: Sequence[ComputedSpan], stage: int) -> int:
    """Count the micro-batches alive at most: from a forward pass's start to its backward's end."""
    events = []
    for action, start_s, stop_s in spans:
        if action.stage == stage and action.kind != WEIGHTS:
            is_forward = action.kind == FORWARD
            events.append((start_s if is_forward else stop_s, is_forward))
    live = peak = 0
    for _, is_forward in sorted(events):  # of events at the same moment, ends come first
        live += 1 if is_forward else -1
        peak = max(peak, live)
    return peak
