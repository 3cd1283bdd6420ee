"""A tensor is created on the host in each iteration and then moved.

The host fills it and waits for the copy, since its memory is not pinned.

Fix: pass device=device where it is created.
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

_FACTORIES = re.compile(r"^torch\.(rand|randn|zeros|ones|full|empty|arange|eye|randint|linspace)$")

_DEVICE = re.compile(r"(?i)(device|dev|gpu|rank)(_?id)?$")
"""What devices are called."""


def check(facts: Facts) -> Iterator[Found]:
    for node in always_reached(facts) if facts.has_accelerator else ():
        name = facts.method(node) if isinstance(node, cst.Call) else ""
        if not isinstance(node, cst.Call) or name not in ("to", "cuda"):
            continue
        owner, device = facts.owner(node), facts.argument(node, "device", 0)
        is_moved = _is_accelerator(facts, device) if device is not None else name == "cuda"
        if not is_moved or not isinstance(owner, cst.Call):
            continue
        if _FACTORIES.search(facts.meaning(owner)) and "device" not in by_name(owner):
            yield Found(node, f"{facts.code(node)} is created on the host in each iteration")


def _is_accelerator(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value is a device other than the CPU, and no dtype or tensor, by all that is seen."""
    if literal(expr) == "cpu":
        return False
    return _DEVICE.search(facts.code(expr)) is not None or any(
        isinstance(origin, cst.SimpleString | cst.FormattedString | cst.Integer)
        or facts.meaning(origin) == "torch.device"
        for origin in facts.flow.origins(expr)
    )


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Make the tensor on its device; random numbers stay, since each device draws its own."""
    assert isinstance(node, cst.Call)
    owner = facts.owner(node)
    assert isinstance(owner, cst.Call)
    arguments = positional(node)
    is_plain = len(node.args) == 1 and len(arguments) == 1
    if is_plain and "rand" not in facts.meaning(owner):
        factory_edits = TreeEdits()
        set_arguments(factory_edits, owner, device=facts.code(arguments[0]))
        factory = owner.visit(factory_edits)
        edits.change(node, lambda _: factory)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "noise = torch.randn(64, 16).to(device)"]), looped([*STEP, "mask = torch.zeros(64, 16).to(device)"]),),
    healthy=(
        looped([*STEP, "noise = torch.randn(64, 16, device=device)"]),
        looped([*STEP, "mask = torch.zeros(64, 16).to(x.dtype)"]),
        looped([*STEP, "mask = torch.zeros(64, 16).to(dtype=torch.half)"]),
        looped([*STEP, "mask = torch.zeros(64, 16).to(x)"]),
    ),
    mend=mend,
)  # fmt: skip
