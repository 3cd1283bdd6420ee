"""What may make a step faster: the contract of a candidate, and what it is tried on.

    subject: a batch, and feed(speed) -> endless batches, as the user's loader makes them
    options(subject, speed) -> values worth trying here, none where it cannot help
    apply(objects, value)   -> put into effect on a model and its optimizer

A candidate is tried on copies of the user's objects (``trial.py``) and then, if it is worth it,
put into effect on the objects themselves before they become part of a run, so the store lays out
what is there then, strides included. This module must not know which candidates there are.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from ..data.feed import apply, fetch, plain_batches
from ..speed import Speed, Value

Forward = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> loss, one forward pass as the training loop makes it."""


class LossForward:
    """A forward pass whose loss stands apart from the model: ``loss(model(inputs), targets)``.

    Attributes:
        loss: (outputs, targets) -> the mean over the batch.
        trained: takes the place of both, (inputs, targets) -> loss, in a model that several workers
            compute; None: nothing does.
    """

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        self.loss = loss
        self.trained: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        if self.trained is not None and torch.is_grad_enabled():
            return self.trained(inputs, targets)
        return self.loss(model(inputs), targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What a candidate changes.

    Attributes:
        sizes: numbers of samples that mini-batches have, but for an epoch's last ones.
    """

    model: nn.Module
    optimizer: Optimizer
    sizes: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSubject:
    """What candidates are tried on: never changed, only copied.

    Attributes:
        batch: one mini-batch on the device.
        num_samples: of it.
        feed: endless mini-batches on the device, loaded as a speed says; None where batches come
            from elsewhere.
        loader_workers: processes that the user's loader has.
        num_cores: that this run may use, and ``num_workers`` that share them.
        steps_itself: whether the user's optimizer object makes the updates (one worker under
            plain ``python``, local-sgd); the store has its own kernels.
        may_change_numbers: whether precision may be tried (``--precision auto``).
        may_load_elsewhere: whether a batch is the same in whichever process it is loaded: its
            random numbers are its own, as they are not under plain ``python``, and the user's
            loader has processes already, or the loop is a task's. A loop of the user's may change
            its data set as it goes, and what is opened there need not outlive a fork.
    """

    objects: Objects
    device: torch.device
    batch: Any
    num_samples: int
    forward: Forward
    feed: "Callable[[Speed], Iterator[Any]] | None"
    num_cores: int
    num_workers: int
    steps_itself: bool
    may_change_numbers: bool
    loader_workers: int = 0
    may_load_elsewhere: bool = True

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"


class Candidate(abc.ABC):
    """One way to be faster; ``name`` is its field of ``Speed``."""

    name: str
    needs_feed = False
    """Whether it is seen only with batches from the loader, not on one cached batch."""
    needs_whole_batch = False
    """Whether what it gains depends on how large the batch is."""
    keeps_bits = False
    """Whether plain code in one process computes the same bits; else ``replay`` refuses the run."""
    is_repeatable = False
    """Whether a run that chose it, and one that did not, come to the same bits."""

    @abc.abstractmethod
    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        """Values worth trying beside the one in ``speed``; each may raise when it is applied."""

    def apply(self, objects: Objects, value: Value) -> None:  # noqa: B027  some have nothing to do
        """Put ``value`` into effect; the default of ``Speed`` changes nothing, nor does this one:
        the loader, or the forward pass, reads the choice.

        Raises:
            ConfigError: it cannot be had here; says why and what to do.
        """

    @abc.abstractmethod
    def words(self, value: Value) -> str:
        """The option for people: ``compile default``."""


class Feed:
    """Endless batches of the user's data set, as the loader makes them."""

    def __init__(self, loader: DataLoader[Any], size: int, device: torch.device) -> None:
        num_samples = len(loader.dataset)  # type: ignore[arg-type]  # map-style
        self._loader, self._size, self._device = loader, min(size, num_samples), device

    def __call__(self, speed: Speed) -> Iterator[Any]:
        user = self._loader
        workers = user.num_workers if speed.loader_workers < 0 else speed.loader_workers
        loader: DataLoader[Any] = DataLoader(
            user.dataset, batch_size=self._size, sampler=RandomSampler(user.dataset),  # type: ignore[arg-type]  # map-style
            num_workers=workers, collate_fn=user.collate_fn, drop_last=True,
            pin_memory=user.pin_memory and torch.accelerator.is_available(),
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context if workers else None,
        )  # fmt: skip
        as_it_is = replace(speed, loader_workers=-1)  # this loader has them
        while True:
            yield from plain_batches(loader, self._device, as_it_is)


def host_batch(loader: DataLoader[Any], size: int) -> Any:
    """The first samples of the data set, collated."""
    dataset: Any = loader.dataset
    num_samples = min(size, len(dataset))
    return loader.collate_fn(fetch(dataset, list(range(num_samples))))


def num_samples_of(batch: Any, size: int) -> int:
    """Samples of a batch: what most of its tensors have as their first dimension."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            found.append(len(tensor))
        return tensor

    apply(note, batch)
    return max(set(found), key=found.count) if found else size
