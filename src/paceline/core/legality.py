"""What a protocol may decide; checked before the first of its decisions is carried out.

    Apply     of at least one gathered push, each named once; as many weights, which sum to 1;
              where a staleness rule scales them, none is below 0 and they sum to at most 1
    Discard   of a gathered push, not named before
    Cancel    of a live member that it has released and that has not pushed since
    Release   of a live member that waits for it, for at least one step

The fact it reacts to is not yet in the books when they are checked, so that a refusal leaves
them as they were: in here, who just pushed or joined already waits, and who left is gone. It must
not know any one protocol.
"""

from ..errors import ProtocolError
from ..events import Apply, Cancel, Decision, Discard, Fact, Joined, Left, Pushed, Release, Ticket
from .ledger import Ledger
from .membership import Membership

_WEIGHT_TOLERANCE = 1e-9  # a sum of 1e6 float64 weights is off by less than 1e-10


def check_decisions(
    decisions: list[Decision],
    fact: Fact,
    members: Membership,
    ledger: Ledger,
    *,
    is_scaled: bool = False,
) -> None:
    """Raise ProtocolError if any of the decisions on `fact` breaks a rule.

    Args:
        is_scaled: a staleness rule makes weights smaller.
    """
    unbooked = fact.ticket if isinstance(fact, Pushed) else None
    waits: dict[int, bool | None] = {}  # what differs from the books; None: gone
    if unbooked is not None:
        waits[unbooked.member] = True
    elif isinstance(fact, Joined | Left):
        waits[fact.member] = True if isinstance(fact, Joined) else None
    named: set[Ticket] = set()
    for decision in decisions:
        if isinstance(decision, Release):
            if _is_waiting(decision.member, waits, members) is not True or decision.num_steps < 1:
                raise _refusal(decision, fact, "only who waits is released, for at least 1 step")
            waits[decision.member] = False
        elif isinstance(decision, Cancel):
            if _is_waiting(decision.member, waits, members) is not False:
                raise _refusal(decision, fact, "only who was released can be cancelled")
            waits[decision.member] = True
        else:
            tickets = (decision.ticket,) if isinstance(decision, Discard) else decision.tickets
            for ticket in tickets:
                if ticket in named or not (ticket == unbooked or ledger.is_gathered(ticket)):
                    raise _refusal(decision, fact, f"{ticket!r} is not a push that is gathered")
                named.add(ticket)
            if isinstance(decision, Apply):
                _check_weights(decision, fact, is_scaled)


def _is_waiting(member: int, waits: dict[int, bool | None], members: Membership) -> bool | None:
    return waits[member] if member in waits else members.is_waiting(member)


def _check_weights(update: Apply, fact: Fact, is_scaled: bool) -> None:
    weights = update.weights
    total, is_legal = sum(weights), len(weights) == len(update.tickets)
    if not is_scaled:
        if not is_legal or abs(total - 1.0) > _WEIGHT_TOLERANCE:
            raise _refusal(update, fact, "an update needs one weight a push, and a sum of 1")
    elif not is_legal or not min(weights) >= 0.0 or total > 1.0 + _WEIGHT_TOLERANCE:
        rule = "an update needs one weight a push, none below 0, and a sum of at most 1"
        raise _refusal(update, fact, rule)


def _refusal(decision: Decision, fact: Fact, rule: str) -> ProtocolError:
    return ProtocolError(f"the protocol decided {decision!r} on {fact!r}: {rule}")
