"""The states of a lease: free, held, gathered, retired; and back."""

import json

import pytest

from ledger_places import LedgerPlace, Whereabouts, counts, whereabouts
from paceline.core.ledger import Ledger
from paceline.errors import ConfigError, ProtocolError
from paceline.events import Lease, Ticket


def _opened(num_samples: int = 8, batch_size: int = 2, parts: int = 1, **more: object) -> Ledger:
    ledger = Ledger(num_samples, batch_size, parts, **more)  # type: ignore[arg-type]
    ledger.open(0)
    return ledger


def _ticket(member: int, serial: int = 0) -> Ticket:
    return Ticket(member, serial, 0)


def _starts(leases: tuple[Lease, ...]) -> list[int]:
    return [lease.start for lease in leases]


def test_nothing_is_free_before_an_epoch_opens() -> None:
    ledger = Ledger(8, 2, 1)
    assert ledger.is_done
    assert ledger.hand_out(_ticket(0), 1) == ()
    assert ledger.cut_all() == []


def test_leases_are_given_out_in_order_of_position() -> None:
    ledger = _opened()
    assert [_starts(ledger.hand_out(_ticket(m), 1)) for m in range(5)] == [[0], [2], [4], [6], []]


def test_a_release_for_several_steps_takes_consecutive_leases() -> None:
    ledger = _opened()
    assert _starts(ledger.hand_out(_ticket(0), 3)) == [0, 2, 4]
    assert _starts(ledger.hand_out(_ticket(1), 3)) == [6]


def test_a_leases_place_is_known_from_grant_to_update() -> None:
    ledger = _opened()
    (lease,) = ledger.cut_all()[:1]
    (held,) = ledger.hand_out(_ticket(3), 1)
    assert held == lease
    assert whereabouts(ledger, lease) == Whereabouts(place=LedgerPlace.HELD, members=(3,))
    ledger.gather(_ticket(3), Ticket(3, 0, 5))
    assert whereabouts(ledger, lease) == Whereabouts(place=LedgerPlace.GATHERED, members=(3,))
    ledger.retire(Ticket(3, 0, 5), 6)
    assert whereabouts(ledger, lease) == Whereabouts(place=LedgerPlace.RETIRED, version=6)
    assert counts(ledger)[LedgerPlace.RETIRED] == 1


def test_returned_leases_are_given_out_first_and_lowest_first() -> None:
    ledger = _opened()
    for member in range(3):
        ledger.hand_out(_ticket(member), 1)
    ledger.give_up(_ticket(2), is_abandoned=True)
    ledger.give_up(_ticket(1), is_abandoned=True)
    assert [_starts(ledger.hand_out(_ticket(m, 1), 1)) for m in (0, 1, 2)] == [[2], [4], [6]]


@pytest.mark.parametrize(
    ("dropped", "is_abandoned", "place"),
    [
        ("requeue", True, LedgerPlace.FREE),
        ("requeue", False, LedgerPlace.FREE),
        ("skip", True, LedgerPlace.DROPPED),
        ("skip", False, LedgerPlace.FREE),
    ],
)
@pytest.mark.parametrize("is_pushed", [False, True])
def test_only_abandoned_work_is_dropped_and_only_on_request(
    dropped: str, is_abandoned: bool, place: LedgerPlace, is_pushed: bool
) -> None:
    ledger = _opened(dropped=dropped)
    (lease,) = ledger.hand_out(_ticket(0), 1)
    if is_pushed:
        ledger.gather(_ticket(0), _ticket(0))
    ledger.give_up(_ticket(0), is_abandoned=is_abandoned)
    assert whereabouts(ledger, lease).place is place


def test_a_copy_is_of_the_lease_with_fewest_holders_then_of_the_oldest_grant() -> None:
    ledger = _opened(num_samples=6)
    for member in range(3):
        ledger.hand_out(_ticket(member), 1)
    copies = [_starts(ledger.hand_out_copy(_ticket(member))) for member in (3, 4, 5, 6)]
    assert copies == [[0], [2], [4], [0]]
    ledger.give_up(_ticket(1), is_abandoned=False)  # its lease has one holder again: 4
    assert _starts(ledger.hand_out_copy(_ticket(7))) == [2]


def test_the_first_push_of_a_copy_wins_and_other_leases_of_its_holders_return() -> None:
    ledger = _opened(num_samples=4)
    ledger.hand_out(_ticket(0), 2)
    ledger.hand_out_copy(_ticket(1))
    assert ledger.gather(_ticket(1), _ticket(1)) == [_ticket(0)]
    ledger.give_up(_ticket(0), is_abandoned=False)
    won, other = ledger.cut_all()
    assert whereabouts(ledger, won).place is LedgerPlace.GATHERED
    assert whereabouts(ledger, other).place is LedgerPlace.FREE


