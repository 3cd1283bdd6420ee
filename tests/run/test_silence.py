"""The rule of silence, without a process: readings and times in, verdicts out."""

import math
from collections.abc import Callable
from itertools import pairwise

from paceline.core.stats import Limits, Patience
from paceline.run.silence import Doing, Silence
from paceline.system.vitals import UNKNOWN, ProcessState, Vitals

UNTOLD = Limits(named_s=60.0, again_s=60.0, stopped_s=0.5, asleep_s=math.inf)
TOLD = Limits(named_s=5.0, again_s=60.0, stopped_s=5.0, asleep_s=5.0)
STEP_S = 0.1


def told(
    limits: Limits, does: Callable[[float], Vitals], until_s: float, *, is_held: bool = False
) -> tuple[list[int], float, Silence]:
    """When it was named, in whole seconds; when it stalled; and the rule's state."""
    silence, named, stalled_s = Silence(0.0), [], math.inf
    for number in range(1, round(until_s / STEP_S) + 1):
        now_s = number * STEP_S
        verdict = silence.verdict()
        if silence.wants_look(now_s, limits):
            verdict = silence.look(now_s, does(now_s), limits, is_held=is_held)
        if verdict.is_due:
            named.append(round(now_s))
        if verdict.is_stalled:
            stalled_s = min(stalled_s, now_s)
    return named, stalled_s, silence


def sleeps(now_s: float) -> Vitals:
    return Vitals(ProcessState.AWAKE, 1.0 + 0.001 * now_s)


def computes(now_s: float) -> Vitals:
    return Vitals(ProcessState.AWAKE, 0.3 * now_s)


def test_a_computing_member_never_stalls_and_is_named_ever_less_often() -> None:
    for limits, first_s, times in ((UNTOLD, 60, 3), (TOLD, 5, 6)):
        named, stalled_s, silence = told(limits, computes, 310.0)
        assert (named[0], len(named), stalled_s) == (first_s, times, math.inf)
        assert all(1.9 < after / before < 2.4 for before, after in pairwise(named))
        assert silence.doing is Doing.COMPUTES


def test_a_sleeping_member_is_named_every_minute_and_stalls_with_a_limit_only() -> None:
    named, stalled_s, silence = told(UNTOLD, sleeps, 310.0)
    assert named == [60, 120, 180, 240, 300]
    assert stalled_s == math.inf
    assert silence.doing is Doing.SLEEPS
    assert 5.0 <= told(TOLD, sleeps, 20.0)[1] < 6.5


def test_a_sleepers_time_starts_when_it_last_computed() -> None:
    def saves_then_hangs(now_s: float) -> Vitals:
        return Vitals(ProcessState.AWAKE, min(now_s, 100.0))

    assert 105.0 <= told(TOLD, saves_then_hangs, 120.0)[1] < 107.0


def test_a_little_cpu_time_now_and_then_is_sleep() -> None:
    """A tick in ten, as of a thread that polls."""

    def polls(now_s: float) -> Vitals:
        return Vitals(ProcessState.AWAKE, 0.01 * math.floor(now_s))

    assert told(TOLD, polls, 20.0)[1] < 6.5


def test_a_starved_member_computes_and_one_awake_by_chance_sleeps() -> None:
    """On a busy machine a worker of low priority uses almost no CPU time."""

    def starves(now_s: float) -> Vitals:
        return Vitals(ProcessState.AWAKE, 0.001 * now_s, is_running=True)

    def polls(now_s: float) -> Vitals:
        return Vitals(ProcessState.AWAKE, 0.001 * now_s, is_running=round(10 * now_s) % 20 == 0)

    _, stalled_s, silence = told(TOLD, starves, 310.0)
    assert (stalled_s, silence.doing) == (math.inf, Doing.COMPUTES)
    assert told(TOLD, polls, 20.0)[1] < 6.5


def test_a_compiler_that_ends_with_its_cpu_time_is_not_sleep() -> None:
    def compiles(now_s: float) -> Vitals:
        return Vitals(ProcessState.AWAKE, 3.0 * (now_s % 3.0))

    assert told(TOLD, compiles, 60.0)[1] == math.inf


def test_a_stopped_member_stalls_soon_and_a_traced_one_never() -> None:
    named, stalled_s, _ = told(UNTOLD, lambda _: Vitals(ProcessState.STOPPED), 130.0)
    assert 0.5 <= stalled_s < 1.2
    assert named[0] == round(stalled_s)
    assert told(TOLD, lambda _: Vitals(ProcessState.STOPPED), 20.0)[1] < 8.5
    named, stalled_s, silence = told(TOLD, lambda _: Vitals(ProcessState.TRACED), 30.0)
    assert (named[0], len(named), stalled_s, silence.doing) == (5, 3, math.inf, Doing.TRACED)


def test_without_a_reading_a_held_member_stalls_and_others_count_as_asleep() -> None:
    assert told(UNTOLD, lambda _: UNKNOWN, 300.0)[1] == math.inf
    assert 5.0 <= told(TOLD, lambda _: UNKNOWN, 20.0)[1] < 6.5
    assert told(UNTOLD, lambda _: UNKNOWN, 300.0, is_held=True)[1] < 1.2


def test_a_stopped_members_time_starts_when_it_was_stopped() -> None:
    def validates_and_is_stopped(now_s: float) -> Vitals:
        return Vitals(ProcessState.STOPPED) if now_s > 100.0 else Vitals(ProcessState.AWAKE, now_s)

    assert 105.0 <= told(TOLD, validates_and_is_stopped, 120.0)[1] < 107.5


def test_a_sign_of_life_or_a_suspended_machine_restarts_the_time() -> None:
    _, stalled_s, silence = told(TOLD, sleeps, 7.0)
    assert stalled_s < 7.0
    silence.broken(7.0)
    assert not silence.verdict().is_stalled
    assert not silence.was_named
    _, _, silence = told(TOLD, sleeps, 4.0)
    silence.shift(3600.0)
    for number in range(8):
        now_s = 3604.0 + number * STEP_S
        assert not silence.look(now_s, sleeps(now_s), TOLD).is_stalled


def test_patience_gives_up_a_sleeper_only_with_a_limit() -> None:
    usual = Patience().limits(has_stepped=False, may_sleep=False)
    assert usual == (120.0, 60.0, 5.0, math.inf)
    patience = Patience(given_s=3.0)
    assert patience.limits(has_stepped=False, may_sleep=False) == (3.0, 60.0, 3.0, 3.0)
    assert patience.limits(has_stepped=True, may_sleep=True).asleep_s == math.inf
