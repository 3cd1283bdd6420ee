"""``CUDA_VISIBLE_DEVICES`` is set after a device was used.

CUDA reads it once, when it begins: later it changes nothing.

Fix: set it in the first lines, before torch is imported, or in the shell.
Source: PyTorch CUDA semantics, environment variables; CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    module, order = facts.script.module, facts.script.order
    uses = [
        one for one in (*facts.methods("cuda"), *facts.methods("to"))
        if facts.script.scope(one) is module and (facts.method(one) == "cuda" or _is_cuda(one))
        and not any(isinstance(up, cst.If) for up in facts.script.up(one))
    ]  # fmt: skip
    for one in facts.script.bindings:
        is_named = re.fullmatch(r"""os\.environ\[['"]CUDA_VISIBLE_DEVICES['"]\]""", one.name)
        before = [use for use in uses if order[use] < order[one.node]]
        if is_named and before and facts.script.scope(one.node) is module:
            line = facts.script.line(before[0])
            yield Found(one.node, f"CUDA_VISIBLE_DEVICES is set after line {line} used CUDA")


def _is_cuda(call: cst.Call) -> bool:
    return any(
        (literal(one) or "").startswith("cuda")
        for one in positional(call)[:1]
        if isinstance(one, cst.SimpleString)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=("import os\nimport torch\nx = torch.ones(3).cuda()\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n",),
    healthy=("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch\nx = torch.ones(3).cuda()\n",),
)  # fmt: skip
