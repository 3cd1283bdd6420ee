"""Residual networks: ResNet-18 for small images, as the book has it, and the paper's ResNet-50.

    resnet18  -conv 3x3-> 64 -> [64] x 2 -> [128] x 2 -> [256] x 2 -> [512] x 2
    resnet50  -conv 7x7 /2-> 64 -max-pool /2-> [256] x 3 -> [512] x 4 -> [1024] x 6 -> [2048] x 3
              -mean over pixels-> classes

It must not know where its images come from.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1.
"""

from functools import partial

from torch import Tensor, nn

from ..data.fetch import Chooser, choose_here
from .base import Task, chosen_init, init_normal
from .images import Recipe, adam, image_task

_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the input added to their output.

    Where the shape changes, the input goes through a 1x1 convolution (with a bias and without
    batch normalisation: the book's choice, not the paper's).
    """

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, stride=stride),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, kernel_size=3, padding=1),
            nn.BatchNorm2d(num_out),
        )
        is_same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(num_in, num_out, 1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        total: Tensor = self.branch(inputs) + self.shortcut(inputs)
        return nn.functional.relu(total)


def build_resnet18(
    init: str = "chapter", num_classes: int = 10, num_channels: int = 1
) -> nn.Module:
    """(B, channels, H, W) -> logits (B, classes); 11.2 million parameters.

    A 3x3 stem without max-pooling, so the first stage works on all 28x28 pixels.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(num_channels, 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    num_in = 64
    for num_out in (64, 128, 256, 512):
        stride = 1 if num_out == num_in else 2
        layers.append(
            nn.Sequential(BasicBlock(num_in, num_out, stride), BasicBlock(num_out, num_out, 1))
        )
        num_in = num_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)]
    model = nn.Sequential(*layers)
    return init_normal(model, zero_biases=False) if init == "chapter" else model


class Bottleneck(nn.Module):
    """Three convolutions and the input added to their output.

    1x1 to a quarter of its width, 3x3 (with the stride, as most implementations since have it),
    1x1 back.
    """

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


def build_resnet50(num_classes: int = 10, num_channels: int = 1) -> nn.Module:
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


def resnet18(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """ResNet-18 on Fashion-MNIST; batch and learning rate grow with the workers.

    Source: Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 13.6: batch 256 and
    learning rate 0.1 on one device, 512 and 0.2 on two, which is the linear scaling rule of Goyal
    et al., "Accurate, Large Minibatch SGD", 2017, without its warm-up.
    """
    notes: tuple[str, ...] = ()
    if num_workers > 1:
        notes = (
            f"batch size and learning rate are {num_workers} times those of one worker "
            f"(linear scaling, as in the chapter; --batch-size and --lr change them)",
        )
    return image_task(
        "resnet18",
        partial(build_resnet18, chosen_init("resnet18", init, ("chapter", "default"))),
        Recipe(learning_rate=0.1 * num_workers, batch_size=256 * num_workers, epochs=10),
        Recipe(learning_rate=0.1 * num_workers, batch_size=32 * num_workers, epochs=6),
        chooser,
        notes=notes,
    )


def resnet50(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """The network on which mixed precision is usually shown; ``init`` is "default", the paper's.

    Adam with 3e-4 in place of the paper's SGD, as lessons on mixed precision train it on ten
    classes.
    """
    chosen_init("resnet50", init, ("default",))
    return image_task(
        "resnet50",
        build_resnet50,
        Recipe(learning_rate=3e-4, batch_size=128, epochs=10),
        Recipe(learning_rate=3e-4, batch_size=32, epochs=10),
        chooser,
        optimizer=adam,
    )
