"""A layer gets a different number of features than it takes.

The first batch raises "mat1 and mat2 shapes cannot be multiplied", or the equivalent for channels.

Fix: use the number that the layer before outputs, or that the data has.
Source: torch.nn.Linear, torch.nn.Conv2d, torch.nn.BatchNorm2d documentation, "Shape".
"""

from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..layers import KEEPS_FEATURES, POOLS, Chain, Layer, chains
from ..rule import Found, ScriptRule
from ..samples import inputs_of


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        yield from _between(chain)
        if chain.is_whole and chain.layers:
            yield from _at_input(facts, chain)


def _between(chain: Chain) -> Iterator[Found]:
    """Yield the layers that do not fit the one before; an unknown layer in between starts over."""
    before: Layer | None = None
    for layer in chain.layers:
        is_layer = layer.kind == "Linear" or layer.is_conv or layer.is_norm
        takes = layer.ins is not None and is_layer
        if before is not None and takes and _compares(before, layer) and before.outs != layer.ins:
            yield Found(
                layer.node,
                f"{layer.kind} takes {layer.ins} and {before.kind} before it outputs {before.outs}",
                f"write {before.outs} for {layer.ins}",
            )
        if is_layer and layer.outs is not None:
            before = layer
        elif layer.kind not in KEEPS_FEATURES | POOLS:
            before = None


def _compares(before: Layer, after: Layer) -> bool:
    """Whether features can be compared: a Linear after a convolution follows a flattening."""
    if before.kind == "Linear":
        return after.kind in ("Linear", "BatchNorm1d")
    return after.kind != "Linear" and not (before.is_norm and before.kind == "BatchNorm1d")


def _at_input(facts: Facts, chain: Chain) -> Iterator[Found]:
    first = chain.layers[0]
    for data in inputs_of(facts, chain):
        is_linear = first.kind == "Linear" and len(data.input) >= 2
        is_conv = first.kind == "Conv2d" and len(data.input) == 4
        if first.ins is None or not (is_linear or is_conv):
            continue
        features = data.input[-1] if is_linear else data.input[1]
        if features != first.ins:
            batch = f"; {first.ins} is its number of samples" if data.input[0] == first.ins else ""
            yield Found(
                first.node,
                f"{first.kind} takes {first.ins} features and the data of line "
                f"{facts.script.line(data.data)} has {features}{batch}",
                f"write {features} for {first.ins}",
            )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        """
import torch
data = torch.randn(128, 15)
model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
model(data)
""",
        """
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(16, 8, 3))
""",
        """
import torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(64, 10)
    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = nn.functional.dropout(x)
        return self.fc2(F.relu(self.fc1(x)))
""",
        """
import torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 128)
        self.fc2 = nn.Linear(64, 10)
    def forward(self, x, h):
        x = F.relu(self.fc1(x))
        return self.fc2(x), h
""",
    ),
    healthy=(
        """
import torch
from torch import nn
x = torch.rand(2, 4)
net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
y = net(x)
net = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
y = net(torch.rand(2, 8))
""",
        """
import torch
data = torch.randn(128, 15)
model = torch.nn.Sequential(torch.nn.Linear(15, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
model(data)
""",
        """
from torch import nn
net = nn.Sequential(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2880, 10))
""",
        """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(256, 10)
    def forward(self, x, y):
        h = self.fc1(x)
        h = nn.functional.glu(h)
        return self.fc2(h)
""",
    ),
)  # fmt: skip
