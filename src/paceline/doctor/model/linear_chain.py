"""Two linear layers follow each other without an activation in between.

Together they are one linear map: the second adds no capacity, and its work is wasted.

Fix: put an activation between them, or use one layer.
Source: Goodfellow, Bengio, Courville, Deep Learning, 2016, section 6.1.
"""

from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..layers import DROPOUTS, Layer, chains
from ..rule import Found, ScriptRule

_TRANSPARENT = DROPOUTS | {"Identity"}


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        for run in _runs(chain.layers):
            is_narrow = len(run) == 2 and _is_bottleneck(run[0], run[1])
            if len(run) > 1 and not is_narrow:
                features = (run[0].ins, *(layer.outs for layer in run))
                sizes = " -> ".join(str(size) for size in features)
                yield Found(
                    run[0].node,
                    f"{len(run)} {run[0].kind} layers ({sizes}) follow each other without an "
                    "activation in between",
                )


def _runs(layers: tuple[Layer, ...]) -> Iterator[list[Layer]]:
    """Yield runs of linear layers, layers that change nothing between them left out.

    A layer whose output has other readers, too, ends a run: it and the next are no single map.
    """
    run: list[Layer] = []
    for layer in layers:
        if layer.kind == "Linear":
            run.append(layer)
        if layer.is_shared or (layer.kind != "Linear" and layer.kind not in _TRANSPARENT):
            yield run
            run = []
    yield run


def _is_bottleneck(first: Layer, second: Layer) -> bool:
    """Whether a pair is a low-rank factorization, narrower in the middle, or its sizes unknown."""
    if first.ins is None or first.outs is None or second.outs is None:
        return True
    return first.outs < first.ins and first.outs < second.outs


_RESIDUAL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc1 = nn.Linear(16, 64), nn.Linear(64, 128)
        self.fc2, self.head = nn.Linear(128, 64), nn.Linear(64, 1)
    def forward(self, x):
        x = self.embed(x)
        h = self.fc1(x).relu()
        x = x + self.fc2(h)
        return self.head(x)
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        """
from torch import nn
model = nn.Sequential(nn.Linear(15, 64), nn.Linear(64, 32), nn.Linear(32, 3))
""",
        """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 10)
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(x)
""",
        _RESIDUAL.replace("x = x + self.fc2(h)", "x = self.fc2(h)").replace(".relu()", ".view(x.size(0), 128)").replace("self.fc2(h)", "self.fc2(h.relu())"),
    ),
    healthy=(
        """
from torch import nn
model = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 3))
low_rank = nn.Sequential(nn.Linear(1024, 16, bias=False), nn.Linear(16, 1024))
""",
        """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 10)
    def forward(self, x):
        x = self.fc1(x).relu()
        return self.fc2(x)
""",
        _RESIDUAL,
        _RESIDUAL.replace("x = x + self.fc2(h)", "x = self.fc2(h) + x"),
        _RESIDUAL.replace("x = x + self.fc2(h)", "x += self.fc2(h)"),
    ),
)  # fmt: skip
