"""Check that a model still uses the memory of the run, and that nothing else has changed it.

    parameter.data = ...      equal content: restored; other content or type: refused
    module.mean = 0.9 * ...   a new buffer object: its values are copied into the old one
    module.mean.data = ...    the same for its memory

A script that replaces memory would silently leave the run, so this is checked before each push, and
also whether its bytes are unchanged: all of them if they are few, else a sample that moves.

    few     |################|                 every byte, against a copy
    many    |#...|#...|#...|#...|   step 1     as many lines in every step, evenly spread,
            |.#..|.#..|.#..|.#..|   step 2     so that each is checked in turn

An edit of a whole tensor is seen at once, a repeated edit of a few bytes after one round of the
sample at the latest; for certainty compare everything. Above 300 lines, since the held tensors and
the check of their bytes are read together. This module must not know who else uses the memory.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..store.layout import Layout, TensorPlace

_WHOLE_BYTES = 128 << 10
"""Copying and comparing this many bytes takes 10 us; 60 us if they are not in a cache."""
_LINE_BYTES = 256
"""Two pairs of cache lines, which the processor fetches together."""
_NUM_LINES = 128
"""Each costs two misses of the caches and of the page table; together less than 0.3 % of a step of
60 ms."""

Range = tuple[int, int]


class HeldMemory:
    """The parameters and buffers of one model.

    Args:
        layout: the place of each in a block.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        number_of = {id(buffer): number for number, buffer in enumerate(self._buffers)}
        self._owners = [
            (module, key, number_of[id(buffer)])
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if id(buffer) in number_of
        ]
        in_state_dict = {
            number
            for module, key, number in self._owners
            if key not in module._non_persistent_buffers_set
        }
        self._of_any_size = frozenset(range(len(self._buffers))) - in_state_dict
        """Numbers of buffers in no state dict, such as caches."""
        self._block: Tensor | None = None
        self._buffer_block: Tensor | None = None

    def lie_in(self, block: Tensor) -> None:
        """Note that the parameters are now views into ``block``."""
        self._block = block
        self._places = [(parameter.data_ptr(), parameter.numel()) for parameter in self._parameters]

    def buffers_lie_in(self, block: Tensor) -> None:
        """Note that the buffers are now views into ``block``, which may be another one."""
        self._buffer_block = block
        self._buffer_places = [(buffer.data_ptr(), buffer.numel()) for buffer in self._buffers]

    def versions(self) -> list[int]:
        """Return torch's count of in-place changes of each parameter."""
        return [parameter._version for parameter in self._parameters]

    # -- parameters -----------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Restore parameters whose memory the script has replaced by equal content.

        Raises:
            ConfigError: the content, type, shape or device differs.
        """
        for number in self._moved():
            held, replacement = self._put_back(number)
            if not _are_equal(held, replacement):
                raise edited(self._layout.parameters.places[number].name)

    def check_kinds(self) -> None:
        """Refuse another type or shape before a backward pass, whose gradients would not fit."""
        for number in self._moved():
            place = self._layout.parameters.places[number]
            current = self._parameters[number].detach()
            if (current.dtype, tuple(current.shape)) != (place.dtype, place.shape):
                raise replaced("parameter", place, current)

    def take_parameters(self) -> None:
        """As ``check_parameters``, but other content is accepted."""
        for number in self._moved():
            held, replacement = self._put_back(number)
            held.copy_(replacement)

    def drop_parameters(self) -> None:
        """As ``check_parameters``, but other content is dropped."""
        for number in self._moved():
            self._put_back(number)

    def _moved(self) -> list[int]:
        """Return the numbers of parameters whose memory or size has changed."""
        if self._block is None:
            return []
        return _elsewhere(self._parameters, self._places)

    def _put_back(self, number: int) -> tuple[Tensor, Tensor]:
        """Make a parameter a view into the block again.

        Returns:
            That view, and the tensor with which the script had replaced it.
        """
        assert self._block is not None
        parameter, place = self._parameters[number], self._layout.parameters.places[number]
        held, replacement = place.alone(self._block), parameter.detach()
        if not _are_of_one_kind(held, replacement):
            raise replaced("parameter", place, replacement)
        parameter.data = held
        return held, replacement

    def check_names(self) -> None:
        """Refuse parameters that were added or removed after ``prepare``."""
        check_names(self._model, {id(parameter): place.name for parameter, place in self._pairs()})

    def check_made_anew(self) -> None:
        """Refuse new parameters under the names of prepared ones; others may come and go."""
        known = {place.name: parameter for parameter, place in self._pairs()}
        for name, parameter in self._model.named_parameters():
            if known.get(name, parameter) is not parameter:
                raise ConfigError(
                    f"parameter {name!r} was replaced after prepare(), as by self.name = "
                    "nn.Parameter(...) in forward(), and each worker would have one of its own: "
                    "keep what forward() computes in a buffer, which updates average, "
                    f"self.register_buffer({name.rpartition('.')[2]!r}, tensor)"
                )

    def _pairs(self) -> "zip[tuple[nn.Parameter, TensorPlace]]":
        return zip(self._parameters, self._layout.parameters.places, strict=True)

    # -- buffers --------------------------------------------------------------------------------

    def take_buffers(self) -> None:
        """Copy the values of buffers that the model has replaced into the old ones.

        Raises:
            ConfigError: the type, shape or device of one has changed.
        """
        for buffer, values in self._put_buffers_back():
            buffer.copy_(values)  # a copy, so that torch counts the change
        for module, key, number in self._owners:
            held, current = self._buffers[number], module._buffers.get(key)
            if current is held:
                if number not in self._of_any_size:
                    refuse_resized(self._layout.buffers.places[number], held)
                continue
            if current is not None and _are_of_one_kind(held, current):
                held.copy_(current.detach())
                module._buffers[key] = held
            elif number not in self._of_any_size:
                raise replaced("buffer", self._layout.buffers.places[number], current)

    def drop_buffers(self) -> None:
        """Restore the old buffers after a pass that does not count."""
        self._put_buffers_back()
        for module, key, number in self._owners:
            held, current = self._buffers[number], module._buffers.get(key)
            if current is not held and current is not None and _are_of_one_kind(held, current):
                module._buffers[key] = held

    def _put_buffers_back(self) -> list[tuple[Tensor, Tensor]]:
        """Make buffers views into the block again.

        Returns:
            Each buffer that was not, and the tensor with which the script had replaced its memory.

        Raises:
            ConfigError: the type, shape or device has changed.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._buffer_block is None:
            return pairs
        for number in _elsewhere(self._buffers, self._buffer_places):
            buffer, place = self._buffers[number], self._layout.buffers.places[number]
            held, replacement = place.alone(self._buffer_block), buffer.detach()
            if number in self._of_any_size and replacement.shape != place.shape:
                continue
            refuse_resized(place, replacement)
            if not _are_of_one_kind(held, replacement):
                raise replaced("buffer", place, replacement)
            buffer.data = held
            pairs.append((buffer, replacement))
        return pairs


