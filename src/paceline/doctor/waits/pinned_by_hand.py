"""A tensor is pinned right before it is moved.

Pinning copies it on the host while the host waits: a plain copy is usually faster.

Fix: pin_memory=True in the DataLoader, which pins in a thread of its own; or move it without
pinning.
Source: PyTorch tutorial "A guide on good usage of non_blocking and pin_memory()".
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for node in always_reached(facts):
        if not isinstance(node, cst.Call) or facts.method(node) not in ("to", "cuda"):
            continue
        owner = facts.owner(node)
        if facts.method(owner) == "pin_memory":
            yield Found(node, f"{facts.code(node)} pins while the host waits, in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(["x = x.pin_memory().to(device, non_blocking=True)", *STEP]),),
    healthy=(looped(["x = x.to(device, non_blocking=True)", *STEP]),),
)  # fmt: skip
