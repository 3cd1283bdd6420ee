"""A small training script from which the rules make their sick and healthy examples."""

from collections.abc import Sequence

STEP = (
    "x, y = x.to(device), y.to(device)",
    "optimizer.zero_grad()",
    "loss = loss_fn(model(x), y)",
    "loss.backward()",
    "optimizer.step()",
)
"""The lines of one turn of the training loop."""
_HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
model = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)
).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(512, 16), torch.randint(0, 8, (512,)))
loader = DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)
"""


def looped(
    body: Sequence[str] = STEP, *, before: str = "", epoch: str = "", after: str = "", end: str = ""
) -> str:
    """Return a script whose loop over batches has this body.

    Args:
        body: statements of the loop over batches, each of one or several lines.
        before: lines before the loops.
        epoch: lines of the loop over epochs before the loop over batches.
        after: lines of the loop over epochs after the loop over batches.
        end: lines after the loops.
    """
    lines = ["for epoch in range(10):"]
    lines += [f"    {line}" for line in epoch.splitlines()]
    lines += [
        "    for x, y in loader:",
        *(f"        {line}" for statement in body for line in statement.split("\n")),
    ]
    lines += [f"    {line}" for line in after.splitlines()]
    return "\n".join([_HEAD, before, *lines, end, ""])


def scaled(*, clip: str = "", backward: str = "", step: str = "", update: str = "scaler.update()",
           inside: str = "", dtype: str = "torch.float16") -> str:  # fmt: skip
    """Return a script that trains under autocast with a GradScaler.

    Args:
        clip: lines between backward() and step(), such as unscale_() and clipping.
        backward, step, update: what replaces the usual line; ``update=""`` leaves it out.
        inside: a line under autocast, after the loss.
    """
    body = [
        "x, y = x.to(device), y.to(device)", "optimizer.zero_grad()",
        f'with torch.autocast("cuda", dtype={dtype}):', "    loss = loss_fn(model(x), y)",
        *([f"    {inside}"] if inside else []),
        backward or "scaler.scale(loss).backward()", *clip.splitlines(),
        step or "scaler.step(optimizer)", *([update] if update else []),
    ]  # fmt: skip
    return looped(body, before='scaler = torch.amp.GradScaler("cuda")')
