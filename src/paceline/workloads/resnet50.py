"""ResNet-50: the network on which mixed precision is usually shown.

    (B, C, H, W) -conv 7x7 /2-> 64 -max-pool /2-> [256] x 3 -> [512] x 4 -> [1024] x 6 -> [2048] x 3
                 -mean over pixels-> classes

Each block is a bottleneck: 1x1 to a quarter of its width, 3x3 (with the stride, as most
implementations since have it), 1x1 back. It must not know where its images come from.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1;
Adam with 3e-4 in place of the paper's SGD, as lessons on mixed precision train it on ten classes.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.choice import Chooser, choose_here
from .base import Task
from .images import Recipe, chosen_init, image_task

_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions and the input added to their output."""

    def __init__(self, num_in: int, num_inner: int, stride: int) -> None:
        super().__init__()
        num_out = _EXPANSION * num_inner
        self.branch = nn.Sequential(
            *_convolution(num_in, num_inner, 1),
            nn.ReLU(),
            *_convolution(num_inner, num_inner, 3, stride),
            nn.ReLU(),
            *_convolution(num_inner, num_out, 1),
        )
        is_same = num_in == num_out and stride == 1
        self.shortcut = (
            nn.Identity() if is_same else nn.Sequential(*_convolution(num_in, num_out, 1, stride))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        total: Tensor = self.branch(inputs) + self.shortcut(inputs)
        return nn.functional.relu(total)


def _convolution(num_in: int, num_out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Without a bias: the batch normalisation behind it has one."""
    padding = size // 2
    conv = nn.Conv2d(num_in, num_out, size, stride=stride, padding=padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(num_out)


def build(num_classes: int = 10, num_channels: int = 1) -> nn.Module:
    """(B, channels, H, W) -> logits (B, classes); 23.5 million parameters with ten classes."""
    layers: list[nn.Module] = [
        *_convolution(num_channels, 64, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    num_in = 64
    for stage, depth in enumerate(_DEPTHS):
        num_inner = 64 * 2**stage
        for number in range(depth):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(num_in, num_inner, stride))
            num_in = _EXPANSION * num_inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes)]
    return nn.Sequential(*layers)


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr=learning_rate)


def resnet50(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """ResNet-50 on Fashion-MNIST, Adam with 3e-4; ``init`` is "default", the paper's."""
    chosen_init("resnet50", init, ("default",))
    return image_task(
        "resnet50",
        partial(build),
        Recipe(learning_rate=3e-4, batch_size=128, epochs=10),
        Recipe(learning_rate=3e-4, batch_size=32, epochs=10),
        chooser,
        optimizer=adam,
    )
