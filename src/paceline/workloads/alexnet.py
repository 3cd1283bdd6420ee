"""AlexNet: the network of the days when one GPU and a week were what there was.

    (B, C, H, W) -scaled up to 224 x 224-> conv 11x11 /4, 64 -pool-> conv 5x5, 192 -pool->
    conv 3x3, 384 -> conv 3x3, 256 -> conv 3x3, 256 -pool-> 9216 -> 4096 -> 4096 -> classes

Its first convolution takes images of 224 pixels, so smaller ones are scaled up inside the model,
where they are computed, and not in the data. It must not know where its images come from.

Source: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural
Networks", 2012; the widths of Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", arXiv 1404.5997, with which it has 61,100,840 parameters for 1,000 classes.
"""

from functools import partial

from torch import nn

from ..data.choice import Chooser, choose_here
from .base import Task
from .images import Recipe, chosen_init, image_task

_SIDE_PX = 224


def build(num_classes: int = 10, num_channels: int = 1) -> nn.Module:
    """(B, channels, H, W) -> logits (B, classes); 57.0 million parameters with ten classes."""
    return nn.Sequential(
        nn.Upsample(size=(_SIDE_PX, _SIDE_PX)),
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
        partial(build),
        Recipe(learning_rate=0.01, batch_size=128, epochs=10),
        Recipe(learning_rate=0.01, batch_size=32, epochs=10),
        chooser,
    )
