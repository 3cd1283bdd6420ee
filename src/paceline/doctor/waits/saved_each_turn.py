"""A checkpoint is written in each iteration.

torch.save copies the parameters from the device and writes them while no training runs.

Fix: save once an epoch, or every few hundred steps.
Source: torch.save documentation; torch.distributed.checkpoint.async_save.
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
        if isinstance(node, cst.Call) and facts.meaning(node) == "torch.save":
            yield Found(node, f"{facts.code(node)} in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "torch.save(model.state_dict(), 'model.pt')"]),),
    healthy=(looped(after="torch.save(model.state_dict(), 'model.pt')"),),
)  # fmt: skip
