"""Modules that are hard to cut, each for one reason."""

import torch
from torch import Tensor, nn


class Skips(nn.Module):
    """A residual, a long skip, and an in-place activation on a tensor that a skip also reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.relu(self.b(first))
        third = second + first
        return self.c(third.relu_()) + x


class TiedEnds(nn.Module):
    """The first and the last layer share a weight, as in language models."""

    def __init__(self, tokens: int = 11, width: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.inner(self.tokens(x)), self.tokens.weight)


class TwoInTwoOut(nn.Module):
    """Two inputs, one of integers; two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(x))
        low, high = hidden.chunk(2, dim=1)
        size = x.shape[0]
        return {
            "hidden": (low * high).reshape(size, 2),
            "scores": self.right(hidden) * index.view(size, 1),
        }


class Normed(nn.Module):
    """Buffers, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.norm(self.again(x)).mean(dim=(2, 3))


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.layer(x)
        return 3 * self.layer(x)


class AroundBranching(nn.Module):
    """A submodule that branches, between two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.branch, self.behind = nn.Linear(4, 4), Branching(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(torch.relu(self.branch(self.before(x))))


class ByLength(nn.Module):
    """A loop over the batch: torch.fx cannot follow it, torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if len(hidden) > 1:
            hidden = torch.relu(hidden)
        return self.last(hidden)


class AroundByLength(nn.Module):
    """A submodule that only torch.export can look into; a default; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4).requires_grad_(False)
        self.inner = ByLength()

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        x = scale * self.before(x)
        return self.inner(x if mask is None else x * mask)


class Defaults(nn.Module):
    """Arguments that are never passed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * scale
        return x if mask is None else x * mask


class RowOfChildren(nn.Module):
    """The children form a sequence, but the code between them branches on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), Branching(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("not a number")
        return self.three(self.two(self.one(x)))


class SometimesSkips(nn.Module):
    """A sequence of children, one of which is skipped for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        if bool(x.sum() >= 0):
            hidden = self.two(hidden)
        return self.three(hidden)


class Loops(nn.Module):
    """A child whose number of calls depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            hidden = self.two(hidden)
        return hidden
