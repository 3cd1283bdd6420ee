"""Where every tensor of a model lies in one flat block of bytes.

All members build the same layout from the same model and compare its digest; then a name is an
offset, and a whole model is moved with one copy:

    block  = [ parameters | buffers | optimizer state ]        each tensor 64-byte aligned
    slot   = [ gradients  | buffers ]                          the same offsets

This module must not know who copies what to whom, nor where the block lives.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """One tensor in the block: ``offset`` in bytes, strides in elements (they may be permuted)."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def flat(self, block: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``[start, stop)`` in memory order, ``(stop - start,)``."""
        stop = self.numel if stop is None else stop
        size = self.dtype.itemsize
        return block[self.offset + start * size : self.offset + stop * size].view(self.dtype)

    def view(self, block: Tensor) -> Tensor:
        """The tensor itself, of ``shape``, sharing the memory of ``block`` (bytes)."""
        return self.flat(block).as_strided(self.shape, self.strides)

    def without_memory(self) -> Tensor:
        """A tensor of its type, shape and strides on torch's meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def alone(self, block: Tensor) -> Tensor:
        """As ``view``, with a storage of its own over the same bytes.

        Who saves or copies a tensor takes its storage along: of a view that is the whole block. One
        of no elements lies elsewhere: who resizes it must not write over its neighbours.
        """
        if self.numel:
            return from_dlpack(self.view(block))
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=block.device)


@dataclass(frozen=True, slots=True)
class Section:
    """Places that lie side by side: ``[start, stop)`` in bytes."""

    places: tuple[TensorPlace, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop]

    def runs(self) -> Iterator[tuple[torch.dtype, int, int]]:
        """Stretches of one dtype, ``(dtype, start, stop)`` in bytes, padding included."""
        places = self.places
        begin = 0
        for i in range(1, len(places) + 1):
            if i == len(places) or places[i].dtype != places[begin].dtype:
                stop = places[i].offset if i < len(places) else self.stop
                yield places[begin].dtype, places[begin].offset, stop
                begin = i


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor or number that an optimizer keeps for parameter number ``parameter``."""

    parameter: int
    key: str
    place: TensorPlace
    is_number: bool
    """A Python number in the optimizer's state, kept here as one float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every parameter, buffer and state entry of one model and its optimizer."""

    parameters: Section
    buffers: Section
    state: Section
    entries: tuple[StateEntry, ...]

    @property
    def block_bytes(self) -> int:
        return self.state.stop

    @property
    def slot_bytes(self) -> int:
        return self.buffers.stop

    @property
    def num_parameters(self) -> int:
        return sum(place.numel for place in self.parameters.places)

    def digest(self) -> str:
        """Equal for two members exactly when their blocks mean the same."""
        text = repr([(p.name, p.shape, p.strides, str(p.dtype), p.offset) for p in self._places()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rows(self) -> dict[str, list[list[object]]]:
        """Every tensor in a block as plain data, for who writes blocks to a disk without torch.

        By section: name, dtype, bytes an element, shape, strides in elements, offset in bytes.
        """
        sections = {"parameters": self.parameters, "buffers": self.buffers, "state": self.state}
        return {
            name: [
                [
                    one.name,
                    str(one.dtype).removeprefix("torch."),
                    one.dtype.itemsize,
                    list(one.shape),
                    list(one.strides),
                    one.offset,
                ]
                for one in section.places
            ]
            for name, section in sections.items()
        }

    def _places(self) -> Iterator[TensorPlace]:
        yield from self.parameters.places
        yield from self.buffers.places
        yield from self.state.places


def lay_out(
    parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]],
    state: Iterable[tuple[int, str, Tensor, bool]],
) -> Layout:
    """Place parameters, buffers and state ``(parameter, key, example, is_number)`` in a block."""
    first = _section(list(parameters), 0)
    second = _section(list(buffers), first.stop)
    rows = list(state)
    third = _section([(f"{number}.{key}", like) for number, key, like, _ in rows], second.stop)
    entries = tuple(
        StateEntry(parameter=number, key=key, place=place, is_number=is_number)
        for (number, key, _, is_number), place in zip(rows, third.places, strict=True)
    )
    return Layout(parameters=first, buffers=second, state=third, entries=entries)


def _section(tensors: list[tuple[str, Tensor]], start: int) -> Section:
    places = []
    offset = start
    for name, tensor in tensors:
        places.append(
            TensorPlace(
                name=name,
                shape=tuple(tensor.shape),
                strides=_dense_strides(tensor),
                dtype=tensor.dtype,
                offset=offset,
            )
        )
        offset += -(-places[-1].num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Section(tuple(places), start, offset)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it is dense (channels_last), else contiguous ones."""
    return tuple(
        torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    )


def bind(module_tensors: Iterable[Tensor], section: Section, block: Tensor) -> None:
    """Make each tensor's data a view into ``block``, keeping its values there.

    The objects stay the same, so optimizers, hooks and tied weights keep holding.
    """
    for tensor, place in zip(module_tensors, section.places, strict=True):
        tensor.data = place.alone(block)


def in_one_memory(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that have bytes in common, of which one is trained; None: no two do.

    The layout gives each memory of its own, and they would come apart. What only lies side by side
    in one memory, even row by row in turn, may; so may what nobody trains.
    """
    reaching: list[tuple[str, Tensor]] = []
    held = [(name, one) for name, one in tensors if one.numel() and one.data_ptr()]
    for name, tensor in sorted(held, key=lambda row: row[1].data_ptr()):
        start = tensor.data_ptr()
        reaching = [row for row in reaching if row[1].data_ptr() + _reach_bytes(row[1]) > start]
        for other_name, other in reaching:
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and _have_common_bytes(other, tensor):
                return other_name, name
        reaching.append((name, tensor))
    return None


def _reach_bytes(tensor: Tensor) -> int:
    """From its first byte to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _have_common_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, of which the second begins within the reach of the first, overlap."""
    if all(two.numel() * two.itemsize == _reach_bytes(two) for two in (one, other)):
        return True  # neither has gaps
    start = one.data_ptr()
    reach_bytes = other.data_ptr() - start + _reach_bytes(other)
    marks = torch.zeros(max(_reach_bytes(one), reach_bytes), dtype=torch.bool)
    _bytes_of(one, marks, start).fill_(True)
    return bool(_bytes_of(other, marks, start).any())


def _bytes_of(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """The bytes of a tensor in ``memory``, which stands for what begins at address ``start``."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - start)


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers in the model's order, each once."""
    return list(model.named_buffers())
