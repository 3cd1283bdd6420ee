"""A small float64 task with everything an equivalence must support, and nothing random.

Tied weights, a frozen parameter, two parameter groups, momentum and weight decay; the same with
batch norm. Workers are other processes that cannot import the tests, so the whole module travels
with a task. It must not know how anything is run.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.data.arrays import ArrayDataset, Splits
from paceline.workloads.base import Task, classification_metrics

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_SAMPLES = 60
BATCH_SIZE = 12
EPOCHS = 2
WIDTH = 6
CLASSES = 3


class Tied(nn.Module):
    """Two layers that share one weight, and an output whose bias is frozen."""

    def __init__(self, *, has_batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has_batch_norm else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.out = nn.Linear(WIDTH, CLASSES)
        self.out.bias.requires_grad_(False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        outputs: Tensor = self.out(torch.tanh(self.second(hidden)))
        return outputs


def samples(num_samples: int = NUM_SAMPLES) -> Splits:
    """Vectors whose class can be learned; 17 of them for testing."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples + 17, WIDTH, generator=generator, dtype=torch.float64)
    targets = inputs[:, :CLASSES].argmax(dim=1)
    return Splits(
        train=ArrayDataset(inputs[:num_samples], targets[:num_samples]),
        test=ArrayDataset(inputs[num_samples:], targets[num_samples:]),
        source="made up",
    )


Make = Callable[..., Optimizer]
MOMENTUM: Make = functools.partial(SGD, momentum=0.9)


def grouped(
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    make: Make = MOMENTUM,
) -> Optimizer:
    """Weights with decay; the rest, including the frozen one, without and at half the rate."""
    every = list(parameters)
    return make(
        [
            {"params": [one for one in every if one.ndim > 1], "weight_decay": 0.01},
            {"params": [one for one in every if one.ndim <= 1], "lr": learning_rate / 2},
        ],
        lr=learning_rate,
    )


def plain_sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    """Neither momentum nor decay."""
    return SGD(list(parameters), lr=learning_rate)


TASK = Task(
    name="tiny",
    model=Tied,
    loss=nn.functional.cross_entropy,
    data=samples,
    optimizer=grouped,
    learning_rate=0.3,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    metrics=classification_metrics,
)
WITH_BATCH_NORM = replace(TASK, model=functools.partial(Tied, has_batch_norm=True))
PLAIN_SGD = replace(TASK, optimizer=plain_sgd)


def layers() -> nn.Module:
    """Layers of torch that draw no random numbers."""
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), nn.Linear(33, CLASSES))


def unknown() -> nn.Module:
    """The same with a buffer of nan, such as the spread of one sample."""
    model = layers()
    model.register_buffer("spread", torch.full((2,), torch.nan))
    return model


class Decaying(Optimizer):
    """Weight decay added to the gradient in place, so that it differs after the step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=group["weight_decay"])
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def in_float32() -> Splits:
    """The same samples."""
    splits = samples()
    train, test = (
        ArrayDataset(one.inputs.float(), one.targets)  # type: ignore[union-attr]
        for one in (splits.train, splits.test)
    )
    return replace(splits, train=train, test=test)


LAYERS = replace(TASK, model=layers, data=in_float32, optimizer=plain_sgd, batch_size=11)
"""In float32, whose sums depend on their order, with batches that fill no whole cache lines."""
UNKNOWN = replace(LAYERS, model=unknown)


class Remembering(nn.Linear):
    """A layer whose extra state is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"kept": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"kept": 1}


def compiled() -> nn.Module:
    """A model as ``torch.compile`` returns it, with layers that run eagerly."""
    model = nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), Remembering(33, CLASSES))
    return cast(nn.Module, torch.compile(model, backend="eager"))


COMPILED = replace(LAYERS, model=compiled)


def with_optimizer(make: Make, learning_rate: float) -> Task:
    """The task with another optimizer, in the same two groups."""
    return replace(
        TASK, optimizer=functools.partial(grouped, make=make), learning_rate=learning_rate
    )
