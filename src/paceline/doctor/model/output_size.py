"""The network outputs images of a different size than the targets.

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
        for data in inputs_of(facts, chain):
            if data.target is None or len(data.input) != 4 or len(data.target) != 4:
                continue
            channels, height, width = data.input[1:]
            output = output_size(facts, chain.layers, (channels, height, width))
            target = data.target[1:]
            if output is not None and output[0] == target[0] and output[1:] != target[1:]:
                yield Found(
                    data.call,
                    f"the output is {output[1]}x{output[2]} and the target {target[1]}x{target[2]}",
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
