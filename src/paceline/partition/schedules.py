"""Who computes which micro-batch when: pipeline schedules, and what they take in virtual time.

P ranks, M micro-batches; F forward, B backward; the number is the micro-batch. Two stages, four
micro-batches, a backward pass as long as a forward one:

    gpipe        all forward, then all backward: M micro-batches are alive in each stage

        rank 0   F0 F1 F2 F3 .. .. B3 B2 B1 B0          backward in the other order: what was
        rank 1   .. F0 F1 F2 F3 B3 B2 B1 B0 ..          computed last is freed first

    1f1b         as soon as one can go back it does: at most P - stage are alive

        rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
        rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    interleaved  1f1b, each rank with several stages (0 and 2, 1 and 3): the pipeline fills with
                 shorter ones, and more micro-batches are alive; P divides M

        rank 0   F0 F1 F0'F1'F2 ...                     F0 in stage 0, F0' in stage 2
        rank 1   .. F0 F1 F0'B0'...

Micro-batches need not be of one size: while the first goes through the stages, and the last comes
back, others wait, so by 1f1b these may be smaller (`pipeline.micro_batch_shares`); not so small
that a rank still waits for the larger one beside them.

A schedule is a pure generator: rank after rank, what each does in its order. What that takes is
found by running it: an action begins when its rank is free and what it needs is there (F of the
stage before, B of the stage behind); where ranks are processes that share fewer cores, those that
compute at a time share them evenly.

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
    """A rank computes a stage on a micro-batch; ``kind`` is `FORWARD`, `BACKWARD`, or `WEIGHTS`: of
    all micro-batches what nobody waits for (`with_weights`)."""

    rank: int
    kind: str
    stage: int
    micro_batch: int


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Iterator[PipelineAction]:
    """All forward, then all backward; where a rank has several stages, one after the other.

    Example:
        >>> " ".join(f"{one.kind}{one.micro_batch}" for one in gpipe(1, 3))
        'F0 F1 F2 B2 B1 B0'
    """
    for rank in range(ranks):
        own = range(rank, ranks * stages_per_rank, ranks)
        for stage in own:
            for number in range(micro_batches):
                yield PipelineAction(rank, FORWARD, stage, number)
        for stage in reversed(own):
            for number in reversed(range(micro_batches)):
                yield PipelineAction(rank, BACKWARD, stage, number)


def one_f_one_b(
    ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> Iterator[PipelineAction]:
    """After P - 1 - rank forward ones, one forward and one backward in turn.

    Example:
        >>> " ".join(f"{one.kind}{one.micro_batch}" for one in one_f_one_b(2, 3) if not one.rank)
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
    """1f1b over stages ``rank, rank + P, ...``: P micro-batches through each of them in turn.

    Raises:
        ConfigError: P does not divide M.
    """
    if micro_batches % ranks:
        raise ConfigError(
            f"interleaved takes micro-batches by the number of workers: {micro_batches} are no "
            f"multiple of {ranks}; write --micro-batches {(micro_batches // ranks + 1) * ranks}"
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
    """A schedule in which each rank at its end has the gradients of weights of all micro-batches.

    Example:
        >>> " ".join(one.kind for one in with_weights(gpipe(1, 2)))
        'F F B B W'
    """
    last: dict[tuple[int, int], PipelineAction] = {}
    for one in actions:
        yield one
        last[one.rank, one.stage] = one
    for one in last.values():
        yield one._replace(kind=WEIGHTS)


PipelineSchedule = Callable[[int, int, int], Iterator[PipelineAction]]

SCHEDULES: dict[str, PipelineSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def live_micro_batches(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """How many are alive in a stage at most, where each has a rank of its own.

    Example:
        >>> [live_micro_batches("1f1b", stage, 3, 8) for stage in range(3)]
        [3, 2, 1]
    """
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


class ComputedSpan(NamedTuple):
    """An action, and when it is computed."""

    action: PipelineAction
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """What a schedule takes.

    Args:
        seconds: until the last rank is done.
        spans: each action, in the order of their ends.
        num_ranks: P.
        peak_live: micro-batches alive at most in each stage: forward is done, backward is not.
    """

    seconds: float
    spans: tuple[ComputedSpan, ...]
    num_ranks: int
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy_s = sum(one.stop_s - one.start_s for one in self.spans)
        return 1.0 - busy_s / (self.seconds * self.num_ranks) if self.seconds else 0.0


_PLACES = (FORWARD, BACKWARD, WEIGHTS)
"""Of what kind each of `StageTimes` is."""


class StageTimes(NamedTuple):
    """What a stage is busy with a micro-batch, forward and backward, its messages included; and at
    the end of an update."""

    forward_s: float
    backward_s: float
    weights_s: float = 0.0


def run_schedule(
    actions: Iterable[PipelineAction],
    stages: Sequence[StageTimes],
    cores: float = float("inf"),
    each: Sequence[Sequence[StageTimes]] = (),
) -> ScheduleRun:
    """Runs a schedule in virtual time.

    Args:
        stages: of each stage.
        cores: that the ranks share, one for each that computes; without a limit each has its own.
        each: of each micro-batch, the same; none: all are alike.

    Raises:
        ProtocolError: the schedule waits for itself.
    """
    queues: dict[int, list[PipelineAction]] = {}
    for one in actions:
        queues.setdefault(one.rank, []).append(one)
    places, ready = dict.fromkeys(queues, 0), set[tuple[str, int, int]]()
    running: dict[int, tuple[float, float]] = {}  # of each rank: what is left, and since when
    spans: list[ComputedSpan] = []
    now_s = 0.0
    while True:
        for rank, queue in queues.items():
            if rank in running or places[rank] == len(queue):
                continue
            one = queue[places[rank]]
            if _needed(one, len(stages)) <= ready:
                times = (each[one.micro_batch] if each else stages)[one.stage]
                running[rank] = (times[_PLACES.index(one.kind)], now_s)
        if not running:
            break
        share = min(1.0, cores / len(running))
        least_s = min(left_s for left_s, _ in running.values())
        now_s += least_s / share
        for rank, (left_s, since_s) in list(running.items()):
            if left_s - least_s > _ROUNDING * left_s:
                running[rank] = (left_s - least_s, since_s)
                continue
            del running[rank]
            one = queues[rank][places[rank]]
            places[rank] += 1
            ready.add(one[1:])
            spans.append(ComputedSpan(one, since_s, now_s))
    if any(places[rank] < len(queue) for rank, queue in queues.items()):
        raise ProtocolError("a pipeline schedule waits for itself")
    peak = tuple(_peak_live(spans, stage) for stage in range(len(stages)))
    return ScheduleRun(seconds=now_s, spans=tuple(spans), num_ranks=len(queues), peak_live=peak)


def _needed(one: PipelineAction, num_stages: int) -> set[tuple[str, int, int]]:
    """What must have been computed before, wherever."""
    if one.kind == FORWARD:
        return {(FORWARD, one.stage - 1, one.micro_batch)} if one.stage else set()
    if one.kind == WEIGHTS:  # the rank's own are before it
        return set()
    found = {(FORWARD, one.stage, one.micro_batch)}
    if one.stage < num_stages - 1:
        found.add((BACKWARD, one.stage + 1, one.micro_batch))
    return found


def _peak_live(spans: Sequence[ComputedSpan], stage: int) -> int:
    """A micro-batch is alive from the begin of its forward pass to the end of its backward one."""
    events = []
    for action, start_s, stop_s in spans:
        if action.stage == stage and action.kind != WEIGHTS:
            is_forward = action.kind == FORWARD
            events.append((start_s if is_forward else stop_s, is_forward))
    live = most = 0
    for _, is_forward in sorted(events):  # at the same moment one ends before another begins
        live += 1 if is_forward else -1
        most = max(most, live)
    return most
