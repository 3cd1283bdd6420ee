"""Lines and barriers of peers: two seats in one thread, without waiting."""

import itertools
import math
import threading
import time

import pytest

from paceline.errors import ConfigError
from paceline.exchange import rounds
from paceline.exchange.base import Clock, are_at_odds, settings_word
from paceline.exchange.evaluation import LocalRanges, SharedRanges, ranges_of
from paceline.exchange.rounds import Barrier, GivenUp, Line, RoundsTold, check_settings, common_clip
from paceline.run.peers import RoundsBook
from paceline.store import memory
from paceline.store.clip import UNCLIPPED, Clip
from paceline.store.control import MET, Control, control_bytes
from paceline.store.memory import PrivateMemory, SharedMemory
from paceline.wire import messages


def line(**changes: float) -> Line:
    plain = Line(
        num_samples=2.0, weight=2.0, loss=0.5, fault=0.0, compute_s=0.0, wait_s=0.0, push_s=0.0,
        input_s=0.0, squared_norm=0.0, max_norm=UNCLIPPED.max_norm,
        max_value=UNCLIPPED.max_value, hyper=7.0, bad_version=-1.0, leaves=0.0, snapshot=0.0,
    )  # fmt: skip
    return plain._replace(**changes)


@pytest.fixture
def barriers() -> list[Barrier]:
    control = Control(PrivateMemory(control_bytes(2)), 2)
    results = [Barrier(control, seat, Clock()) for seat in range(2)]
    for result in results:
        result.begin(3)
    return results


def test_all_members_read_each_others_lines(barriers: list[Barrier]) -> None:
    shown = [line(loss=0.25), line(loss=math.inf, snapshot=4.0)]
    for barrier, one in zip(barriers, shown, strict=True):
        barrier.show(one)
    assert barriers[0].lines() == barriers[1].lines() == shown
    barriers[1].show_norm(9.0)
    barriers[1].show_bad(5)
    assert barriers[0].squared_norms() == [0.0, 9.0]
    assert barriers[0].is_bad(5)
    assert not barriers[0].is_bad(4)


def test_the_last_member_at_a_barrier_does_not_wait(barriers: list[Barrier]) -> None:
    assert barriers[0].arrive() == 4
    barriers[1].wait()


def test_a_barrier_is_given_up_only_for_a_member_gone_before_it(barriers: list[Barrier]) -> None:
    control = barriers[0]._control
    control[control.gone[1]] = 1
    barriers[1].arrive()  # it had come this far
    barriers[0].wait()
    with pytest.raises(GivenUp):
        barriers[0].wait()


def test_the_last_member_at_a_barrier_wakes_all_sleepers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_WAIT_S", 30.0)  # nobody looks again by itself
    control = Control(SharedMemory.create(control_bytes(3)), 3)
    seats = [Barrier(control, seat, Clock()) for seat in range(3)]
    sleepers = [threading.Thread(target=barrier.wait) for barrier in seats[:2]]
    for thread in sleepers:
        thread.start()
    time.sleep(0.2)  # longer than they look for the others
    seats[2].wait()
    for thread in sleepers:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in sleepers)
    assert control[MET] == 1
    assert [control[word] for word in control.asleep] == [0, 0, 0]


def test_member_that_does_not_sleep_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    control = Control(SharedMemory.create(control_bytes(2)), 2)
    monkeypatch.setattr(control, "wake", woken.append)
    first, second = (Barrier(control, seat, Clock()) for seat in range(2))
    first.arrive()
    second.wait()
    assert woken == []
    control[control.asleep[0]] = 1
    first.arrive()
    second.wait()
    assert woken == [MET]


def test_value_set_before_a_member_falls_asleep_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(SharedMemory.create(control_bytes(2)), 2)
    monkeypatch.setattr(memory, "spin", lambda: ())
    monkeypatch.setattr(control, "_sleep", lambda *_: pytest.fail("it fell asleep"))
    asked: list[int] = []

    def is_early(value: int) -> bool:
        asked.append(value)
        if len(asked) == 1:
            control[MET] = 1
        return value < 1

    assert control.wait_while(MET, is_early, 1.0, asleep=control.asleep[0])
    assert asked == [0, 1, 1]


