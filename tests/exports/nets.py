"""Networks that tests export: plain ones, and ones that a format cannot write."""

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """(B, 4) -> (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Branch(Plain):
    """Another way for another input: a trace forgets one of them."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.layer(x)
        return 3 * self.layer(x)


class Fixed(Plain):
    """Runs with two samples only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(2, 2)


class Opens(Plain):
    """Does what no compiler knows."""

    def forward(self, x: Tensor) -> Tensor:
        with open("/dev/null") as file:
            file.read()
        return self.layer(x)


class Pair(Plain):
    """Two inputs, one of them whole numbers."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.layer(x) * index


class Bare(nn.Module):
    """No layer that could be int8."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def no_module() -> int:
    return 3