def test_a_lease_given_up_by_one_holder_stays_with_the_other() -> None:
    ledger = _opened(num_samples=2)
    (lease,) = ledger.hand_out(_ticket(0), 1)
    ledger.hand_out_copy(_ticket(1))
    ledger.give_up(_ticket(0), is_abandoned=True)
    assert whereabouts(ledger, lease) == Whereabouts(place=LedgerPlace.HELD, members=(1,))


def test_accumulated_leases_share_one_ticket() -> None:
    ledger = _opened(num_samples=4)
    ledger.hand_out(_ticket(0), 1)
    assert ledger.extend(_ticket(0)) == Lease(1, 0, 2, 4)
    assert ledger.extend(_ticket(0)) is None
    assert _starts(ledger.leases_of(_ticket(0))) == [0, 2]


def test_reserved_leases_are_given_out_in_order_and_after_returned_ones() -> None:
    ledger = _opened(num_samples=12)
    ledger.hand_out(_ticket(0), 1)
    ledger.lookahead.set_depth(1, 2)
    ledger.look_ahead(1)
    assert _starts(ledger.lookahead.news(1)) == [2, 4]
    assert ledger.lookahead.news(1) == ()
    ledger.give_up(_ticket(0), is_abandoned=True)
    handed = [_starts(ledger.hand_out(_ticket(1, serial), 1)) for serial in range(4)]
    assert handed == [[0], [2], [4], [6]]


def test_reservations_are_made_in_turns_of_a_releases_width() -> None:
    ledger = _opened(num_samples=24)
    for member in (1, 0):
        ledger.lookahead.set_depth(member, 3)
    ledger.look_ahead(2)
    assert _starts(ledger.lookahead.kept(0)) == [0, 2, 8, 10]
    assert _starts(ledger.lookahead.kept(1)) == [4, 6, 12, 14]


def test_in_the_tail_a_member_without_work_takes_the_newest_reservation() -> None:
    ledger = _opened(num_samples=10)
    ledger.lookahead.set_depth(0, 2)
    ledger.lookahead.set_depth(1, 3)
    ledger.look_ahead(1)
    taken = [_starts(ledger.hand_out(_ticket(7, serial), 1)) for serial in range(6)]
    assert taken == [[8], [4], [6], [0], [2], []]


def test_cancelled_reservations_are_free_again() -> None:
    ledger = _opened()
    ledger.lookahead.set_depth(0, 2)
    ledger.look_ahead(1)
    assert whereabouts(ledger, ledger.cut_all()[1]) == Whereabouts(
        place=LedgerPlace.RESERVED, members=(0,)
    )
    ledger.take_back(0)
    assert counts(ledger)[LedgerPlace.FREE] == 2
    assert _starts(ledger.hand_out(_ticket(1), 1)) == [0]


def test_lease_ids_are_never_used_twice_in_a_run() -> None:
    ledger = _opened(num_samples=4)
    ledger.hand_out(_ticket(0), 2)
    ledger.gather(_ticket(0), _ticket(0))
    ledger.retire(_ticket(0), 1)
    ledger.open(1, batch_ends=[1, 3])
    assert ledger.num_batches == 2
    assert ledger.cut_all() == [Lease(2, 1, 0, 1), Lease(3, 1, 1, 3)]


def test_an_epoch_of_another_length_is_restored_from_json() -> None:
    ledger = _opened(num_samples=4)
    ledger.hand_out(_ticket(0), 2)
    ledger.gather(_ticket(0), _ticket(0))
    ledger.retire(_ticket(0), 1)
    ledger.open(1, batch_ends=2)
    assert ledger.num_batches == 1
    again = Ledger(4, 2, 1)
    again.load(json.loads(json.dumps(ledger.state())))
    assert again.state() == ledger.state()
    assert again.num_batches == 1


def test_an_epoch_does_not_open_before_the_last_is_done() -> None:
    ledger = _opened()
    with pytest.raises(ProtocolError, match="epoch 1 cannot open"):
        ledger.open(1)


def test_a_ledger_from_json_equals_the_original() -> None:
    ledger = _opened(num_samples=20, dropped="skip")
    for member in range(4):
        ledger.hand_out(_ticket(member), 1)
    ledger.hand_out_copy(_ticket(9))
    ledger.gather(_ticket(1), _ticket(1))
    ledger.give_up(_ticket(2), is_abandoned=True)
    ledger.lookahead.set_depth(5, 2)
    ledger.look_ahead(1)
    copy = Ledger(20, 2, 1, dropped="skip")
    copy.load(json.loads(json.dumps(ledger.state())))
    assert copy.state() == ledger.state()
    assert copy.cut_all() == ledger.cut_all()
    assert counts(copy) == counts(ledger)
    assert copy.hand_out(_ticket(7), 3) == ledger.hand_out(_ticket(7), 3)


def test_dropped_must_be_requeue_or_skip() -> None:
    with pytest.raises(ConfigError, match="dropped must be 'requeue' or 'skip', got 'maybe'"):
        Ledger(8, 2, 1, dropped="maybe")  # type: ignore[arg-type]
