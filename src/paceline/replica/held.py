"""Whether a model still holds the memory that its tensors were given, and nobody else changed it.

    parameter.data = ...      of equal content: put back; of other content or another type: refused
    module.mean = 0.9 * ...   a buffer made anew: its values go where the old one lies
    module.mean.data = ...    the same of its memory

A script that replaces memory leaves the run without a word, so this is looked at before each push.
So is whether the bytes in it are what they were: all of few, of many a sample that moves.

    few     |################|                 every byte, against a copy
    many    |#...|#...|#...|#...|   step 1     as many lines in every step, evenly spread,
            |.#..|.#..|.#..|.#..|   step 2     so that each is looked at in its turn

An edit of a whole tensor is seen at once, one of a few bytes after a round of the sample at the
latest, if it is made again and again; who must know for certain compares everything. A bit above
300 lines, since what is held and how its bytes are looked at are read together. This module must
not know who else uses the memory.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..store.layout import Layout, TensorPlace

_WHOLE_BYTES = 128 << 10
"""To copy and to compare so much takes 10 us; 60 us where it is in no cache any more."""
_LINE_BYTES = 256
"""Two pairs of cache lines: what the processor fetches together."""
_NUM_LINES = 128
"""Each costs two misses of the caches and of the page table; together less than 0.3 % of a step of
60 ms."""

Range = tuple[int, int]


class HeldMemory:
    """The tensors of one model.

    Args:
        layout: where each lies in a block.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        number_of = {id(one): number for number, one in enumerate(self._buffers)}
        self._owners = [
            (module, key, number_of[id(buffer)])
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if id(buffer) in number_of
        ]
        named = {
            number
            for module, key, number in self._owners
            if key not in module._non_persistent_buffers_set
        }
        self._of_any_size = frozenset(range(len(self._buffers))) - named
        """Buffers that are caches: no state dict has them."""
        self._block: Tensor | None = None
        self._buffer_block: Tensor | None = None

    def lie_in(self, block: Tensor) -> None:
        """The parameters were just made views into ``block``."""
        self._block = block
        self._places = [(one.data_ptr(), one.numel()) for one in self._parameters]

    def buffers_lie_in(self, block: Tensor) -> None:
        """The buffers were just made views into ``block``, which may be another one."""
        self._buffer_block = block
        self._buffer_places = [(one.data_ptr(), one.numel()) for one in self._buffers]

    def versions(self) -> list[int]:
        """How often each parameter was written through a name that torch counts."""
        return [one._version for one in self._parameters]

    # -- parameters -----------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Take back parameters whose memory the script has replaced by one of equal content.

        Raises:
            ConfigError: it has another content, type, shape or device.
        """
        for number in self._moved():
            ours, found = self._put_back(number)
            if not _are_equal(ours, found):
                raise edited(self._layout.parameters.places[number].name)

    def check_kinds(self) -> None:
        """Before a backward pass, whose gradients would not fit. Raises: as above, but content."""
        for number in self._moved():
            place, found = self._layout.parameters.places[number], self._parameters[number].detach()
            if (found.dtype, tuple(found.shape)) != (place.dtype, place.shape):
                raise replaced("parameter", place, found)

    def take_parameters(self) -> None:
        """As ``check_parameters``, but other contents are taken over."""
        for number in self._moved():
            ours, found = self._put_back(number)
            ours.copy_(found)

    def drop_parameters(self) -> None:
        """As ``check_parameters``, but other contents are forgotten."""
        for number in self._moved():
            self._put_back(number)

    def _moved(self) -> list[int]:
        """Parameters that lie elsewhere, or have another size."""
        if self._block is None:
            return []
        return _elsewhere(self._parameters, self._places)

    def _put_back(self, number: int) -> tuple[Tensor, Tensor]:
        """Let a parameter lie in the block again; what is there, and what the script had put."""
        assert self._block is not None
        parameter, place = self._parameters[number], self._layout.parameters.places[number]
        ours, found = place.alone(self._block), parameter.detach()
        if not _are_of_one_kind(ours, found):
            raise replaced("parameter", place, found)
        parameter.data = ours
        return ours, found

    def check_names(self) -> None:
        """Refuse parameters that came after ``prepare``, or are gone."""
        check_names(self._model, {id(one): place.name for one, place in self._pairs()})

    def check_made_anew(self) -> None:
        """Refuse parameters in the place of those that were prepared; others may come and go."""
        known = {place.name: one for one, place in self._pairs()}
        for name, one in self._model.named_parameters():
            if known.get(name, one) is not one:
                raise ConfigError(
                    f"parameter {name!r} was made anew after prepare(), as by self.name = "
                    "nn.Parameter(...) in forward(), and each worker would have one of its own: "
                    "what forward() computes belongs into a buffer, which updates average, "
                    f"self.register_buffer({name.rpartition('.')[2]!r}, tensor)"
                )

    def _pairs(self) -> "zip[tuple[nn.Parameter, TensorPlace]]":
        return zip(self._parameters, self._layout.parameters.places, strict=True)

    # -- buffers --------------------------------------------------------------------------------

    def take_buffers(self) -> None:
        """Values of buffers that the model has made anew go where the old ones lie.

        Raises:
            ConfigError: one has another type, shape or place since.
        """
        for buffer, values in self._put_buffers_back():
            buffer.copy_(values)  # as torch counts changes, too
        for module, key, number in self._owners:
            mine, found = self._buffers[number], module._buffers.get(key)
            if found is mine:
                if number not in self._of_any_size:
                    refuse_resized(self._layout.buffers.places[number], mine)
                continue
            if found is not None and _are_of_one_kind(mine, found):
                mine.copy_(found.detach())
                module._buffers[key] = mine
            elif number not in self._of_any_size:
                raise replaced("buffer", self._layout.buffers.places[number], found)

    def drop_buffers(self) -> None:
        """What a pass has made that does not count is forgotten: the old buffers take its place."""
        self._put_buffers_back()
        for module, key, number in self._owners:
            mine, found = self._buffers[number], module._buffers.get(key)
            if found is not mine and found is not None and _are_of_one_kind(mine, found):
                module._buffers[key] = mine

    def _put_buffers_back(self) -> list[tuple[Tensor, Tensor]]:
        """Let buffers lie in the block again; those that did not, and what the script had put.

        Raises:
            ConfigError: that has another type, shape or device.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._buffer_block is None:
            return pairs
        for number in _elsewhere(self._buffers, self._buffer_places):
            mine, place = self._buffers[number], self._layout.buffers.places[number]
            ours, found = place.alone(self._buffer_block), mine.detach()
            if number in self._of_any_size and found.shape != place.shape:
                continue
            refuse_resized(place, found)
            if not _are_of_one_kind(ours, found):
                raise replaced("buffer", place, found)
            mine.data = ours
            pairs.append((mine, found))
        return pairs


