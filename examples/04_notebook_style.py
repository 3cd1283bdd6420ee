"""From Python, as in a notebook: python examples/04_notebook_style.py

Everything is defined here, in `__main__`, as in a notebook's cells, and still reaches the workers.
They are not forked from this process, so it may already have used its accelerator.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.base import loss_metrics

WEIGHT = torch.tensor([[2.0, -1.0, 0.5]])


def samples() -> paceline.Splits:
    """A straight line in three dimensions, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2400, 3, generator=generator)
    targets = inputs @ WEIGHT.T + 0.01 * torch.randn(2400, 1, generator=generator)
    return paceline.Splits(
        train=TensorDataset(inputs[:2000], targets[:2000]),
        test=TensorDataset(inputs[2000:], targets[2000:]),
        source="a straight line",
    )


summary = paceline.train(
    paceline.Task(
        name="line",
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        data=samples,
        learning_rate=0.1,
        batch_size=40,
        epochs=3,
        metrics=loss_metrics(nn.functional.mse_loss),
    ),
    workers=2,
    protocol="k-async:1",
    run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
)

print(f"{summary.updates} updates, loss {summary.final_loss:.4f}, files in {summary.run_dir}")
