"""The layout of a model's tensors in one flat block of bytes.

All members build the same layout from the same model and compare its digest; then every name has an
offset, and a whole model is moved with one copy:

    block  = [ parameters | buffers | optimizer state ]        each tensor 64-byte aligned
    slot   = [ gradients  | buffers ]                          the same offsets

This module must not know who copies what to whom, nor where the block is.
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
    """One tensor in the block: ``offset`` in bytes, strides in elements (possibly permuted)."""

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
        """The tensor as a view of ``block`` (bytes)."""
        return self.flat(block).as_strided(self.shape, self.strides)

    def without_memory(self) -> Tensor:
        """A tensor of this type, shape and strides on torch's meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def alone(self, block: Tensor) -> Tensor:
        """As ``view``, but with a storage of its own over the same bytes.

        Saving or copying a tensor includes its storage, which for a view is the whole block. An
        empty tensor is not in the block: resizing it must not overwrite its neighbours.
        """
        if self.numel:
            return from_dlpack(self.view(block))
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=block.device)


@dataclass(frozen=True, slots=True)
class Section:
    """Adjacent places: ``[start, stop)`` in bytes."""

    places: tuple[TensorPlace, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop]

    def runs(self) -> Iterator[tuple[torch.dtype, int, int]]:
        """Ranges of one dtype, ``(dtype, start, stop)`` in bytes, with padding."""
        places = self.places
        begin = 0
        for i in range(1, len(places) + 1):
            if i == len(places) or places[i].dtype != places[begin].dtype:
                stop = places[i].offset if i < len(places) else self.stop
                yield places[begin].dtype, places[begin].offset, stop
                begin = i


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor or number in an optimizer's state of parameter number ``parameter``."""

    parameter: int
    key: str
    place: TensorPlace
    is_number: bool
    """A Python number in the optimizer's state, stored as one float64."""


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
        """A digest that is equal for two members exactly if their layouts are equal."""
        text = repr(
            [
                (place.name, place.shape, place.strides, str(place.dtype), place.offset)
                for place in self._places()
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rows(self) -> dict[str, list[list[object]]]:
        """Every tensor in a block as plain data, to write blocks to disk without torch.

        By section: name, dtype, bytes per element, shape, strides in elements, offset in bytes.
        """
        sections = {"parameters": self.parameters, "buffers": self.buffers, "state": self.state}
        return {
            name: [
                [
                    place.name,
                    str(place.dtype).removeprefix("torch."),
                    place.dtype.itemsize,
                    list(place.shape),
                    list(place.strides),
                    place.offset,
                ]
                for place in section.places
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
    parameter_section = _section(list(parameters), 0)
    buffer_section = _section(list(buffers), parameter_section.stop)
    rows = list(state)
    examples = [(f"{number}.{key}", example) for number, key, example, _ in rows]
    state_section = _section(examples, buffer_section.stop)
    entries = tuple(
        StateEntry(parameter=number, key=key, place=place, is_number=is_number)
        for (number, key, _, is_number), place in zip(rows, state_section.places, strict=True)
    )
    return Layout(
        parameters=parameter_section, buffers=buffer_section, state=state_section, entries=entries
    )


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
    """The tensor's own strides if it is dense (channels_last), else contiguous ones."""
    return tuple(
        torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    )


def bind(module_tensors: Iterable[Tensor], section: Section, block: Tensor) -> None:
    """Make each tensor's data a view into ``block``, keeping its values there.

    The objects stay the same, so optimizers, hooks and tied weights stay valid.
    """
    for tensor, place in zip(module_tensors, section.places, strict=True):
        tensor.data = place.alone(block)


def in_one_memory(tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """The names of two tensors that share bytes, one of them trained; None: there are none.

    The layout gives each its own memory, so they would be separated. Tensors may be adjacent in one
    memory, even with interleaved rows, and untrained ones may overlap.
    """
    open_: list[tuple[str, Tensor]] = []
    present = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.data_ptr()]
    for name, tensor in sorted(present, key=lambda row: row[1].data_ptr()):
        start = tensor.data_ptr()
        open_ = [row for row in open_ if row[1].data_ptr() + _reach_bytes(row[1]) > start]
        for other_name, other in open_:
            is_trained = tensor.requires_grad or other.requires_grad
            if is_trained and _have_common_bytes(other, tensor):
                return other_name, name
        open_.append((name, tensor))
    return None


def _reach_bytes(tensor: Tensor) -> int:
    """The bytes from a tensor's first to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _have_common_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors overlap, if the second begins within the reach of the first."""
    if all(tensor.numel() * tensor.itemsize == _reach_bytes(tensor) for tensor in (first, second)):
        return True  # neither has gaps
    start = first.data_ptr()
    reach_bytes = second.data_ptr() - start + _reach_bytes(second)
    marks = torch.zeros(max(_reach_bytes(first), reach_bytes), dtype=torch.bool)
    _bytes_of(first, marks, start).fill_(True)
    return bool(_bytes_of(second, marks, start).any())


def _bytes_of(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """A tensor's bytes in ``memory``, which represents the memory from address ``start`` on."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - start)


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The model's buffers in order, each once."""
    return list(model.named_buffers())
