"""Batches are sliced from the data at the same places in each epoch.

Each batch has the same samples every time: the noise of its gradient never averages out.

Fix: order = torch.randperm(len(x)) at the start of each epoch, and x[order[i : i + size]].
Source: Goodfellow, Bengio, Courville, Deep Learning, 2016, section 8.1.3.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule

_MIXES = re.compile(
    r"randperm|permutation|\.sample\(|choice\(|randint|argsort|LSTM|GRU|RNN|hidden|"
    r"bptt|sequence|causal|shuffled|(?<!_)shuffle\("
)
_SLICE = re.compile(r"^\[(\w+):(\w+|\1\+\w+|min\(.*\))\]$")


def check(facts: Facts) -> Iterator[Found]:
    if _MIXES.search(facts.uncommented):
        return
    for turn in turns(facts):
        loop = turn.loop
        if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name):
            continue
        is_range = isinstance(loop.iter, cst.Call) and facts.meaning(loop.iter).endswith("range")
        bounds = positional(loop.iter) if is_range and isinstance(loop.iter, cst.Call) else []
        is_repeated = any(
            isinstance(outer, cst.For | cst.While) for outer in loops_around(facts, turn)
        )
        if len(bounds) == 3 and is_repeated and len(_sliced(facts, loop)) > 1:
            yield Found(loop, "each epoch slices the same batches from the data")


def _sliced(facts: Facts, loop: cst.For) -> set[str]:
    """Return the data that a loop slices by its own count alone: ``x[i : i + size]``."""
    name, sliced = facts.code(loop.target), set()
    ends = {
        binding.name for binding in facts.script.bindings
        if name in facts.script.inside(binding.value) and "[" not in facts.code(binding.value)
    }  # fmt: skip
    for node in facts.script.within(loop.body):
        if not isinstance(node, cst.Subscript):
            continue
        bounds = re.sub(r"\s", "", facts.code(node)[len(facts.code(node.value)) :])
        match = _SLICE.fullmatch(bounds)
        if (
            match
            and match[1] == name
            and (match[2].startswith((f"{name}+", "min(")) or match[2] in ends)
        ):
            sliced.add(facts.code(node.value))
    return sliced


_CUT = """
import torch
from torch import nn
x, y = torch.randn(512, 16), torch.randn(512, 1)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10):
    order = {}
    for i in range(0, len(x), 64):
        xb, yb = {}
        loss = (model(xb) - yb).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(_CUT.format("None", "x[i : i + 64], y[i : i + 64]"),),
    healthy=(
        _CUT.format("torch.randperm(len(x))", "x[order[i : i + 64]], y[order[i : i + 64]]"),
        _CUT.format("np.random.permutation(len(x))", "x[order][i : i + 64], y[order][i : i + 64]"),
        _CUT.format("None", "x[i : i + 64], y[i : i + 64]").replace("for epoch in range(10):", "if True:"),
        looped(),
    ),
)  # fmt: skip
