"""The place of each lease of a ledger, read from outside for checks.

    free    reserved    held    gathered    riding    retired    dropped    unused

``core/ledger.py`` draws how a lease walks through these; it needs no name for them itself.
"""

import enum
from dataclasses import dataclass

from paceline.core.ledger import _IS_DROPPED, _IS_UNUSED, _NOT_YET, Ledger
from paceline.events import Lease


class LedgerPlace(enum.Enum):
    """The possible places of a lease."""

    FREE = "free"
    RESERVED = "reserved"
    HELD = "held"
    GATHERED = "gathered"
    RIDING = "riding"
    RETIRED = "retired"
    DROPPED = "dropped"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The state of a lease: its place, its holder, and the update that used it."""

    place: LedgerPlace
    members: tuple[int, ...] = ()
    version: int | None = None


def whereabouts(ledger: Ledger, lease: Lease) -> Whereabouts:
    """The state of a lease of this epoch."""
    index = ledger._cuts.index(lease.id)
    fate = ledger._fate[index] if index < len(ledger._fate) else _NOT_YET
    if fate in (_IS_DROPPED, _IS_UNUSED):
        is_dropped = fate == _IS_DROPPED
        return Whereabouts(place=LedgerPlace.DROPPED if is_dropped else LedgerPlace.UNUSED)
    if fate != _NOT_YET:
        return Whereabouts(place=LedgerPlace.RETIRED, version=fate)
    if lease.id in ledger._held:
        members = tuple(ticket.member for ticket in ledger._held[lease.id])
        return Whereabouts(place=LedgerPlace.HELD, members=members)
    for ticket, leases in ledger._pushed.items():
        if lease in leases:
            return Whereabouts(place=LedgerPlace.GATHERED, members=(ticket.member,))
    for place, kept in (
        (LedgerPlace.RESERVED, ledger.lookahead._queues),
        (LedgerPlace.HELD, ledger._again),
        (LedgerPlace.RIDING, ledger._riding),
    ):
        if members := tuple(member for member, leases in kept.items() if lease in leases):
            return Whereabouts(place=place, members=members)
    return Whereabouts(place=LedgerPlace.FREE)


def counts(ledger: Ledger) -> dict[LedgerPlace, int]:
    """The number of leases in each place."""
    counts_by_place = dict.fromkeys(LedgerPlace, 0)
    for lease in ledger._cuts.leases:
        counts_by_place[whereabouts(ledger, lease).place] += 1
    return counts_by_place
