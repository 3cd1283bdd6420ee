"""Scripts that request unsupported features, by name: ``python refusals.py CASE``."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.optim import SGD
from torch.utils.data import DataLoader

from loops import make_loader, make_model
from tiny import NUM_SAMPLES, grouped, samples


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)


class Observed(nn.Sequential):
    """Quantization-aware training."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), FakeQuantize())


class Endless(torch.utils.data.IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(map(samples().train.__getitem__, range(NUM_SAMPLES)))


def refused(pace: Any, *, model: Any = None, make: Any = grouped, **options: Any) -> None:
    """Call ``prepare`` with unsupported objects."""
    model = model or make_model()
    optimizer = make(model.parameters(), 0.1)
    dataset = options.pop("dataset", samples().train)
    pace.prepare(model, optimizer, DataLoader(dataset, **{"batch_size": 12, **options}))


class OneMemory(nn.Module):
    """Two layers whose weights are two objects over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight.data = self.first.weight.data


def refused_second_optimizer(pace: Any) -> None:
    model = make_model()
    two = [grouped(model.parameters(), 0.1) for _ in range(2)]
    pace.prepare(model, *two, make_loader())


REFUSED: dict[str, Callable[[Any], None]] = {
    "iterable": functools.partial(refused, dataset=Endless(), batch_size=13),
    "in order": lambda pace: refused(pace, num_workers=1, in_order=False),
    "no batches": functools.partial(refused, batch_size=None),
    "one memory": lambda pace: refused(pace, model=OneMemory(), make=lambda p, lr: SGD(p, lr)),
    "no size": lambda pace: refused(pace, model=nn.LazyLinear(3), make=lambda p, lr: SGD(p, lr)),
    "observed": lambda pace: refused(pace, model=Observed(), make=lambda p, lr: SGD(p, lr)),
    "sparse": lambda pace: refused(pace, model=Sparse(), make=lambda p, lr: SGD(p, lr)),
    "second optimizer": refused_second_optimizer,
}


if __name__ == "__main__":
    import paceline

    REFUSED[sys.argv[1]](paceline.connect())
