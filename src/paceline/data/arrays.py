"""A named data set as samples in two tensors; a batch of them is one gather.

A loader gets one sample at a time and stacks them: 128 samples of 28x28 cost about 1 ms, as much as
a small network's step. This data set gathers a whole batch at once.

Images stay bytes and are converted to floats by the batch. Measured on one core, batch 128 of
28x28, gather and convert: bytes 74 us, floats 93 us (median of 7 epochs; four times the memory to
read), and floats cost 0.6 s and 190 MB a worker at the start, where bytes are mapped and shared.

Loading reads local files and never fetches, so a worker cannot start a download. Files are in the
idx format of MNIST: a header with the shape, then the values.

    00 00 | type | num_dims | size of each dim, 4 bytes big-endian | values, last dim fastest
           0x08 = unsigned byte

This module must not know leases or workers, nor which network the samples are for.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError
from .catalogue import Bytes, DataFile, DataSet, Located, find, locate, looked_in, read_checked
from .fetch import choose, remedy
from .sources import Outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The training and test data of a task.

    Args:
        train: a map-style data set (``__len__`` and ``__getitem__``).
        test: likewise; None if there is nothing to test on.
        source: one line for the plan, such as "Fashion-MNIST (60,000 + 10,000 images)".
        classes: the labels' names, if targets are labels.
    """

    train: "Dataset[tuple[Tensor, ...]]"
    test: "Dataset[tuple[Tensor, ...]] | None" = None
    source: str = ""
    classes: tuple[str, ...] = ()


class Batch(Sequence[tuple[Tensor, Tensor]]):
    """Gathered samples: a sequence of samples for torch's collate, two tensors for ours.

    Args:
        raw: (B, ...) as the data set holds them.
        scale: factor that turns bytes into inputs; None if ``raw`` already are inputs.
    """

    __slots__ = ("raw", "scale", "targets")

    def __init__(self, raw: Tensor, targets: Tensor, scale: float | None = None) -> None:
        self.raw = raw
        self.targets = targets
        self.scale = scale

    @property
    def inputs(self) -> Tensor:
        """(B, ...), ready for a model."""
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
        inputs: (N, ...). Bytes are stored as they are and returned as float32, times ``scale``.
        targets: (N, ...).
        scale: factor for bytes; 1/255 gives [0, 1].

    Example: ``DataLoader(data, batch_size=128, collate_fn=collate_batch)``. With the loader's own
    collate the batches are the same, and slower.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, scale: float = 1 / 255) -> None:
        if len(inputs) != len(targets):
            raise ValueError(
                f"{len(inputs)} inputs and {len(targets)} targets: numbers must be equal"
            )
        self.inputs = inputs
        self.targets = targets
        self.scale = scale

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._as_input(self.inputs[index]), self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Gather all ``indices`` at once; torch's loaders call this method if it exists."""
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
    """A ``collate_fn`` that passes a gathered batch on without a copy."""
    if isinstance(samples, Batch):
        return samples.inputs, samples.targets
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


_UNSIGNED_BYTE = 0x08
_OTHER_TYPES = {
    0x09: "signed bytes",
    0x0B: "16-bit integers",
    0x0C: "32-bit integers",
    0x0D: "32-bit floats",
    0x0E: "64-bit floats",
}


def load(name: str, *, side_px: int | None = None, env: Mapping[str, str] | None = None) -> Splits:
    """Training and test images of a local data set: float32 (1, side, side) in [0, 1].

    Args:
        side_px: scale the images to this height and width (bilinear); default as they are.

    Raises:
        ConfigError: the data set is not on this machine, incomplete or damaged.
    """
    data_set = find(name)
    located = locate(data_set, env)
    if located is None:
        folders = ", ".join(map(str, looked_in(data_set, env)))
        raise ConfigError(f"{name} is not here (looked in {folders}); {remedy(data_set)}")
    if located.missing:
        raise ConfigError(
            f"{name} in {located.folder} is incomplete: no {', '.join(located.missing)}; "
            f"{remedy(data_set)}"
        )
    train = _samples(data_set, located, data_set.train_images, data_set.train_labels, side_px)
    test = _samples(data_set, located, data_set.test_images, data_set.test_labels, side_px)
    scaled = (
        f", scaled up to {side_px}x{side_px}" if side_px not in (None, data_set.side_px) else ""
    )
    return Splits(
        train=train,
        test=test,
        source=f"{data_set.title} ({len(train):,} + {len(test):,} images{scaled})",
        classes=data_set.classes,
    )


def load_or_fallback(
    name: str,
    *,
    fetch_missing: bool,
    side_px: int | None = None,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
) -> tuple[Splits, str]:
    """``choose`` and ``load`` in one: the samples, and a note on the choice or ""."""
    choice = choose(name, fetch_missing=fetch_missing, env=env, outside=outside)
    return load(choice.name, side_px=side_px, env=env), choice.note


def _samples(
    data_set: DataSet,
    located: Located,
    images_file: DataFile,
    labels_file: DataFile,
    side_px: int | None,
) -> ArrayDataset:
    images = _values(data_set, located, images_file).unsqueeze(1)
    labels = _values(data_set, located, labels_file).to(torch.int64)
    scale = 1 / data_set.max_value
    if side_px is None or side_px == data_set.side_px:
        return ArrayDataset(images, labels, scale=scale)
    size = (side_px, side_px)
    floats = torch.nn.functional.interpolate(images * scale, size=size, mode="bilinear")
    return ArrayDataset(floats, labels)


def _values(data_set: DataSet, located: Located, file: DataFile) -> Tensor:
    path = located.paths[file.name]
    return torch.from_numpy(parse_idx(read_checked(path, file, remedy(data_set)), str(path)))


def parse_idx(content: Bytes | bytes, origin: str) -> NDArray[np.uint8]:
    """The values of an idx file of unsigned bytes, in its own shape, sharing ``content``'s memory.

    Args:
        origin: where the bytes came from, for messages.

    Raises:
        ConfigError: no idx header, another value type, or a size that contradicts the header.
    """
    shape = _shape(content, origin)
    header_bytes = 4 + 4 * len(shape)
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        sizes = " x ".join(map(str, shape))
        raise ConfigError(
            f"{origin} is truncated or damaged: its header says {sizes} values, "
            f"{expected_bytes:,} bytes in all, but it has {len(content):,} bytes"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _shape(content: Bytes | bytes, origin: str) -> tuple[int, ...]:
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ConfigError(
            f"{origin} is not an idx file: it must begin with the bytes 00 00, "
            f"found {bytes(content[:4]).hex(' ') or 'nothing'}"
        )
    value_type, num_dims = content[2], content[3]
    if value_type != _UNSIGNED_BYTE:
        type_name = _OTHER_TYPES.get(value_type, "not a type of the format")
        raise ConfigError(
            f"{origin} must hold unsigned bytes (type 0x08), found type "
            f"0x{value_type:02x} ({type_name})"
        )
    if num_dims < 1 or len(content) < 4 + 4 * num_dims:
        raise ConfigError(
            f"{origin} is truncated in its header: it declares {num_dims} dimensions and has "
            f"{len(content)} bytes"
        )
    return struct.unpack(f">{num_dims}I", bytes(content[4 : 4 + 4 * num_dims]))
