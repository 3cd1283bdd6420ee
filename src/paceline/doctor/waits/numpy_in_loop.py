"""A device tensor is copied to the host in each iteration.

cpu() and numpy() wait until the device has computed it, and copy it.

Fix: compute the metric on the device, and copy it every few steps.
Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..rule import Found, ScriptRule
from ..tensors import tensors_of
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for node in always_reached(facts) if facts.has_accelerator else ():
        if not isinstance(node, cst.Call):
            continue
        is_cpu = facts.method(node) == "cpu" or (
            facts.method(node) == "to"
            and any(literal(argument) == "cpu" for argument in positional(node)[:1])
        )
        if is_cpu and tensors.is_tensor(facts.owner(node)):
            yield Found(node, f"{facts.code(node)} waits for the device in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "seen.append(loss.detach().cpu().numpy())"], before="seen = []"),),
    healthy=(looped([*STEP, "if step % 100 == 0:\n    seen.append(loss.detach().cpu())", "step += 1"], before="seen, step = [], 0"),),
)  # fmt: skip
