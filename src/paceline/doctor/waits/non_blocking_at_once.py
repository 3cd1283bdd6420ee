"""A non_blocking copy from memory that is not pinned is used on the next line.

A tensor just created on the host lies in pageable memory, which CUDA copies while the host waits;
and there is no work in between that the copy could overlap with.

Fix: create it on the device (device=...), or pin it and do other work before it is used.
Source: PyTorch tutorial "A guide on good usage of non_blocking and pin_memory()".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_FACTORIES = re.compile(r"^torch\.(rand|randn|zeros|ones|full|empty|arange|eye|randint|tensor)$")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("to", "cuda"):
        owner = facts.owner(call)
        if not facts.flag(call, "non_blocking") or not isinstance(owner, cst.Call):
            continue
        is_pageable = _FACTORIES.search(facts.meaning(owner)) and "pin_memory" not in facts.code(
            owner
        )
        is_host = any(literal(argument) == "cpu" for argument in positional(call)[:1])
        if is_pageable and not is_host and _is_used_next(facts, call):
            yield Found(call, f"{facts.code(call)} is used on the next line")


def _is_used_next(facts: Facts, call: cst.Call) -> bool:
    name = re.escape(facts.bound_to(call))
    return bool(name) and re.search(rf"\b{name}\b", facts.following(call)) is not None


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=("import torch\nt = torch.randn(100, 100).to('cuda', non_blocking=True)\nt += 10\n",),
    healthy=("import torch\nt = torch.randn(9, 9).to('cuda', non_blocking=True)\nu = torch.randn(9, 9)\nt += 10\n",),
)  # fmt: skip