def test_pushes_with_different_settings_or_clipping_are_refused() -> None:
    check_settings([line(), line()])
    check_settings([line(), line(weight=0.0, hyper=9.0)])  # it has not pushed
    first, second = float(settings_word(5, 1)), float(settings_word(6, 1))
    with pytest.raises(ConfigError, match="workers 0 and 1 pushed into one update"):
        check_settings([line(hyper=first), line(hyper=second)])
    assert not are_at_odds(settings_word(5, 1), settings_word(6, 2))  # at other steps of their own
    assert common_clip([line(weight=0.0), line(max_norm=2.0)]) == Clip(2.0)
    assert common_clip([line(weight=0.0)]) == UNCLIPPED
    with pytest.raises(ConfigError, match="worker 0 clips it to norm 2, worker 1 to nothing"):
        common_clip([line(max_norm=2.0), line()])


def test_rounds_are_reported_once() -> None:
    sent: list[messages.Rounds] = []
    channel = type("Channel", (), {"send": staticmethod(sent.append)})()
    told = RoundsTold(channel, Control(PrivateMemory(control_bytes(2)), 2), 100, (0, 1), 0)
    for number in range(3):
        told.note(number, [line().entry(0), line().entry(2)], snapshot=0)
    told.tell()
    told.tell()
    told.note(3, [line().entry(0)], snapshot=8)
    told.tell()
    assert [(message.first, len(message.rows)) for message in sent] == [(0, 3), (3, 1)]
    assert sent[0].rows[0].entries[1].fault == 2


def test_members_keep_no_rounds_that_the_first_has_reported() -> None:
    control, sent = Control(PrivateMemory(control_bytes(2)), 2), list[messages.Rounds]()
    channel = type("Channel", (), {"send": staticmethod(sent.append)})()
    first, second = (RoundsTold(channel, control, 100, (0, 1), seat) for seat in range(2))
    for number in range(3):
        for member in (first, second):
            member.note(number, [line().entry(0)] * 2, snapshot=int(number == 1))
    # With the checkpoint.
    assert [(message.first, len(message.rows)) for message in sent] == [(0, 2)]
    assert [number for number, _ in second._rows] == [2]
    first.end(3)
    second.end(3)
    assert [(message.first, len(message.rows)) for message in sent] == [(0, 2), (2, 1)]


def test_rounds_of_a_dead_first_member_are_reported_by_the_next() -> None:
    control, sent = Control(PrivateMemory(control_bytes(2)), 2), list[messages.Rounds]()
    channel = type("Channel", (), {"send": staticmethod(sent.append)})()
    first, second = (RoundsTold(channel, control, 100, (0, 1), seat) for seat in range(2))
    for number in range(3):
        for member in (first, second):
            member.note(number, [line().entry(0)] * 2, snapshot=int(number == 0))
    control[control.gone[0]] = 1
    second.end(3)
    assert [(message.first, len(message.rows)) for message in sent] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
def test_rounds_are_taken_in_order_from_any_member(order: tuple[int, ...]) -> None:
    """The first member's messages may still be queued while the next reports the rest."""
    told = [range(32), range(32, 64), range(64, 96), range(90, 100)]
    book, heard = RoundsBook([0, 1]), list[float]()
    for number in order:
        rows = [messages.Row(float(position), ()) for position in told[number]]
        heard += [row.over_s for row in book.take(told[number][0], rows)]
    assert heard == [float(one) for one in range(100)]
    assert not book.take(90, [messages.Row(90.0, ())])


def test_ranges_cover_each_position_once() -> None:
    assert ranges_of(7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert ranges_of(7, 3, ends=[2, 2, 7]) == [(0, 2), (2, 7)]
    alone = LocalRanges(ranges_of(4, 2))
    while (results := alone.next()) is not None:
        alone.report({"loss": (float(results[0]), 2)})
    assert alone.totals() == {"loss": (2.0, 4)}


def test_shared_ranges_arrive_one_by_one_and_are_answered() -> None:
    sent: list[messages.Counted] = []
    heard = iter(
        [messages.Range(4, 6), messages.Range(-1, -1), messages.CountTotals({"loss": (1.0, 6)})]
    )
    channel = type("Channel", (), {"send": staticmethod(sent.append)})()
    ranges = SharedRanges(channel, type("Mail", (), {"expect": lambda *_: next(heard)})())
    assert ranges.next() == (4, 6)
    ranges.report({"loss": (0.5, 2)})
    assert sent == [messages.Counted(4, {"loss": (0.5, 2)})]
    assert ranges.next() is None
    assert ranges.totals() == {"loss": (1.0, 6)}
