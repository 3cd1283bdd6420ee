"""The host synchronizes with the device in each iteration.

Nothing can be queued while it waits; only a measurement needs it.

Fix: leave it out, or time with events (torch.cuda.Event(enable_timing=True)).
Source: PyTorch CUDA semantics, "Asynchronous execution".
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..mends import remove_statement
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for node in always_reached(facts):
        if isinstance(node, cst.Call) and facts.meaning(node) in (
            "torch.cuda.synchronize", "torch.mps.synchronize", "torch.xpu.synchronize",
            "torch.accelerator.synchronize", "torch.cuda.current_stream.synchronize",
        ):  # fmt: skip
            yield Found(node, f"{facts.code(node)} in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "torch.cuda.synchronize()"]),),
    healthy=(looped(after="torch.cuda.synchronize()"),),
    mend=remove_statement,
)  # fmt: skip