IN_THE_STEP = (
    "make clamps and projections a part of the step: optimizer.register_step_post_hook(fn) before "
    "prepare (full-sync, local-sgd), or a class of your own (any protocol): class C(SGD): "
    "def step(self): super().step(); ... p.data.clamp_(-c, c) for p of self.param_groups"
)


def edited(name: str) -> ConfigError:
    """The error for weights that changed otherwise than by the optimizer's step."""
    return ConfigError(
        f"parameter {name!r} was changed after prepare() otherwise than by optimizer.step(), and "
        "such a change would be lost or made once by every worker: load weights before prepare(), "
        "say pace.publish(model) behind it (in the loop: only local-sgd), evaluate others for a "
        "while between epochs or by torch.func.functional_call(model, weights, (inputs,)), and "
        f"{IN_THE_STEP}"
    )


def replaced(kind: str, place: TensorPlace, found: Tensor | None) -> ConfigError:
    """The error for a tensor that has another type, shape or device since ``prepare``."""
    now = "nothing"
    if found is not None:
        now = f"{found.dtype} of shape {tuple(found.shape)} on {found.device}"
    return ConfigError(
        f"{kind} {place.name!r} is {place.dtype} of shape {place.shape} in the run, since "
        f"prepare() it was made {now}: convert, move and resize a model before, "
        "model = model.to(...); model, optimizer, loader = pace.prepare(model, optimizer, loader)"
    )


