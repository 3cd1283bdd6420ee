"""A tensor is made on the host in each turn, and then moved.

It is filled by the host, and copied from memory that is not pinned, so the host waits.

Fix: give it device=device where it is made.
Source: PyTorch performance tuning guide, "Create tensors directly on the target device".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits, by_name, positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..mends import set_arguments
from ..rule import Found, ScriptRule
from ..values import literal

_MAKES = re.compile(r"^torch\.(rand|randn|zeros|ones|full|empty|arange|eye|randint|linspace)$")


def check(facts: Facts) -> Iterator[Found]:
    for node in always_reached(facts) if facts.has_accelerator else ():
        name = facts.method(node) if isinstance(node, cst.Call) else ""
        if not isinstance(node, cst.Call) or name not in ("to", "cuda"):
            continue
        owner = facts.owner(node)
        is_host = literal(positional(node)[0]) == "cpu" if positional(node) else False
        is_type = bool(positional(node)) and "torch." in facts.code(positional(node)[0])
        if is_host or is_type or not isinstance(owner, cst.Call):
            continue
        if _MAKES.search(facts.meaning(owner)) and "device" not in by_name(owner):
            yield Found(node, f"{facts.code(node)} is made on the host in each turn")


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """It is made where it goes; random numbers are left alone: each device has its own."""
    assert isinstance(node, cst.Call)
    owner = facts.owner(node)
    assert isinstance(owner, cst.Call)
    given = positional(node)
    is_plain = len(node.args) == 1 and len(given) == 1
    if is_plain and "rand" not in facts.meaning(owner):
        other = TreeEdits()
        set_arguments(other, owner, device=facts.code(given[0]))
        made = owner.visit(other)
        edits.change(node, lambda _: made)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "noise = torch.randn(64, 16).to(device)"]), looped([*STEP, "mask = torch.zeros(64, 16).to(device)"]),),
    healthy=(looped([*STEP, "noise = torch.randn(64, 16, device=device)"]),),
    mend=mend,
)  # fmt: skip
