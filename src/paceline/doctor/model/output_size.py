"""The network makes pictures of another size than the targets have.

A loss between the two fails, or broadcasts silently.

Fix: pad the convolutions (padding=1 for a kernel of 3), or crop the target.
Source: torch.nn.Conv2d documentation, the formula of H_out.
"""

from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..layers import chains, output_size
from ..rule import Found, ScriptRule
from ..samples import inputs_of


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        if not chain.is_whole:
            continue
        for one in inputs_of(facts, chain):
            if one.target is None or len(one.input) != 4 or len(one.target) != 4:
                continue
            channels, height, width = one.input[1:]
            made = output_size(facts, chain.layers, (channels, height, width))
            wanted = one.target[1:]
            if made is not None and made[0] == wanted[0] and made[1:] != wanted[1:]:
                yield Found(
                    one.call,
                    f"the output is {made[1]}x{made[2]} and the target {wanted[1]}x{wanted[2]}",
                )


_DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
image, mask = torch.randn(64, 3, 26, 26), torch.rand(64, 1, 26, 26)
loader = DataLoader(TensorDataset(image, mask), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 8, 3{0}), nn.ReLU(), nn.Conv2d(8, 1, kernel_size=3{0}))
for x, y in loader:
    out = model(x)
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_DATA.format(""),),
    healthy=(_DATA.format(", padding=1"),),
)  # fmt: skip