def _elsewhere(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> list[int]:
    """Which of them lie elsewhere than at these addresses, or have another size."""
    now = [(one.data_ptr(), one.numel()) for one in tensors]
    if now == places:
        return []
    pairs = enumerate(zip(now, places, strict=True))
    return [number for number, (here, there) in pairs if here != there]


RESIZE_BEFORE = (
    "a buffer that forward() resizes, or sizes only then, cannot lie in the memory of a run: call "
    "the model once with a batch before prepare(), so that its buffers have their sizes"
)


def refuse_resized(place: TensorPlace, buffer: Tensor) -> None:
    """Raise ConfigError where a buffer has another shape since ``prepare``."""
    if buffer.shape != place.shape:
        raise ConfigError(
            f"buffer {place.name!r} was of shape {place.shape} in prepare() and is of shape "
            f"{tuple(buffer.shape)} now: {RESIZE_BEFORE}"
        )


def _are_of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Their strides may differ: values are copied, memory is put back."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, as far as numbers go: nan equals itself."""
    same: Any = (one == other) | ((one != one) & (other != other))
    return bool(torch.all(same))


def check_names(model: nn.Module, known: Mapping[int, str]) -> None:
    """Raise ConfigError where the model's parameters are others than these, by identity."""
    now = {id(one): name for name, one in model.named_parameters()}
    for one, name in (*now.items(), *known.items()):
        if one not in known or one not in now:
            raise ConfigError(
                f"parameter {name!r} was put into the model or taken out of it after "
                "prepare(): build the whole model before, model.head = ...; "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )


class Marks:
    """Stretches of one memory.

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
        """Whether every byte is looked at."""

    def set(self, source: Tensor | None = None) -> None:
        """What is there now is what should be; ``source``: what lies there, at the same offsets."""
        for one in self._stretches:
            one.set(source)

    def changed(self) -> int | None:
        """Where a byte is another one, in bytes from the memory's beginning; None: nowhere."""
        for one in self._stretches:
            if (offset := one.changed()) is not None:
                return offset
        return None

    def glance(self) -> int | None:
        """The same of the first and the last of a CPU's lines, in a microsecond.

        What was written over for a while, as a whole, shows there.
        """
        if not self._stretches:
            return None
        first, last = self._stretches[0], self._stretches[-1]
        found = first.glance(0)
        return last.glance(-1) if found is None else found


class _Whole:
    """Every byte of ``[start, stop)``."""

    def __init__(self, memory: Tensor, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._mine = memory[start:stop]
        self._kept = torch.zeros_like(self._mine)
        size = min(_LINE_BYTES, stop - start)
        self._ends = [(0, size), (stop - start - size, size)]
        self._at = self._mine.data_ptr(), self._kept.data_ptr()
        self._is_local = memory.device.type == "cpu"

    def set(self, source: Tensor | None) -> None:
        part = self._mine if source is None else source[self._start : self._stop]
        self._kept.copy_(part)

    def changed(self) -> int | None:
        offset = first_difference(self._mine, self._kept)
        return None if offset is None else self._start + offset

    def glance(self, end: int) -> int | None:
        """Whether the first line, or with -1 the last, is another one: where; None: it is not."""
        offset, size = self._ends[end]
        mine, kept = self._at
        if not self._is_local or _compare(mine + offset, kept + offset, size) == 0:
            return None
        return self._start + offset


class _Sampled:
    """``count`` lines of ``[start, stop)`` at a time, others after each ``set``."""

    def __init__(self, memory: Tensor, start: int, stop: int, count: int) -> None:
        self._start, self._stop = start, stop
        self._every = -(-((stop - start) // _LINE_BYTES) // count)
        self._shift = 0
        self._mine = self._lines_of(memory)
        self._kept: Any = b""

    def _lines_of(self, memory: Tensor) -> Any:
        """``(lines, words)``; in NumPy where it may be: its calls cost a fifth of torch's."""
        lines = memory[self._start : self._stop].view(torch.int64).view(-1, _LINE_BYTES // 8)
        return lines.numpy() if memory.device.type == "cpu" else lines

    def set(self, source: Tensor | None) -> None:
        self._shift = (self._shift + 1) % self._every
        every = self._mine if source is None else self._lines_of(source)
        lines = every[self._shift :: self._every]
        self._kept = lines.clone() if isinstance(lines, Tensor) else lines.tobytes()

    def changed(self) -> int | None:
        lines = self._mine[self._shift :: self._every]
        if isinstance(lines, Tensor):
            if torch.equal(lines, self._kept):
                return None
            row = int((lines != self._kept).any(1).nonzero()[0])
        else:
            now = lines.tobytes()
            if now == self._kept:
                return None
            row = next(i for i, one in enumerate(now) if one != self._kept[i]) // _LINE_BYTES
        return self._start + (self._shift + row * self._every) * _LINE_BYTES

    def glance(self, end: int) -> int | None:
        """See ``_Whole.glance``; of the lines that are looked at this time."""
        if isinstance(self._mine, Tensor):
            return None
        row = len(self._kept) // _LINE_BYTES - 1 if end else 0
        number, first = self._shift + row * self._every, row * _LINE_BYTES
        if self._mine[number].tobytes() == self._kept[first : first + _LINE_BYTES]:
            return None
        return self._start + number * _LINE_BYTES


def first_difference(one: Tensor, other: Tensor) -> int | None:
    """The first byte in which two memories of one device differ, or None; nan equals itself."""
    if one.device.type == "cpu":  # torch.equal takes five times as long
        if _compare(one.data_ptr(), other.data_ptr(), one.numel()) == 0:
            return None
    elif torch.equal(one, other):
        return None
    return int((one != other).nonzero()[0])


_compare: Any = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
