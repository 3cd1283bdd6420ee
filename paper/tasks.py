"""What the paper trains: softmax regression with a penalty, on images in [0, 1].

    F(w) = mean of -log softmax(W x + b)[y] + lambda ||W||_F^2,    W ~ N(0, 0.01^2), b = 0

The paper has no epochs: its theory draws every sample independently. So the images repeat often
enough that no run reaches the border of an epoch, where all workers would wait for each other. It
must not know protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.arrays import ArrayDataset, Batch, Splits, load
from paceline.data.fetch import Chooser
from paceline.errors import ConfigError
from paceline.workloads.base import Task, init_normal

DATA_SETS = ("mnist", "fashion-mnist")
"""The data set of the paper, and its substitute."""
SIDE_PX = 28
CLASSES = 10
EVALUATED = 10_000
"""Number of images that the loss is measured on: the first ones of the training set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images to train on, with a title."""

    train: ArrayDataset
    title: str
    is_the_papers: bool


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """A data set repeated several times.

    Args:
        times: number of repetitions, >= 1.
    """

    def __init__(self, data: ArrayDataset, times: int) -> None:
        self._data = data
        self._times = times

    def __len__(self) -> int:
        return len(self._data) * self._times

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._data[index % len(self._data)]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return self._data.__getitems__([index % len(self._data) for index in indices])


class Softmax(nn.Module):
    """(B, ...) -> (B, 11): ten logits, and the penalty lambda ||W||_F^2 as the last column.

    The penalty is part of the output because a loss gets outputs and targets but no weights.
    """

    def __init__(self, num_inputs: int, penalty: float) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, CLASSES)
        self._penalty = penalty
        init_normal(self, zero_biases=True)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.linear(images.flatten(1))
        penalty = self._penalty * self.linear.weight.square().sum()
        return torch.cat([logits, penalty.expand(len(logits), 1)], dim=1)


def objective(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return F(w) on a batch: mean cross entropy plus the penalty."""
    fit = nn.functional.cross_entropy(outputs[:, :CLASSES], targets)
    return fit + outputs[:, CLASSES].mean()


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    """Return F(w) and accuracy of (B, 11) outputs, as sums with counts."""
    count = float(len(targets))
    is_right = outputs[:, :CLASSES].argmax(dim=1) == targets
    value = objective(outputs, targets).item()
    return {"loss": (value * count, count), "acc": (float(is_right.sum()), count)}


def softmax(
    images: Images, *, penalty: float, eta: float, mini_batch_size: int, times: int
) -> Task:
    """Return the task of one figure.

    Args:
        penalty: lambda.
        eta: the step of an update.
        mini_batch_size: m, samples per gradient.
        times: repetitions of the images in an epoch.
    """
    data = images.train
    num_evaluated = min(EVALUATED, len(data))
    num_inputs = data.inputs[0].numel()
    return Task(
        name="softmax with penalty",
        model=lambda: Softmax(num_inputs, penalty),
        loss=objective,
        data=lambda: Splits(
            train=Repeated(data, times),
            test=ArrayDataset(
                data.inputs[:num_evaluated], data.targets[:num_evaluated], scale=data.scale
            ),
            source=images.title,
        ),
        learning_rate=eta,
        batch_size=mini_batch_size,
        epochs=1,
        metrics=metrics,
    )


def grey(num_images: int = 10_000, side_px: int = 32, seed: int = 0) -> Images:
    """Return synthetic grey images in ten classes, as bright and as rough as photographs.

    An image is the sum of its class's pattern and its own, both smooth noise, and some grain. The
    mean and the standard deviation of pixels are about those of natural images in [0, 1]: 0.5
    and 0.25.
    """
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (num_images,), generator=rng)
    patterns = _smooth_noise(CLASSES, side_px, rng)
    inputs = 0.5 + 0.1 * patterns[targets] + 0.2 * _smooth_noise(num_images, side_px, rng)
    inputs += 0.05 * torch.randn(inputs.shape, generator=rng)
    return Images(
        train=ArrayDataset((inputs.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8), targets),
        title=f"made-up grey images, {num_images:,} of {side_px} x {side_px} pixels",
        is_the_papers=False,
    )


def _smooth_noise(count: int, side_px: int, rng: torch.Generator) -> Tensor:
    """Return (count, 1, side, side), mean 0 and standard deviation 1, of blobs an eighth wide."""
    coarse = torch.randn(count, 1, 8, 8, generator=rng)
    size = (side_px, side_px)
    fine = nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False)
    return fine / fine.std()


def digits(chooser: Chooser) -> Images:
    """Return MNIST, or its substitute.

    Raises:
        ConfigError: neither is on this machine, and neither can be fetched.
    """
    for name in DATA_SETS:
        if chooser(name).name == name:
            splits = load(name)
            assert isinstance(splits.train, ArrayDataset)
            return Images(
                train=splits.train,
                title=f"{splits.source.partition(' (')[0]}, {len(splits.train):,} images",
                is_the_papers=name == DATA_SETS[0],
            )
    raise ConfigError(
        f"the paper's figures need {' or '.join(DATA_SETS)}, and neither is here: "
        "`paceline data get mnist` says why"
    )
