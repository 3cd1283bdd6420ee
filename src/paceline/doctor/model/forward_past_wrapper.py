"""``forward()`` of a wrapped model is called directly.

Hooks that are registered on the wrapper do not run: a profiler's, a framework's. The reduction of
DistributedDataParallel is in its forward(), and goes on.

Fix: call the model itself.
Source: torch.nn.Module documentation: call the instance "since the former takes care of running the registered hooks".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("forward"):
        if facts.is_wrapped(facts.owner(call)):
            owner = facts.code(facts.owner(call))
            yield Found(call, f"{owner}.forward(...) of a wrapped model", f"write {owner}(...)")


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """The wrapper itself is called."""
    assert isinstance(node, cst.Call)
    owner = facts.owner(node)
    edits.change(node, lambda made: made.with_changes(func=owner))


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP[:2], "loss = loss_fn(net.forward(x), y)", *STEP[3:]], before="net = nn.DataParallel(model)"),),
    healthy=(looped([*STEP[:2], "loss = loss_fn(net(x), y)", *STEP[3:]], before="net = nn.DataParallel(model)"),),
    mend=mend,
)  # fmt: skip
