"""The residual block and ResNet-18."""

import pytest
import torch
from torch import nn

from paceline.d2l.networks import Residual, resnet18


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (Residual(3), (4, 3, 6, 6)),
        (Residual(6, use_1x1conv=True, strides=2), (4, 6, 3, 3)),
        (Residual(5, use_1x1conv=True), (4, 5, 6, 6)),
    ],
)
def test_block_finds_its_input_channels(block: Residual, shape: tuple[int, ...]) -> None:
    assert block(torch.rand(4, 3, 6, 6)).shape == shape


def test_block_with_zero_branch_passes_its_input_on() -> None:
    block, inputs = Residual(2).eval(), torch.rand(1, 2, 4, 4)
    block(inputs)  # decides the shapes
    nn.init.zeros_(block.conv2.weight)
    nn.init.zeros_(block.conv2.bias)
    assert torch.allclose(block(inputs), inputs)


def by_blocks() -> nn.Module:
    """The same network, from blocks that find their input channels."""
    layers: list[nn.Module] = [nn.LazyConv2d(64, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU()]
    layers += [Residual(64), Residual(64)]
    for width in (128, 256, 512):
        layers += [Residual(width, use_1x1conv=True, strides=2), Residual(width)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10))
    net(torch.rand(2, 1, 28, 28))
    return net


def num_parameters(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def test_resnet18_has_all_its_shapes_before_the_first_batch() -> None:
    net = resnet18(10)
    num_set = 0

    def init_weights(module: nn.Module) -> None:
        nonlocal num_set
        if type(module) in (nn.Linear, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            num_set += 1

    net.apply(init_weights)
    assert num_set == 21  # 17 convolutions of 3x3, three of 1x1, one linear layer
    assert num_parameters(net) == num_parameters(by_blocks())
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert resnet18(7, in_channels=3)(torch.rand(2, 3, 32, 32)).shape == (2, 7)


def test_network_of_blocks_trains_under_data_parallel() -> None:
    body = [Residual(8, use_1x1conv=True, strides=2), Residual(8)]
    head = [nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.LazyLinear(3)]
    net = nn.DataParallel(nn.Sequential(*body, *head), device_ids=[torch.device("cpu")])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inputs, targets = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