IN_THE_STEP = (
    "make clamps and projections a part of the step: optimizer.register_step_post_hook(fn) before "
    "prepare() (full-sync, local-sgd), or a class of your own (any protocol): class C(SGD): "
    "def step(self): super().step(); ... p.data.clamp_(-c, c) for p of self.param_groups"
)


def edited(name: str) -> ConfigError:
    """Return the error for weights that changed other than by the optimizer's step."""
    return ConfigError(
        f"parameter {name!r} was changed after prepare() other than by optimizer.step(), and "
        "such a change would be lost, or made once by every worker: load weights before prepare(), "
        "or call pace.publish(model) after it (in the loop: only local-sgd); evaluate other "
        "weights between epochs, or by torch.func.functional_call(model, weights, (inputs,)); and "
        f"{IN_THE_STEP}"
    )


def replaced(kind: str, place: TensorPlace, tensor: Tensor | None) -> ConfigError:
    """Return the error for a tensor whose type, shape or device changed after ``prepare``."""
    current = "nothing"
    if tensor is not None:
        current = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
    return ConfigError(
        f"{kind} {place.name!r} is {place.dtype} of shape {place.shape} in the run, but was "
        f"changed after prepare() to {current}: convert, move and resize a model before, "
        "model = model.to(...); model, optimizer, loader = pace.prepare(model, optimizer, loader)"
    )


