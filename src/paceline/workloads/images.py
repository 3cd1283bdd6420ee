"""The tasks on 28x28 images except residual networks, and code that all image tasks share.

    softmax   784 -> 10                          one linear layer, the convex case of the papers
    mlp       784 -> 2048 -> 2048 -> 10          5.8 million parameters and little to compute
    mlp488k   normalised 784 -> 406 -> 406 -> 10 488 thousand, behind a layer that has none
    lenet     two convolutions, two layers       the main job of this package
    alexnet   five convolutions, three layers    57 million parameters

All use Fashion-MNIST. Without it they train on the digits that ship with the package, scaled up to
fit the networks, and with batches and epochs for 1,437 samples. It must not know who trains them.

Source: Zhang, Lipton, Li, Smola, "Dive into Deep Learning", sections 4.5 and 13.5: weights
N(0, 0.01^2), biases 0, batch 256, and the learning rates of softmax and LeNet.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.arrays import load
from ..data.fetch import Chooser, choose_here
from .base import Task, chosen_init, classification_metrics, init_normal, sgd

WISHED = "fashion-mnist"
SIDE_PX = 28
_ALEXNET_SIDE_PX = 224
_NUM_NORMALISED = 10_000
"""Samples whose mean and standard deviation a normalising layer takes."""
_LEAST_STD = 1e-2
"""For features between 0 and 1: an edge pixel that is nearly always 0 stays small."""
_SLOW_START = (
    "accuracy stays near 0.10 for the first few hundred updates (of Fashion-MNIST: the first "
    "epoch): the chapter's initialisation, N(0, 0.01^2), is small; --init default starts faster"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Learning rate, batch size and epochs for a network on one data set."""

    learning_rate: float
    batch_size: int
    epochs: int


def image_task(
    name: str,
    model: Callable[[], nn.Module],
    recipe: Recipe,
    digits_recipe: Recipe,
    chooser: Chooser,
    notes: tuple[str, ...] = (),
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] = sgd,
) -> Task:
    """A task that classifies images into ten classes."""
    choice = chooser(WISHED)
    if choice.name != WISHED:
        recipe = digits_recipe
        notes = (choice.note, *notes)
    return Task(
        name=name,
        model=model,
        loss=nn.functional.cross_entropy,
        data=partial(load, choice.name, side_px=SIDE_PX),
        learning_rate=recipe.learning_rate,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        metrics=classification_metrics,
        optimizer=optimizer,
        notes=notes,
    )


def build_softmax(init: str) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return init_normal(model, zero_biases=True) if init == "chapter" else model


def softmax(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """784-10 on Fashion-MNIST; ``init`` is "chapter" (N(0, 0.01^2), biases 0) or "default"."""
    return image_task(
        "softmax",
        partial(build_softmax, chosen_init("softmax", init, ("chapter", "default"))),
        Recipe(learning_rate=0.1, batch_size=256, epochs=10),
        Recipe(learning_rate=0.1, batch_size=32, epochs=20),
        chooser,
    )


def build_mlp(num_hidden: int = 2048) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, 10),
    )


def mlp(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """784-2048-2048-10 on Fashion-MNIST; ``init`` is "default", torch's own.

    Moving its gradients costs as much as computing them, so exchanges are compared on it.
    """
    chosen_init("mlp", init, ("default",))
    return image_task(
        "mlp",
        build_mlp,
        Recipe(learning_rate=0.1, batch_size=256, epochs=10),
        Recipe(learning_rate=0.1, batch_size=32, epochs=20),
        chooser,
    )


class Normalize(nn.Module):
    """Each feature with mean 0 and standard deviation 1: (B, features) -> (B, features).

    It has no parameters. Its numbers are constants of the data and no buffers, which a run of
    several workers would average update by update, and round.

    Args:
        mean, std: of each feature; a std below ``_LEAST_STD`` counts as that.
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean, self.std = mean, std.clamp(min=_LEAST_STD)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean.to(inputs)) / self.std.to(inputs)


def build_mlp488k(data_set: str, num_hidden: int = 406) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10); 488,022 parameters.

    Raises:
        ConfigError: the data set, whose features are normalised, is not here.
    """
    train = load(data_set, side_px=SIDE_PX).train
    features = fetch_inputs(train, _NUM_NORMALISED).flatten(1)
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    model.add_module("normalize", Normalize(features.mean(dim=0), features.std(dim=0)))
    layers = (nn.Linear(features.shape[1], num_hidden), nn.Linear(num_hidden, num_hidden))
    model.add_module(
        "net", nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(num_hidden, 10))
    )
    return model


