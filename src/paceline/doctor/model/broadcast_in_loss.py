"""A loss gets a column and a row: outputs (B, 1), targets (B,).

The difference is a B x B table: each output is compared with every target, and the network learns
their mean.

Fix: output.squeeze(1), or target.unsqueeze(1).
Source: torch.nn.functional.mse_loss, its warning: "this will likely lead to incorrect results due to broadcasting".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..ends import ending
from ..facts import Facts
from ..findings import Severity
from ..lineage import last_value
from ..ranks import rank, sample_rank
from ..rule import Found, ScriptRule

_LOSSES = ("MSELoss", "mse_loss", "L1Loss", "l1_loss", "SmoothL1Loss", "smooth_l1_loss",
           "HuberLoss", "huber_loss")  # fmt: skip
_COPIES = {"to", "cuda", "float", "double", "half"}


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        arguments = positional(call)
        if facts.loss_kind(call) not in _LOSSES or len(arguments) != 2:
            continue
        for output, target in (arguments, arguments[::-1]):
            if _is_column(facts, output) and _rank_of(facts, target) == 1:
                yield Found(
                    call, f"{facts.code(output)} is (B, 1) and {facts.code(target)} is (B,)"
                )


def _is_column(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value is the output of a model that ends in a Linear of one feature."""
    if isinstance(expr, cst.Name):
        value = last_value(facts, expr)
        return value is not None and _is_column(facts, value)
    if not isinstance(expr, cst.Call) or not isinstance(expr.func, cst.Name | cst.Attribute):
        return False
    if not facts.is_model(expr.func) or _is_reshaped(facts, expr.func):
        return False
    last = ending(facts, expr)
    return last is not None and last.kind == "Linear" and last.outs == 1


def _is_reshaped(facts: Facts, model: cst.BaseExpression) -> bool:
    """Whether a forward() of the script's own may change the shape of its last layer."""
    for constructor in facts.constructors(model):
        node = facts.modules.get(facts.meaning(constructor))
        code = facts.code(node) if node is not None else ""
        if any(
            name in code for name in ("squeeze", "flatten(", "view(", "reshape(", "[:, 0]", "item")
        ):
            return True
    return False


def _rank_of(facts: Facts, expr: cst.BaseExpression) -> int | None:
    """Return the number of dimensions of a target, also of a loader's batch, or None."""
    while isinstance(expr, cst.Call) and facts.method(expr) in _COPIES:
        expr = facts.owner(expr)
    if not isinstance(expr, cst.Name):
        return rank(facts, expr)
    value = last_value(facts, expr)
    if value is not None:
        return _rank_of(facts, value)
    for loop in facts.script.up(expr):
        if not isinstance(loop, cst.For):
            continue
        target = loop.target
        if isinstance(target, cst.Tuple) and isinstance(target.elements[-1].value, cst.Tuple):
            target = target.elements[-1].value  # for i, (x, y) in enumerate(loader)
        names = [
            facts.code(element.value) for element in target.elements
        ] if isinstance(target, cst.Tuple) else []  # fmt: skip
        if expr.value in names:
            ranks = {
                sample_rank(facts, loader, names.index(expr.value))
                for loader in facts.loaders_of_loop(loop)
            }
            return ranks.pop() if len(ranks) == 1 else None
    return rank(facts, expr)


_FIT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(512, 16), torch.randn({})
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, {}))
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    x, y = x.cuda(), y.cuda()
    out = model(x){}
    loss = loss_fn(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_TABLE = """
import pandas as pd
import torch
from torch import nn
from sklearn.model_selection import train_test_split
frame = pd.read_csv("houses.csv")
X_train, X_test, y_train, y_test = train_test_split(frame[["rooms", "area"]].values, frame["price"].values)
X = torch.tensor(X_train, dtype=torch.float32)
y = torch.tensor(y_train, dtype=torch.float32){}
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    loss = nn.functional.mse_loss(model(X), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_FIT.format("512", "1", ""), _TABLE.format("")),
    healthy=(
        _FIT.format("512, 1", "1", ""), _FIT.format("512", "1", ".squeeze(1)"),
        _FIT.format("512, 4", "4", ""), _FIT.format("512", "1", "").replace("loss_fn(out, y)", "loss_fn(out, y.unsqueeze(1))"),
        _TABLE.format(".view(-1, 1)"), _TABLE.format("[:, None]"),
    ),
)  # fmt: skip
