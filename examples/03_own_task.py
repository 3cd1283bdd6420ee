"""A task of your own, trained by name, from its own folder:

    cd examples
    paceline train 03_own_task:task --workers 4 --protocol k-batch-sync:3

A task is a model, a loss, data and default settings; every worker makes its own objects.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.workloads.base import classification_metrics

NUM_TRAIN, NUM_TEST = 6000, 1000


def spirals() -> paceline.Splits:
    """Points on three spirals in the plane; the spiral is the class."""
    generator = torch.Generator().manual_seed(1)
    num_samples = NUM_TRAIN + NUM_TEST
    classes = torch.arange(num_samples) % 3
    radius = torch.rand(num_samples, generator=generator)
    angle = 5 * radius + 2.1 * classes + 0.15 * torch.randn(num_samples, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return paceline.Splits(
        train=TensorDataset(points[:NUM_TRAIN], classes[:NUM_TRAIN]),
        test=TensorDataset(points[NUM_TRAIN:], classes[NUM_TRAIN:]),
        source=f"three spirals ({NUM_TRAIN:,} + {NUM_TEST:,} points)",
    )


def network() -> nn.Module:
    hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 3))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


task = paceline.Task(
    name="spirals",
    model=network,
    loss=cross_entropy,
    data=spirals,
    optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    learning_rate=0.005,
    batch_size=120,
    epochs=6,
    metrics=classification_metrics,
)
