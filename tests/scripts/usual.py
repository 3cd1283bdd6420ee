"""Common parts of scripts: data, a small network, the loop of the README.

All in float64 and deterministic. This module must not know how a script is run.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from .base import SAMPLES

WIDTH, CLASSES = 6, 3
loss_of = nn.functional.cross_entropy


def tensors(num_samples: int = SAMPLES, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Vectors whose class can be learned."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def points(num_samples: int = SAMPLES) -> TensorDataset:
    """(vector, class)."""
    return TensorDataset(*tensors(num_samples))


def held_out(num_samples: int = 17) -> TensorDataset:
    """Other samples of the same kind, for evaluation."""
    return TensorDataset(*tensors(num_samples, seed=8))


class Numbered(Dataset[Any]):
    """(vector, class, number of the sample)."""

    def __init__(self, num_samples: int = SAMPLES) -> None:
        self.inputs, self.targets = tensors(num_samples)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], index


def network(*extra: nn.Module, seed: int = 3) -> nn.Sequential:
    """Two layers, with an optional layer between them."""
    torch.manual_seed(seed)
    layers = nn.Linear(WIDTH, 12), nn.Tanh(), *extra, nn.Linear(12, CLASSES)
    return nn.Sequential(*layers).double()


def one_epoch(pace: Any, model: nn.Module, optimizer: Optimizer, loader: Any) -> None:
    """The loop of the README."""
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


def count_right(model: nn.Module) -> Any:
    """For ``pace.evaluate``: number of right answers and loss of a batch."""

    def measure(batch: Any) -> dict[str, tuple[float, float]]:
        outputs = model(batch[0])
        right = (outputs.argmax(dim=1) == batch[1]).sum()
        loss = loss_of(outputs, batch[1], reduction="sum")
        return {"right": (float(right), len(batch[1])), "loss": (float(loss), len(batch[1]))}

    return measure
