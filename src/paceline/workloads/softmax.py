"""Softmax regression: one linear layer, the convex case of the papers.

It must not know where its images come from.

Source: Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 4.5: weights N(0, 0.01^2),
batch 256, learning rate 0.1.
"""

from functools import partial

from torch import nn

from ..data.choice import Chooser, choose_here
from .base import Task, init_normal
from .images import Recipe, chosen_init, image_task


def build(init: str) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return init_normal(model, zero_biases=True) if init == "chapter" else model


def softmax(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """784-10 on Fashion-MNIST; ``init`` is "chapter" (N(0, 0.01^2), biases 0) or "default"."""
    return image_task(
        "softmax",
        partial(build, chosen_init("softmax", init, ("chapter", "default"))),
        Recipe(learning_rate=0.1, batch_size=256, epochs=10),
        Recipe(learning_rate=0.1, batch_size=32, epochs=20),
        chooser,
    )
