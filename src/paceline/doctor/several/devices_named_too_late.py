"""``CUDA_VISIBLE_DEVICES`` is set after a device was used.

CUDA reads it once, when it is initialised; later changes have no effect.

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
        call for call in (*facts.methods("cuda"), *facts.methods("to"))
        if facts.script.scope(call) is module and (facts.method(call) == "cuda" or _is_cuda(call))
        and not any(isinstance(node, cst.If) for node in facts.script.up(call))
    ]  # fmt: skip
    for binding in facts.script.bindings:
        sets_devices = re.fullmatch(
            r"""os\.environ\[['"]CUDA_VISIBLE_DEVICES['"]\]""", binding.name
        )
        before = [use for use in uses if order[use] < order[binding.node]]
        if sets_devices and before and facts.script.scope(binding.node) is module:
            line = facts.script.line(before[0])
            yield Found(binding.node, f"CUDA_VISIBLE_DEVICES is set after line {line} used CUDA")


def _is_cuda(call: cst.Call) -> bool:
    """Whether the first argument of a call is a CUDA device, written as a string."""
    return any(
        (literal(argument) or "").startswith("cuda")
        for argument in positional(call)[:1]
        if isinstance(argument, cst.SimpleString)
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=("import os\nimport torch\nx = torch.ones(3).cuda()\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n",),
    healthy=("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch\nx = torch.ones(3).cuda()\n",),
)  # fmt: skip
