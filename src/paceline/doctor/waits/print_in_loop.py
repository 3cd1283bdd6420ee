"""A device tensor is printed in each iteration.

Printing needs its value, so the host waits until the device has computed it.

Fix: print every few steps.
Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name, positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..rule import Found, ScriptRule
from ..tensors import tensors_of

_PRINTS = re.compile(
    r"(^|\.)(print|write|info|debug|set_postfix|set_description|add_scalar)$|(wandb|logger|logging)\.log$"
)


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for node in always_reached(facts) if facts.has_accelerator else ():
        if not isinstance(node, cst.Call) or not _PRINTS.search(facts.meaning(node)):
            continue
        if facts.flow.function_of(node) is not None:
            continue
        if facts.script.meaning(node.func).startswith(("torch.", "math.", "numpy.")):
            continue
        for value in _printed(facts, node):
            if tensors.is_tensor(value):
                yield Found(node, f"{facts.code(value)} is printed in each iteration")
                break


def _printed(facts: Facts, call: cst.Call) -> Iterator[cst.BaseExpression]:
    """Yield the arguments of a call, and the expressions inside its f-strings."""
    for argument in (*positional(call), *by_name(call).values()):
        yield argument
        if isinstance(argument, cst.FormattedString):
            for part in argument.parts:
                if isinstance(part, cst.FormattedStringExpression):
                    yield part.expression


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "print(f'{epoch} {loss}')"]),),
    healthy=(looped([*STEP, "print(epoch)"]),),
)  # fmt: skip
