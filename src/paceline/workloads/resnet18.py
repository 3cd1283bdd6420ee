"""ResNet-18 for small images, as the book's chapter on several devices has it.

A 3x3 stem without max-pooling, so the first stage works on all 28x28 pixels; four stages of two
residual blocks; global average pooling. It must not know where its images come from.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016; the variant
of Zhang, Lipton, Li, Smola, "Dive into Deep Learning", section 13.6: batch 256 and learning rate
0.1 on one device, 512 and 0.2 on two, which is the linear scaling rule of Goyal et al., "Accurate,
Large Minibatch SGD", 2017, without its warm-up.
"""

from functools import partial

from torch import Tensor, nn

from ..data.choice import Chooser, choose_here
from .base import Task, init_normal
from .images import Recipe, chosen_init, image_task


class Residual(nn.Module):
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


def build(init: str = "chapter", num_classes: int = 10, num_channels: int = 1) -> nn.Module:
    """(B, channels, H, W) -> logits (B, classes); 11.2 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(num_channels, 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    num_in = 64
    for num_out in (64, 128, 256, 512):
        stride = 1 if num_out == num_in else 2
        layers.append(
            nn.Sequential(Residual(num_in, num_out, stride), Residual(num_out, num_out, 1))
        )
        num_in = num_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)]
    model = nn.Sequential(*layers)
    return init_normal(model, zero_biases=False) if init == "chapter" else model


def resnet18(num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here) -> Task:
    """ResNet-18 on Fashion-MNIST; batch and learning rate grow with the workers."""
    notes: tuple[str, ...] = ()
    if num_workers > 1:
        notes = (
            f"batch size and learning rate are {num_workers} times those of one worker "
            f"(linear scaling, as in the chapter; --batch-size and --lr change them)",
        )
    return image_task(
        "resnet18",
        partial(build, chosen_init("resnet18", init, ("chapter", "default"))),
        Recipe(learning_rate=0.1 * num_workers, batch_size=256 * num_workers, epochs=10),
        Recipe(learning_rate=0.1 * num_workers, batch_size=32 * num_workers, epochs=6),
        chooser,
        notes=notes,
    )
