"""A new loss tensor is created with ``requires_grad=True`` before backward().

The new tensor is not connected to the model: backward() runs, but no parameter gets a gradient.

Fix: call backward() on the loss computed from the model's output.
Source: torch.tensor documentation: it copies data and makes a leaf of the graph.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, turns
from ..rule import Found, ScriptRule

_MAKES = re.compile(r"^torch\.(tensor|as_tensor|FloatTensor|autograd\.Variable)$")


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        losses = {event.subject for event in turn.of(CallRole.BACKWARD)}
        flags = {f"{loss}.requires_grad" for loss in losses}
        nodes = set(facts.script.within(turn.loop))
        for binding in facts.script.bindings:
            name, value = binding.name, binding.value
            is_new = (
                isinstance(value, cst.Call)
                and _MAKES.search(facts.meaning(value)) is not None
                and facts.flag(value, "requires_grad")
            )
            if name in losses and binding.node in nodes and is_new:
                yield Found(value, f"{name} is a new leaf: {facts.code(value)}")
            if name in flags and binding.node in nodes:
                yield Found(binding.node, f"{name} is set by hand: its graph is lost")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP[:3], "loss = torch.tensor(loss.item(), requires_grad=True)", *STEP[3:]]),),
    healthy=(looped(),),
)  # fmt: skip
