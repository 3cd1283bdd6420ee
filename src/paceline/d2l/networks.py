"""The chapter's residual block, which finds the number of its input channels itself, and ResNet-18.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, with the
book's choices: a bias in each convolution, no batch normalisation behind the 1x1 convolution.
"""

from torch import Tensor, nn

from ..workloads.resnets import build_resnet18


class Residual(nn.Module):
    """Two 3x3 convolutions and the input added to their output: (B, C, H, W) -> (B, out, ...).

    The first batch decides C; before it, the parameters have no shape, ``nn.init`` cannot fill
    them, and a network of several devices cannot copy them.

    Args:
        num_channels: channels of the output.
        use_1x1conv: whether the input goes through a 1x1 convolution, needed where C is not
            ``num_channels`` or ``strides`` is not 1.
        strides: of the first convolution, and of the 1x1 convolution.
    """

    def __init__(self, num_channels: int, use_1x1conv: bool = False, strides: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.LazyConv2d(num_channels, kernel_size=3, padding=1, stride=strides)
        self.bn1 = nn.LazyBatchNorm2d()
        self.conv2 = nn.LazyConv2d(num_channels, kernel_size=3, padding=1)
        self.bn2 = nn.LazyBatchNorm2d()
        self.conv3 = (
            nn.LazyConv2d(num_channels, kernel_size=1, stride=strides) if use_1x1conv else None
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.bn1(self.conv1(inputs)))
        shortcut = inputs if self.conv3 is None else self.conv3(inputs)
        return nn.functional.relu(self.bn2(self.conv2(hidden)) + shortcut)


def resnet18(num_classes: int, in_channels: int = 1) -> nn.Module:
    """(B, in_channels, H, W) -> logits (B, num_classes): that of ``paceline train resnet18``.

    All its parameters have their shapes, so ``net.apply(init_weights)`` reaches each of them.
    """
    return build_resnet18("default", num_classes, in_channels)
