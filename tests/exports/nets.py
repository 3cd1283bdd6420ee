"""Networks that tests export: plain ones, and ones that a format cannot represent."""

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
    """A branch on the input: a trace records only one side."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.layer(x)
        return 3 * self.layer(x)


class Fixed(Plain):
    """Runs only with two samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(2, 2)


class Opens(Plain):
    """Calls a function that no compiler supports."""

    def forward(self, x: Tensor) -> Tensor:
        with open("/dev/null") as file:
            file.read()
        return self.layer(x)


class Pair(Plain):
    """Two inputs, one of them integers."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.layer(x) * index


class Tokens(nn.Module):
    """A branch on the values of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 2)

    def forward(self, t: Tensor) -> Tensor:
        rows = self.table(t)
        return -rows if bool(t.max() > 50) else rows


class Bare(nn.Module):
    """No layer that int8 supports."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def no_module() -> int:
    return 3
