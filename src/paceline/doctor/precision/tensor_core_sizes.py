"""Sizes of layers that are no multiple of 8.

Tensor cores work in tiles of 8 numbers of 16 bits (16 of int8): other sizes are padded, or take a
slower kernel. What that is worth depends on the device and on the layer's share of the work.

Fix: round hidden sizes up to a multiple of 8; pad inputs and outputs where they are large.
Source: NVIDIA, Matrix Multiplication Background, "Requirements to Use Tensor Cores".
"""

from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..layers import chains
from ..rule import Found, ScriptRule
from ..samples import inputs_of


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        for given in inputs_of(facts, chain) if chain.layers[0].kind == "Linear" else ():
            if given.input[-1] % 8:
                yield Found(
                    given.data, f"the {given.input[-1]} features of the data are no multiple of 8"
                )
        for one in chain.layers:
            if one.kind != "Linear" and not one.is_conv:
                continue
            odd = [str(size) for size in (one.ins, one.outs) if size is not None and size % 8]
            if odd:
                is_one = len(odd) == 1
                are = "is no multiple" if is_one else "are no multiples"
                yield Found(one.node, f"{' and '.join(odd)} {are} of 8")


_TEXT = """
from torch import nn
model = nn.Sequential(nn.Linear({}, 64), nn.ReLU(), nn.Linear(64, {}))
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.NOTE, check,
    sick=(_TEXT.format(15, 5),),
    healthy=(_TEXT.format(16, 8),),
)  # fmt: skip
