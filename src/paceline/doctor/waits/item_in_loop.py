"""A number is read from the device in each iteration.

item(), tolist(), float() and int() of a tensor wait until the device has computed it: the queue
runs empty, and the next iteration starts late. This costs nothing if the device is the bottleneck
anyway.

Fix: sum loss.detach() on the device, and read it every few steps.
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


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for node in always_reached(facts) if facts.has_accelerator else ():
        if not isinstance(node, cst.Call):
            continue
        name = facts.method(node)
        if name in ("item", "tolist") and tensors.is_tensor(facts.owner(node)):
            yield Found(node, f"{facts.code(node)} waits for the device in each iteration")
        is_number = facts.meaning(node) in ("float", "int", "bool")
        if is_number and positional(node) and tensors.is_tensor(positional(node)[0]):
            yield Found(node, f"{facts.code(node)} waits for the device in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "total += loss.item()"], before="total = 0.0"),),
    healthy=(looped([*STEP, "step += 1", "if step % 100 == 0:\n    print(loss.item())"], before="step = 0"), looped([*STEP, "total += loss.item()"], before="total = 0.0").replace('"cuda"', '"cpu"'),),
)  # fmt: skip
