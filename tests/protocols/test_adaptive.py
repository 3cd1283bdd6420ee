"""adaptive: K follows the loss and the measured times."""

import math
from collections.abc import Callable, Sequence

import pytest

from alone import Alone
from paceline.conditions.delays import parse_delays
from paceline.conditions.slowness import parse_slow
from paceline.conditions.world import Conditions, parse_absences
from paceline.events import Apply, Exhausted, Fact, Joined, Lease, Order, Pushed, Ticket
from paceline.protocols.adaptive import Adaptive
from paceline.simulation.engine import Nothing, SimulatedRun, endless_ledger

NUM_WORKERS = 8


class Losing(Nothing):
    """Members whose loss is given by the time; remembers the size of each update."""

    def __init__(self, loss_at: Callable[[float], float]) -> None:
        self.sizes: list[int] = []
        self._loss_at = loss_at

    def push(self, ticket: Ticket, leases: Sequence[Lease], at_s: float) -> Pushed:
        return Pushed(ticket, 1, self._loss_at(at_s), True, at_s)

    def carry_out(self, orders: Sequence[Order], fact: Fact) -> None:
        self.sizes += [len(order.tickets) for order in orders if isinstance(order, Apply)]


def sizes(
    delay: str,
    loss_at: Callable[[float], float] = lambda at_s: 1.0,
    slow: tuple[str, ...] = (),
    away: tuple[str, ...] = (),
    num_updates: int = 400,
) -> list[int]:
    """K of each update of a simulated run."""
    delays = tuple(one for one in parse_delays((delay,), NUM_WORKERS) if one is not None)
    conditions = Conditions(
        delays=delays,
        slow=parse_slow(slow, NUM_WORKERS),
        absences=parse_absences(away, NUM_WORKERS),
        seed=3,
    )
    work = Losing(loss_at)
    protocol = Adaptive(NUM_WORKERS)
    SimulatedRun(protocol, endless_ledger(protocol), conditions, work=work).run(num_updates)
    return work.sizes


def test_k_grows_from_async_to_full_sync() -> None:
    results = sizes("exp:10ms", lambda at_s: 0.5 ** (at_s / 0.1), num_updates=1000)
    assert set(results[:16]) == {1}
    assert set(results[-50:]) == {NUM_WORKERS}
    quarters = [sum(results[i : i + 100]) / 100 for i in range(0, 400, 100)]
    assert quarters == sorted(quarters)


@pytest.mark.parametrize("ratio", [0.2, 0.05, 0.02])
def test_for_exponential_times_k_follows_the_papers_rule(ratio: float) -> None:
    """K^2/(P - K) = 2/(P F_t/F_0), on average over the noise of 16 measured rounds."""
    results = sizes("exp:10ms", lambda at_s: 1.0 if at_s < 0.2 else ratio, num_updates=3000)[1000:]
    right = 2 / (NUM_WORKERS * ratio)
    wanted = (math.sqrt(right * right + 4 * right * NUM_WORKERS) - right) / 2
    assert sum(results) / len(results) == pytest.approx(wanted, abs=0.7)


def test_for_constant_times_k_is_the_root_of_the_inverse_loss_ratio() -> None:
    assert set(sizes("10ms", lambda at_s: 1.0 if at_s < 0.2 else 1 / 16)[-30:]) == {4}
    assert set(sizes("10ms")[-30:]) == {1}


def test_a_straggler_is_not_waited_for_before_the_loss_is_tiny() -> None:
    def falling(least: float) -> Callable[[float], float]:
        return lambda at_s: 1.0 if at_s < 0.2 else least

    slow = ("3=10x",)
    assert set(sizes("10ms", falling(1 / 64))[-20:]) == {NUM_WORKERS}
    assert set(sizes("10ms", falling(1 / 64), slow)[-20:]) <= set(range(4, NUM_WORKERS))
    assert set(sizes("10ms", falling(1e-5), slow)[-20:]) == {NUM_WORKERS}


def test_with_an_unknown_loss_the_times_decide() -> None:
    unknown = sizes("10ms+exp:10ms", lambda at_s: float("nan"))
    assert unknown == sizes("10ms+exp:10ms", lambda at_s: 1.0)
    assert set(unknown) == {1}


def push(protocol: Adaptive, member: int, serial: int, at_s: float) -> None:
    protocol.react(Pushed(Ticket(member, serial, 0), 1, 1.0, True, at_s))


def test_time_between_epochs_is_not_step_time() -> None:
    protocol = Adaptive(2)
    for member in range(2):
        protocol.react(Joined(member, 0.0))
    for serial in range(6):
        for member in range(2):
            push(protocol, member, serial, 1.0 + serial)
    protocol.react(Exhausted(7.0))
    for serial in range(6, 9):  # an evaluation of a hundred seconds is between
        for member in range(2):
            push(protocol, member, serial, 100.0 + serial)
    times_s = [time for _, times in protocol.state()["times_s"] for time in times]
    assert times_s
    assert max(times_s) <= 1.0


def test_a_push_dropped_as_stale_counts_as_a_separate_step() -> None:
    """Member 1 needs 3 s a step, and each of its pushes is too stale to count."""
    alone = Alone("adaptive", 2, "drop:0")
    for now_s in range(1, 10):
        alone.push(0, at_s=float(now_s))
        if now_s % 3 == 0:
            alone.push(1, at_s=float(now_s))
    times_s = dict(alone.protocol.state()["times_s"])
    assert alone.staleness_versions == [0] * 9  # all of member 1's were dropped
    assert times_s == {0: [1.0] * 8, 1: [3.0] * 2}  # when the first began is not known


def test_a_step_after_a_dropped_one_is_not_counted_as_two() -> None:
    alone = Alone("adaptive", 2, "drop:0")
    alone.push(1, at_s=2.0)
    alone.push(0, at_s=2.5)
    alone.push(0, at_s=3.0)
    alone.push(1, at_s=5.0)  # dropped; released again at the newest version
    alone.push(1, at_s=8.0)
    assert len(alone.staleness_versions) == 3
    assert dict(alone.protocol.state()["times_s"])[1] == [3.0, 3.0]


def test_a_member_that_left_is_neither_measured_nor_waited_for() -> None:
    results = sizes(
        "10ms", lambda at_s: 1.0 if at_s < 0.2 else 1e-5, away=("3=2s..",), num_updates=500
    )
    assert NUM_WORKERS in results
    assert set(results[-20:]) == {NUM_WORKERS - 1}
