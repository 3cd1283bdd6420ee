"""The graph is kept after the only backward() of a turn.

Its activations stay in memory until the next turn; where it is needed for no error to be raised,
the graph of the turn before is still attached, and grows.

Fix: leave retain_graph out, and detach what is carried from one turn to the next.
Source: torch.Tensor.backward documentation, retain_graph: "in nearly all cases not needed".
"""

from collections.abc import Iterator

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, turns
from ..mends import without
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if "autograd.grad" in facts.text or "create_graph" in facts.text:
        return
    for turn in turns(facts):
        backward = turn.of(CallRole.BACKWARD)
        if len(backward) == 1 and backward[0].is_always and _retains(facts, backward[0]):
            yield Found(backward[0].call, f"{facts.code(backward[0].call)} once a turn")


def _retains(facts: Facts, event: Event) -> bool:
    return facts.flag(event.call, "retain_graph")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP[:3], "loss.backward(retain_graph=True)", STEP[4]]),),
    healthy=(looped(), looped([*STEP[:3], "loss.backward(retain_graph=True)", "(loss * 2).backward()", STEP[4]]),),
    mend=without("retain_graph"),
)  # fmt: skip
