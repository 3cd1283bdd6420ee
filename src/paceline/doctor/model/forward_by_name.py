"""``forward()`` of a model is called directly.

Registered hooks do not run: those of a profiler, a framework, or weight and spectral normalisation.
The reduction of DistributedDataParallel is in its forward() and still runs.

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
        model = facts.owner(call)
        if facts.is_wrapped(model) or facts.is_model(model):
            owner = facts.code(model)
            kind = "a wrapped model" if facts.is_wrapped(model) else "a model"
            yield Found(call, f"{owner}.forward(...) of {kind}", f"write {owner}(...)")


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Call the model itself."""
    assert isinstance(node, cst.Call)
    owner = facts.owner(node)
    edits.change(node, lambda call: call.with_changes(func=owner))


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped([*STEP[:2], "loss = loss_fn(net.forward(x), y)", *STEP[3:]], before="net = nn.DataParallel(model)"),
        looped([*STEP[:2], "loss = loss_fn(model.forward(x), y)", *STEP[3:]]),
    ),
    healthy=(
        looped([*STEP[:2], "loss = loss_fn(net(x), y)", *STEP[3:]], before="net = nn.DataParallel(model)"),
        looped(before="class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)"),
    ),
    mend=mend,
)  # fmt: skip
