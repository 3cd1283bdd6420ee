"""A multilayer perceptron 784-2048-2048-10: 5.8 million parameters and little to compute.

The case in which moving gradients costs as much as making them, so it is the one on which
exchanges are compared. It must not know where its images come from.
"""

from functools import partial

from torch import nn

from ..data.choice import Chooser, choose_here
from .base import Task
from .images import Recipe, chosen_init, image_task


def build(num_hidden: int = 2048) -> nn.Module:
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
    """784-2048-2048-10 on Fashion-MNIST; ``init`` is "default", torch's own."""
    chosen_init("mlp", init, ("default",))
    return image_task(
        "mlp",
        partial(build),
        Recipe(learning_rate=0.1, batch_size=256, epochs=10),
        Recipe(learning_rate=0.1, batch_size=32, epochs=20),
        chooser,
    )
