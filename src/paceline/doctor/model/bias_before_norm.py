"""A layer has a bias right before a batch norm.

The norm subtracts the mean and the bias with it: the bias is computed, trained and sent for
nothing.

Fix: bias=False.
Source: PyTorch performance tuning guide, "Disable bias for convolutions directly followed by a batch norm".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..facts import Facts
from ..findings import Severity
from ..layers import chains
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    biased = {
        before.node: facts.script.line(before.node)
        for chain in chains(facts)
        for before, after in zip(chain.layers, chain.layers[1:], strict=False)
        if before.call is not None and (before.is_conv or before.kind == "Linear")
        and after.is_norm and not before.is_shared and _has_bias(before.call)
    }  # fmt: skip
    if biased:
        lines = sorted(set(biased.values()))
        first = min(biased, key=lambda node: biased[node])
        more = f" (lines {', '.join(map(str, lines))})" if len(lines) > 1 else ""
        yield Found(first, f"a layer has a bias right before a batch norm{more}")


def _has_bias(call: cst.Call) -> bool:
    return "bias" not in by_name(call) and not any(argument.star for argument in call.args)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=("from torch import nn\nnet = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())\n",),
    healthy=("from torch import nn\nnet = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))\n",),
)  # fmt: skip
