"""Pipeline schedules are complete, free of deadlocks, and take the time of their formulas."""

import pytest

from paceline.errors import ConfigError, ProtocolError
from paceline.partition.schedules import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    WEIGHTS,
    PipelineAction,
    StageTimes,
    gpipe,
    interleaved,
    live_micro_batches,
    one_f_one_b,
    run_schedule,
    with_weights,
)

SIZES = [(1, 1), (2, 3), (2, 8), (3, 2), (4, 4), (4, 16), (8, 8)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_every_stage_runs_each_micro_batch_forward_and_backward_once(
    name: str, ranks: int, micro_batches: int
) -> None:
    stages_per_rank = 2 if name == "interleaved" else 1
    if name == "interleaved" and micro_batches % ranks:
        with pytest.raises(ConfigError, match="not a multiple"):
            list(SCHEDULES[name](ranks, micro_batches, stages_per_rank))
        return
    actions = list(SCHEDULES[name](ranks, micro_batches, stages_per_rank))
    stages = ranks * stages_per_rank
    expected = {
        (kind, stage, number)
        for kind in (FORWARD, BACKWARD)
        for stage in range(stages)
        for number in range(micro_batches)
    }
    assert len(actions) == len(expected)
    assert {action[1:] for action in actions} == expected
    assert all(action.stage % ranks == action.rank for action in actions)
    run_schedule(actions, [StageTimes(1.0, 1.0)] * stages)  # no deadlock


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_equal_stages_take_the_time_of_the_formula(
    name: str, ranks: int, micro_batches: int
) -> None:
    """(M + P - 1) (f + b), and a bubble of (P - 1) / (M + P - 1)."""
    result = run_schedule(SCHEDULES[name](ranks, micro_batches, 1), [StageTimes(1.0, 2.0)] * ranks)
    assert result.seconds == pytest.approx(3.0 * (micro_batches + ranks - 1))
    assert result.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_interleaving_divides_the_bubble_by_stages_per_rank(ranks: int, micro_batches: int) -> None:
    """(P - 1) (f + b) / v of waiting: Narayanan et al., 2021, section 2.2.2."""
    for each in (1, 2, 4):
        stages = [StageTimes(1.0 / each, 2.0 / each)] * (ranks * each)
        result = run_schedule(interleaved(ranks, micro_batches, each), stages)
        assert result.seconds == pytest.approx(3.0 * micro_batches + 3.0 * (ranks - 1) / each)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_live_micro_batches_match_the_prediction(name: str, ranks: int, micro_batches: int) -> None:
    result = run_schedule(SCHEDULES[name](ranks, micro_batches, 1), [StageTimes(1.0, 2.0)] * ranks)
    expected = [live_micro_batches(name, stage, ranks, micro_batches) for stage in range(ranks)]
    assert list(result.peak_live) == expected


def test_ranks_sharing_cores_take_the_time_of_the_total_work() -> None:
    stages = [StageTimes(1.0, 2.0)] * 3
    alone = run_schedule(one_f_one_b(3, 64), stages)
    shared = run_schedule(one_f_one_b(3, 64), stages, cores=2)
    assert alone.seconds == pytest.approx(3.0 * 66)
    assert shared.seconds == pytest.approx(3 * 64 * 3.0 / 2, rel=0.03)
    assert run_schedule(gpipe(3, 4), stages, cores=1).seconds == pytest.approx(3 * 4 * 3.0)


def test_slowest_stage_sets_the_pace() -> None:
    """gpipe takes the time that cuts are chosen by; 1f1b hides the stages after the slowest."""
    stages = [StageTimes(1.0, 1.0), StageTimes(2.0, 2.0), StageTimes(1.0, 1.0)]
    assert run_schedule(gpipe(3, 10), stages).seconds == pytest.approx(8.0 + 9 * 4.0)
    assert run_schedule(one_f_one_b(3, 10), stages).seconds == pytest.approx(10 * 4.0 + 2.0)


def test_deadlocked_schedule_is_refused() -> None:
    actions = [PipelineAction(0, BACKWARD, 0, 0), PipelineAction(0, FORWARD, 0, 0)]
    with pytest.raises(ProtocolError, match="waits for itself"):
        run_schedule(actions, [StageTimes(1.0, 1.0)])


def test_invalid_schedule_arguments_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="7 micro-batches are not a multiple of 2; write --micro-batches 8"
    ):
        list(interleaved(2, 7))
    with pytest.raises(ConfigError, match="1f1b has one stage for each worker"):
        list(one_f_one_b(2, 4, 2))


def test_gpipe_runs_the_stages_of_a_rank_one_after_another() -> None:
    result = run_schedule(gpipe(2, 3, 2), [StageTimes(1.0, 2.0)] * 4)
    own = [one for one, *_ in result.spans if one.rank == 1]
    assert [one.stage for one in own] == [1] * 3 + [3] * 6 + [1] * 3
    assert result.peak_live == (3, 3, 3, 3)


def test_late_weight_gradients_are_computed_at_the_end() -> None:
    """The last rank finishes its backward passes first, while the first still waits."""
    stages = [StageTimes(1.0, 2.0, 4.0), StageTimes(1.0, 2.0, 4.0)]
    result = run_schedule(with_weights(one_f_one_b(2, 4)), stages)
    assert result.seconds == pytest.approx(1.0 + 4 * 3.0 + 2.0 + 4.0)
    ends = [span for span in result.spans if span.action.kind == WEIGHTS]
    assert [end.action.rank for end in ends] == [1, 0]
    assert result.peak_live == (2, 1)


def test_late_weight_gradients_take_as_long_whatever_the_last_micro_batch() -> None:
    """They are of all micro-batches, so a small last one does not make them cheaper."""
    stages = [StageTimes(1.0, 2.0, 4.0)] * 2
    sizes = (1.5, 1.0, 1.0, 0.5)
    each = [[StageTimes(1.0 * size, 2.0 * size, 4.0 * size)] * 2 for size in sizes]
    result = run_schedule(with_weights(one_f_one_b(2, 4)), stages, each=each)
    ends = [span for span in result.spans if span.action.kind == WEIGHTS]
    assert [end.stop_s - end.start_s for end in ends] == pytest.approx([4.0, 4.0])
