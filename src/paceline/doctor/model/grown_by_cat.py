"""A tensor grows by ``torch.cat`` in each iteration of a loop.

Each iteration copies the whole tensor: n iterations copy n*n/2 pieces.

Fix: append to a list, and call torch.cat once after the loop.
Source: torch.cat documentation: it returns a new tensor.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for binding in facts.script.bindings:
        name, value = binding.name, binding.value
        if not isinstance(value, cst.Call) or facts.meaning(value) not in (
            "torch.cat",
            "torch.hstack",
            "torch.vstack",
        ):
            continue
        args = positional(value)
        parts = args[0].elements if args and isinstance(args[0], cst.List | cst.Tuple) else ()
        names = [facts.code(part.value) for part in parts]
        loop = next((node for node in facts.script.up(value) if isinstance(node, cst.For)), None)
        if loop is None or name not in names[:1] or _is_read(facts, name, loop, value):
            continue
        nodes = set(facts.script.within(loop))
        num_assigned = sum(
            other.name == name and other.node in nodes for other in facts.script.bindings
        )
        if num_assigned == 1:
            yield Found(
                value,
                f"{name} is copied as a whole in each iteration of line {facts.script.line(loop)}",
            )


def _is_read(facts: Facts, name: str, loop: cst.For, value: cst.Call) -> bool:
    """Whether a loop reads the tensor before it is complete, as a text generator does."""
    nodes = set(facts.script.within(value))
    return any(
        isinstance(node, cst.Name | cst.Attribute)
        and facts.code(node) == name
        and node not in nodes
        and not isinstance(facts.script.parents[node], cst.AssignTarget)
        for node in facts.script.within(loop)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "outs = torch.cat([outs, loss.detach().view(1)])"], before="outs = torch.empty(0)"),),
    healthy=(looped([*STEP, "outs.append(loss.detach())"], before="outs = []", end="torch.stack(outs)"),),
)  # fmt: skip
