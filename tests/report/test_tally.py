"""Every lease of a run is in an update or was dropped, also across the end of an epoch."""

import pytest

from paceline.errors import ConfigError
from paceline.events import Apply, EpochEnd, Grant, Lease, Pushed, Ticket
from paceline.report.tally import Tally
from paceline.trace.records import Handed, Ordered, Record, Resumed


def pushed(ticket: Ticket, at_s: float, kept: tuple[int, ...] = ()) -> Handed:
    fact = Pushed(ticket, 20, 1.0, True, at_s, None, kept, ())
    return Handed(fact=fact, compute_s=0.5, wait_s=0.0, push_s=0.0)


def tally_of(*records: Record) -> Tally:
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally


FIRST, SECOND = Lease(0, 0, 0, 20), Lease(1, 0, 20, 40)
A, B = Ticket(0, 0, 0), Ticket(1, 0, 0)
BEGIN = (
    Ordered(t_s=1.0, order=Grant(A, (FIRST,), ())),
    Ordered(t_s=1.0, order=Grant(B, (SECOND,), ())),
    pushed(A, 2.0),
    Ordered(t_s=2.0, order=Apply((A,), (1.0,))),
)


def test_a_lease_in_no_update_at_the_end_of_its_epoch_was_dropped() -> None:
    result = tally_of(*BEGIN, Ordered(t_s=3.0, order=EpochEnd(0, 1)))
    assert (result.samples, result.dropped_samples, result.trained_s) == (20, 20, 2.0)


def test_a_lease_pushed_in_the_next_epoch_was_not_dropped() -> None:
    result = tally_of(
        *BEGIN,
        Ordered(t_s=3.0, order=EpochEnd(0, 1)),
        pushed(B, 4.0),
        Ordered(t_s=4.0, order=Apply((B,), (1.0,))),
    )
    assert (result.version, result.dropped_samples) == (2, 0)
    assert result.staleness == {0: 1, 1: 1}


def test_a_lease_held_at_a_crash_is_free_again() -> None:
    resumed = Resumed(t_s=5.0, version=1, workers=2, lost=0, changes={})
    result = tally_of(*BEGIN, resumed, Ordered(t_s=6.0, order=EpochEnd(0, 1)))
    assert result.dropped_samples == 0
    assert result.version == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (Ordered(t_s=3.0, order=Apply((A,), (1.0,))), "update 2 has a push that nobody handed in"),
        (Ordered(t_s=3.0, order=Apply((B,), (1.0,))), "update 2 has a push that nobody handed in"),
        (
            Handed(
                fact=Pushed(B, 21, 1.0, True, 3.0), compute_s=0.5, wait_s=0.0, push_s=0.0
            ),
            "member 1 hands in 21 samples of 20",
        ),
    ],
    ids=["twice", "never", "more"],
)  # fmt: skip
def test_contradictory_lines_are_refused(line: Record, said: str) -> None:
    with pytest.raises(ConfigError, match=f"the trace contradicts itself: {said}"):
        tally_of(*BEGIN, line)


def test_a_push_at_a_future_version_is_in_no_update() -> None:
    ahead = Ticket(1, 0, 7)
    with pytest.raises(ConfigError, match="nobody handed in"):
        tally_of(*BEGIN, pushed(ahead, 3.0), Ordered(t_s=3.0, order=Apply((ahead,), (1.0,))))