def fetch_inputs(train: Any, most: int) -> Tensor:
    """Return the first ``most`` inputs of one of our data sets, or all: (N, ...)."""
    inputs: Tensor = train.__getitems__(range(min(most, len(train)))).inputs
    return inputs


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr=learning_rate)


def mlp488k(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """A layer that normalises, and an MLP of 488 K parameters on flattened features.

    Adam, batches of 512 and a rate of 1e-4, as a lesson on scaling up within a node trains such a
    network on flattened columns of an atmosphere, here on the pixels of images; ``init`` is
    "default", torch's own.
    """
    chosen_init("mlp488k", init, ("default",))
    data_set = chooser(WISHED).name
    return image_task(
        "mlp488k",
        partial(build_mlp488k, data_set),
        Recipe(learning_rate=1e-4, batch_size=512, epochs=10),
        Recipe(learning_rate=1e-3, batch_size=32, epochs=20),
        chooser,
        optimizer=adam,
    )


def build_lenet(init: str) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10); 129,068 parameters.

    -conv 3x3-> 20 x 26 x 26 -pool-> 20 x 13 x 13
    -conv 5x5-> 50 x  9 x  9 -pool-> 50 x  4 x  4 = 800 -> 128 -> 10
    """
    model = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return init_normal(model, zero_biases=True) if init == "chapter" else model


def lenet(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """LeNet on Fashion-MNIST; ``init`` is "chapter" or "default", torch's own."""
    init = chosen_init("lenet", init, ("chapter", "default"))
    return image_task(
        "lenet",
        partial(build_lenet, init),
        Recipe(learning_rate=0.2, batch_size=256, epochs=10),
        Recipe(learning_rate=0.2, batch_size=32, epochs=30),
        chooser,
        notes=(_SLOW_START,) if init == "chapter" else (),
    )


def build_alexnet(num_classes: int = 10, num_channels: int = 1) -> nn.Module:
    """(B, channels, H, W) -> logits (B, classes); 57.0 million parameters with ten classes.

        -scaled up to 224 x 224-> conv 11x11 /4, 64 -pool-> conv 5x5, 192 -pool->
        conv 3x3, 384 -> conv 3x3, 256 -> conv 3x3, 256 -pool-> 9216 -> 4096 -> 4096 -> classes

    Its first convolution takes images of 224 pixels, so smaller ones are scaled up inside the
    model, where they are computed, and not in the data.

    Source: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
    Networks", 2012; the widths of Krizhevsky, "One weird trick for parallelizing convolutional
    neural networks", arXiv 1404.5997, with which it has 61,100,840 parameters for 1,000 classes.
    """
    return nn.Sequential(
        nn.Upsample(size=(_ALEXNET_SIDE_PX, _ALEXNET_SIDE_PX)),
        nn.Conv2d(num_channels, 64, kernel_size=11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, num_classes),
    )


def alexnet(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """AlexNet on Fashion-MNIST; ``init`` is "default", torch's own."""
    chosen_init("alexnet", init, ("default",))
    return image_task(
        "alexnet",
        build_alexnet,
        Recipe(learning_rate=0.01, batch_size=128, epochs=10),
        Recipe(learning_rate=0.01, batch_size=32, epochs=10),
        chooser,
    )
