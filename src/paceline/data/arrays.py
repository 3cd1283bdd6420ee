"""Samples in two tensors, and a batch of them as one gather.

A loader asks a data set for one sample at a time and stacks them: 128 samples of 28x28 cost about
1 ms, as much as a small network's step. Asked for a whole batch, this data set gathers it at once.

Images stay bytes and become floats by the batch. Measured on one core, batch 128 of 28x28, gather
and convert: bytes 74 us, floats 93 us (median of 7 epochs; four times the memory to read), and
floats cost 0.6 s and 190 MB a worker at the start, where bytes are mapped and shared.

It must not know of leases or of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What a task trains and is tested on.

    Args:
        train: map-style (with a length and samples by number).
        test: likewise, or None if there is nothing to test on.
        source: one line for the plan, such as "Fashion-MNIST (60,000 + 10,000 images)".
        classes: the labels' names, if targets are labels.
    """

    train: "Dataset[tuple[Tensor, Tensor]]"
    test: "Dataset[tuple[Tensor, Tensor]] | None" = None
    source: str = ""
    classes: tuple[str, ...] = ()


class Batch(Sequence[tuple[Tensor, Tensor]]):
    """Gathered samples: for a loader's own collate a list of samples, for ours two tensors.

    Args:
        raw: (B, ...) as the data set holds them.
        scale: what bytes are multiplied with to become inputs; None where ``raw`` are inputs.
    """

    __slots__ = ("raw", "scale", "targets")

    def __init__(self, raw: Tensor, targets: Tensor, scale: float | None = None) -> None:
        self.raw = raw
        self.targets = targets
        self.scale = scale

    @property
    def inputs(self) -> Tensor:
        """(B, ...) ready for a model."""
        return self.raw if self.scale is None else as_input(self.raw, self.scale)

    def __len__(self) -> int:
        return len(self.targets)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> "Batch": ...
    def __getitem__(self, index: int | slice) -> "tuple[Tensor, Tensor] | Batch":
        if isinstance(index, slice):
            return Batch(self.raw[index], self.targets[index], self.scale)
        value = self.raw[index]
        return value if self.scale is None else as_input(value, self.scale), self.targets[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs, self.targets, strict=True)


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set of ``inputs[i], targets[i]``, fast by the batch.

    Args:
        inputs: (N, ...). Bytes are kept and come out as float32, times ``scale``.
        targets: (N, ...).
        scale: what bytes are multiplied with; 1/255 gives [0, 1].

    Example: ``DataLoader(data, batch_size=128, collate_fn=collate_batch)``. With the loader's own
    collate the batches are the same, and slower.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, scale: float = 1 / 255) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets: wanted as many")
        self.inputs = inputs
        self.targets = targets
        self.scale = scale

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._as_input(self.inputs[index]), self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """All of ``indices`` at once; torch's loaders call it if it is there."""
        # NumPy reads a list of integers five times as fast as torch does.
        order = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return Batch(
            self.inputs.index_select(0, order),
            self.targets.index_select(0, order),
            self.scale if self.inputs.dtype is torch.uint8 else None,
        )

    def _as_input(self, values: Tensor) -> Tensor:
        return as_input(values, self.scale) if values.dtype is torch.uint8 else values


def as_input(values: Tensor, scale: float) -> Tensor:
    """Bytes as float32 times ``scale``: one conversion and one product, the same on any device."""
    return values.to(torch.float32).mul_(scale)


def collate_batch(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A loader's ``collate_fn`` that takes a gathered batch as it is."""
    if isinstance(samples, Batch):
        return samples.inputs, samples.targets
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)