def _elsewhere(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of tensors that are not at these addresses, or have another size."""
    current = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    if current == places:
        return []
    pairs = enumerate(zip(current, places, strict=True))
    return [number for number, (place, held_place) in pairs if place != held_place]


RESIZE_BEFORE = (
    "a buffer that gets its size in forward() cannot be in the memory of a run: call "
    "the model once with a batch before prepare(), so that its buffers have their sizes"
)


def refuse_resized(place: TensorPlace, buffer: Tensor) -> None:
    """Raise ConfigError if the shape of a buffer changed after ``prepare``."""
    if buffer.shape != place.shape:
        raise ConfigError(
            f"buffer {place.name!r} was of shape {place.shape} in prepare() and is of shape "
            f"{tuple(buffer.shape)} now: {RESIZE_BEFORE}"
        )


def _are_of_one_kind(a: Tensor, b: Tensor) -> bool:
    """Whether shape, type and device are equal; strides may differ, as values are copied."""
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether all values are equal; nan equals itself."""
    same: Any = (a == b) | ((a != a) & (b != b))
    return bool(torch.all(same))


def check_names(model: nn.Module, prepared: Mapping[int, str]) -> None:
    """Raise ConfigError if the model's parameters are not exactly the prepared ones.

    Args:
        prepared: their names by the objects' ids.
    """
    current = {id(parameter): name for name, parameter in model.named_parameters()}
    for key, name in (*current.items(), *prepared.items()):
        if key not in prepared or key not in current:
            raise ConfigError(
                f"parameter {name!r} was added to the model or removed from it after "
                "prepare(): build the whole model before, model.head = ...; "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )


class Marks:
    """Detects changes in ranges of one memory.

    Args:
        memory: bytes, ``(n,)`` uint8.
        ranges: ``[start, stop)`` in bytes, each a multiple of 64 or the memory's end.
    """

    def __init__(self, memory: Tensor, ranges: Sequence[Range]) -> None:
        total = sum(stop - start for start, stop in ranges)
        self._stretches: list[_Whole | _Sampled] = []
        for start, stop in ranges:
            if total <= _WHOLE_BYTES:
                self._stretches.append(_Whole(memory, start, stop))
                continue
            middle = stop - (stop - start) % _LINE_BYTES
            if start < middle:
                count = max(1, _NUM_LINES * (middle - start) // total)
                self._stretches.append(_Sampled(memory, start, middle, count))
            if middle < stop:
                self._stretches.append(_Whole(memory, middle, stop))
        self.is_whole = total <= _WHOLE_BYTES
        """Whether every byte is compared."""

    def set(self, source: Tensor | None = None) -> None:
        """Take the current bytes, or those of ``source`` at the same offsets, as the reference."""
        for stretch in self._stretches:
            stretch.set(source)

    def changed(self) -> int | None:
        """The offset of a changed byte, from the memory's beginning; None: there is none."""
        for stretch in self._stretches:
            if (offset := stretch.changed()) is not None:
                return offset
        return None

    def glance(self) -> int | None:
        """As ``changed``, for the first and last line of a CPU's memory, in a microsecond.

        Enough to notice memory that was overwritten as a whole.
        """
        if not self._stretches:
            return None
        first, last = self._stretches[0], self._stretches[-1]
        offset = first.glance(0)
        return last.glance(-1) if offset is None else offset


class _Whole:
    """Every byte of ``[start, stop)``."""

    def __init__(self, memory: Tensor, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._current = memory[start:stop]
        self._kept = torch.zeros_like(self._current)
        size = min(_LINE_BYTES, stop - start)
        self._ends = [(0, size), (stop - start - size, size)]
        self._addresses = self._current.data_ptr(), self._kept.data_ptr()
        self._is_local = memory.device.type == "cpu"

    def set(self, source: Tensor | None) -> None:
        part = self._current if source is None else source[self._start : self._stop]
        self._kept.copy_(part)

    def changed(self) -> int | None:
        offset = first_difference(self._current, self._kept)
        return None if offset is None else self._start + offset

    def glance(self, end: int) -> int | None:
        """The offset of the first line, or with -1 the last, if it changed; else None."""
        offset, size = self._ends[end]
        current, kept = self._addresses
        if not self._is_local or _compare(current + offset, kept + offset, size) == 0:
            return None
        return self._start + offset


class _Sampled:
    """``count`` lines of ``[start, stop)`` at a time, different ones after each ``set``."""

    def __init__(self, memory: Tensor, start: int, stop: int, count: int) -> None:
        self._start, self._stop = start, stop
        self._every = -(-((stop - start) // _LINE_BYTES) // count)
        self._shift = 0
        self._current = self._lines_of(memory)
        self._kept: Any = b""

    def _lines_of(self, memory: Tensor) -> Any:
        """``(lines, words)``; in NumPy on a CPU, whose calls cost a fifth of torch's."""
        lines = memory[self._start : self._stop].view(torch.int64).view(-1, _LINE_BYTES // 8)
        return lines.numpy() if memory.device.type == "cpu" else lines

    def set(self, source: Tensor | None) -> None:
        self._shift = (self._shift + 1) % self._every
        all_lines = self._current if source is None else self._lines_of(source)
        lines = all_lines[self._shift :: self._every]
        self._kept = lines.clone() if isinstance(lines, Tensor) else lines.tobytes()

    def changed(self) -> int | None:
        lines = self._current[self._shift :: self._every]
        if isinstance(lines, Tensor):
            if torch.equal(lines, self._kept):
                return None
            row = int((lines != self._kept).any(1).nonzero()[0])
        else:
            current = lines.tobytes()
            if current == self._kept:
                return None
            pairs = enumerate(zip(current, self._kept, strict=True))
            first = next(offset for offset, (byte, kept) in pairs if byte != kept)
            row = first // _LINE_BYTES
        return self._start + (self._shift + row * self._every) * _LINE_BYTES

    def glance(self, end: int) -> int | None:
        """See ``_Whole.glance``; for the lines of the current sample."""
        if isinstance(self._current, Tensor):
            return None
        row = len(self._kept) // _LINE_BYTES - 1 if end else 0
        number, first = self._shift + row * self._every, row * _LINE_BYTES
        if self._current[number].tobytes() == self._kept[first : first + _LINE_BYTES]:
            return None
        return self._start + number * _LINE_BYTES


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """Return the first byte in which two memories of one device differ; None: they are equal."""
    if a.device.type == "cpu":  # torch.equal takes five times as long
        if _compare(a.data_ptr(), b.data_ptr(), a.numel()) == 0:
            return None
    elif torch.equal(a, b):
        return None
    return int((a != b).nonzero()[0])


_compare: Any = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
