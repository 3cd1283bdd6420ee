"""Layer sizes are not multiples of 8.

Tensor cores work in tiles of 8 numbers of 16 bits (16 of int8): other sizes are padded or use a
slower kernel. The gain depends on the device and on the layer's share of the work.

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
        for data in inputs_of(facts, chain) if chain.layers[0].kind == "Linear" else ():
            if data.input[-1] % 8:
                yield Found(
                    data.data, f"the {data.input[-1]} features of the data are not a multiple of 8"
                )
        for layer in chain.layers:
            if layer.kind != "Linear" and not layer.is_conv:
                continue
            odd = [str(size) for size in (layer.ins, layer.outs) if size is not None and size % 8]
            if odd:
                are = "is not a multiple" if len(odd) == 1 else "are not multiples"
                yield Found(layer.node, f"{' and '.join(odd)} {are} of 8")


_TEXT = """
from torch import nn
model = nn.Sequential(nn.Linear({}, 64), nn.ReLU(), nn.Linear(64, {}))
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.NOTE, check,
    sick=(_TEXT.format(15, 5),),
    healthy=(_TEXT.format(16, 8),),
)  # fmt: skip
