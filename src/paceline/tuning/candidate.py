"""The contract of a candidate, which may make a step faster, and the subject of a trial.

    subject: a batch, and feed(speed) -> endless batches, as the user's loader makes them
    options(subject, speed) -> values worth trying here, none where it cannot help
    apply(objects, value)   -> changes a model and its optimizer

A candidate is tried on copies of the user's objects (``trial.py``). If it is kept, it is applied to
the objects themselves before they join a run, so the store takes over the strides that it made.
This module must not know which candidates there are.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SubsetRandomSampler

from ..data.feed import apply, plain_batches
from ..speed import Speed, Value

Forward = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> loss: one forward pass of the training loop."""


class LossForward:
    """A forward pass with a loss outside the model: ``loss(model(inputs), targets)``.

    Attributes:
        loss: (outputs, targets) -> the mean over the batch.
        trained: (inputs, targets) -> loss: replaces both in training if several workers compute
            the model together; otherwise None.
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
    """The objects that a candidate changes.

    Attributes:
        sizes: the usual numbers of samples in a mini-batch; an epoch's last may have fewer.
    """

    model: nn.Module
    optimizer: Optimizer
    sizes: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSubject:
    """The objects, batch and limits of a trial: never changed, only copied.

    Attributes:
        batch: one mini-batch on the device.
        num_samples: samples in ``batch``.
        feed: (speed) -> endless mini-batches on the device; None if the loader is not measured.
        num_cores: cores that this run may use.
        num_workers: workers that share them.
        steps_itself: whether the user's optimizer object makes the updates (one worker under
            plain ``python``, local-sgd); the store has its own kernels.
        may_change_numbers: whether precision may be tried (``--precision auto``).
        loader_workers: processes of the user's loader.
        may_load_elsewhere: whether a batch is the same in whichever process it is loaded. That
            takes random numbers that belong to the batch, unlike under plain ``python``, and a
            loader that already has processes, or a task's loop: the user's own loop may change its
            data set on the way, and files it has open may not survive a fork.
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


def cut_batch(subject: TrialSubject, num_samples: int) -> TrialSubject:
    """The subject with the first ``num_samples`` of its batch; a shorter one has no feed."""
    whole_size = subject.num_samples

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:num_samples] if tensor.ndim and len(tensor) == whole_size else tensor

    sizes = subject.objects.sizes | {num_samples}
    return replace(
        subject,
        batch=apply(cut, subject.batch),
        num_samples=num_samples,
        feed=subject.feed if num_samples == whole_size else None,
        objects=replace(subject.objects, sizes=frozenset(sizes)),
    )


class Candidate(abc.ABC):
    """One way to be faster; ``name`` is its field of ``Speed``."""

    name: str
    needs_feed = False
    """Whether its gain shows only with batches from the loader, not on one cached batch."""
    needs_whole_batch = False
    """Whether its gain depends on the batch size."""
    keeps_bits = False
    """Whether plain code in one process computes the same bits; else ``replay`` refuses the run."""
    is_repeatable = False
    """Whether runs with and without it compute the same bits."""

    @abc.abstractmethod
    def options(self, subject: TrialSubject, speed: Speed) -> Sequence[Value]:
        """The values worth trying besides the one in ``speed``; applying one may raise."""

    def apply(self, objects: Objects, value: Value) -> None:  # noqa: B027  some have nothing to do
        """Apply ``value``; the default of ``Speed`` changes nothing.

        The default implementation does nothing: the loader or the forward pass reads the choice.

        Raises:
            ConfigError: it is not available here; the message says why and what to do.
        """

    @abc.abstractmethod
    def words(self, value: Value) -> str:
        """The option as text: ``compile reduce-overhead``."""


class Feed:
    """Endless batches of the user's data set, made as the user's loader makes them.

    Args:
        positions: an epoch's samples, from which each batch has some at random.
        size: samples of a batch.
    """

    def __init__(
        self, loader: DataLoader[Any], positions: Sequence[Any], size: int, device: torch.device
    ) -> None:
        self._loader, self._positions, self._device = loader, positions, device
        self._size = min(size, len(positions))

    def __call__(self, speed: Speed) -> Iterator[Any]:
        original = self._loader
        num_workers = original.num_workers if speed.loader_workers < 0 else speed.loader_workers
        is_batched = original.batch_sampler is not None
        loader: DataLoader[Any] = DataLoader(
            original.dataset, batch_size=self._size if is_batched else None, drop_last=is_batched,
            sampler=SubsetRandomSampler(self._positions), num_workers=num_workers,
            collate_fn=original.collate_fn, worker_init_fn=original.worker_init_fn,
            pin_memory=original.pin_memory and torch.accelerator.is_available(),
            multiprocessing_context=original.multiprocessing_context if num_workers else None,
        )  # fmt: skip
        loader_speed = replace(speed, loader_workers=-1)  # `loader` has its processes already
        while True:
            yield from plain_batches(loader, self._device, loader_speed)


def num_samples_of(batch: Any, size: int) -> int:
    """The most frequent first dimension of a batch's tensors, in a tie the first; else ``size``."""
    lengths: list[int] = []

    def add_length(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            lengths.append(len(tensor))
        return tensor

    apply(add_length, batch)
    return max(lengths, key=lengths.count, default=size)
