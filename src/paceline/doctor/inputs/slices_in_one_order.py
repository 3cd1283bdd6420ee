"""Batches are cut out of the data at the same places in each epoch.

Each batch has the same samples every time: the noise of its gradient never averages out.

Fix: order = torch.randperm(len(x)) at the beginning of each epoch, and x[order[i : i + size]].
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
        counts = isinstance(loop.iter, cst.Call) and facts.meaning(loop.iter).endswith("range")
        given = positional(loop.iter) if counts and isinstance(loop.iter, cst.Call) else []
        is_epochs = any(_is_counted(one) for one in loops_around(facts, turn))
        if len(given) == 3 and is_epochs and len(_cut(facts, loop)) > 1:
            yield Found(loop, "each epoch cuts the same batches out of the data")


def _is_counted(loop: cst.CSTNode) -> bool:
    return isinstance(loop, cst.For | cst.While)


def _cut(facts: Facts, loop: cst.For) -> set[str]:
    """What is cut by this loop's count, ``x[i : i + size]``, and nothing else."""
    name, found = facts.code(loop.target), set()
    ends = {
        one.name for one in facts.script.bindings
        if name in facts.script.inside(one.value) and "[" not in facts.code(one.value)
    }  # fmt: skip
    for one in facts.script.within(loop.body):
        if not isinstance(one, cst.Subscript):
            continue
        text = re.sub(r"\s", "", facts.code(one)[len(facts.code(one.value)) :])
        match = _SLICE.fullmatch(text)
        if (
            match
            and match[1] == name
            and (match[2].startswith((f"{name}+", "min(")) or match[2] in ends)
        ):
            found.add(facts.code(one.value))
    return found


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
