"""A regression to one number ends in a ReLU.

Where the last layer is below 0 there is no gradient; if that holds for every sample, the network
outputs 0 for ever.

Fix: leave it out, or use Softplus if the number cannot be negative.
Source: Glorot, Bordes, Bengio, Deep Sparse Rectifier Neural Networks, 2011, section 3.1.
"""

from collections.abc import Iterator

from ...porting.tree import positional
from ..ends import ending
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..layers import Layer
from ..rule import Found, ScriptRule

_LOSSES = ("MSELoss", "mse_loss", "L1Loss", "l1_loss", "SmoothL1Loss", "smooth_l1_loss",
           "HuberLoss", "huber_loss")  # fmt: skip


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        arguments = positional(call)
        if facts.loss_kind(call) not in _LOSSES or not arguments:
            continue
        last = ending(facts, arguments[0])
        if (
            last is not None
            and last.kind in ("ReLU", "relu", "relu_")
            and _has_one_output(facts, last)
        ):
            yield Found(last.node, "the network's only output goes through a ReLU")


def _has_one_output(facts: Facts, last: Layer) -> bool:
    """Whether the layer before the last, a Linear of the same network, has one output."""
    node = last.node
    for linear in facts.script.calls("Linear"):
        outs = facts.argument(linear, "out_features", 1)
        if outs is None or facts.code(outs) != "1":
            continue
        name = facts.bound_to(linear)
        if name and any(name in facts.script.inside(arg) for arg in getattr(node, "args", ())):
            return True
        parent = facts.script.parents[facts.script.parents[linear]]
        if last.call is not None and parent is facts.script.parents[facts.script.parents[node]]:
            return True
    return False


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU())\nrate = nn.MSELoss()", body=[*STEP[:2], "loss = rate(net(x), y)", *STEP[3:]]), """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 128)
        self.fc2 = nn.Linear(128, 1)
    def forward(self, x):
        return torch.relu(self.fc2(torch.relu(self.fc1(x))))
model = Net()
loss_fn = nn.MSELoss()
loss = loss_fn(model(x), y)
"""),
    healthy=(
        looped(before="net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))\nrate = nn.MSELoss()", body=[*STEP[:2], "loss = rate(net(x), y)", *STEP[3:]]),
        looped(before="net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1), nn.Softplus())\nrate = nn.MSELoss()", body=[*STEP[:2], "loss = rate(net(x), y)", *STEP[3:]]),
        looped(before="net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU())\nrate = nn.MSELoss()", body=[*STEP[:2], "loss = rate(net(x), x)", *STEP[3:]]),
    ),
)  # fmt: skip
