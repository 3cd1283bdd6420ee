"""A branch depends on a device tensor in each iteration.

The host waits, since the condition is known only when the device has computed it.

Fix: torch.where, or test every few steps; a GradScaler skips infinite gradients by itself.
Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization".
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..rule import Found, ScriptRule
from ..tensors import tensors_of


def check(facts: Facts) -> Iterator[Found]:
    tensors = tensors_of(facts)
    for node in always_reached(facts) if facts.has_accelerator else ():
        if not isinstance(node, cst.If):
            continue
        condition = node.test
        while isinstance(condition, cst.UnaryOperation):
            condition = condition.expression
        if tensors.is_tensor(condition):
            yield Found(node, f"if {facts.code(node.test)} waits for the device in each iteration")


_AGENT = """
import torch
from torch import nn
class Agent:
    def __init__(self):
        self.net = nn.Linear(4, 2).cuda()
        self.optimizer = torch.optim.Adam(self.net.parameters())
    def learn(self, x, y, step):
        loss = nn.functional.mse_loss(self.net(x), y)
        {}
            loss = loss / 2
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
agent = Agent()
for step in range(10000):
    if step > 1000:
        agent.learn(*sample(), step)
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(
        looped([*STEP[:3], "if torch.isnan(loss):\n    continue", *STEP[3:]]), _AGENT.format("if loss > 100:"),
    ),
    healthy=(looped([*STEP, "if epoch > 3:\n    pass"]), _AGENT.format("if step > 100:")),
)  # fmt: skip
