"""LeNet as the book's chapter on several devices has it, the main job of this package.

    (B, 1, 28, 28) -conv 3x3-> 20 x 26 x 26 -pool-> 20 x 13 x 13
                   -conv 5x5-> 50 x  9 x  9 -pool-> 50 x  4 x  4 = 800 -> 128 -> 10

It must not know where its images come from.

Source: Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 13.5: batch 256, learning rate
0.2, 10 epochs, weights N(0, 0.01^2), biases 0.
"""

from functools import partial

from torch import nn

from ..data.choice import Chooser, choose_here
from .base import Task, init_normal
from .images import Recipe, chosen_init, image_task

_SLOW_START = (
    "accuracy stays near 0.10 for the first few hundred updates (of Fashion-MNIST: the first "
    "epoch): the chapter's initialisation, N(0, 0.01^2), is small; --init default starts faster"
)


def build(init: str) -> nn.Module:
    """(B, 1, 28, 28) -> logits (B, 10); 129,068 parameters."""
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
        partial(build, init),
        Recipe(learning_rate=0.2, batch_size=256, epochs=10),
        Recipe(learning_rate=0.2, batch_size=32, epochs=30),
        chooser,
        notes=(_SLOW_START,) if init == "chapter" else (),
    )
