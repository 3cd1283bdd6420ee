"""Bytes of messages and back: one encoder and one decoder, made from the types' own fields.

    frame      WIRE (4 bytes) | message | message ...
    message    number of its type (1 byte) | a record
    record     all its numbers at once, those of records in it too | what has a length, in order
    number     int, float: 8 bytes; bool: 1
    length     str, StrEnum: UTF-8; bytes; tuple, dict: so many values; None or a value: 1 byte
               before it

``WIRE`` is a checksum over all types and their fields, so who speaks another version of this
language is refused by name. A frame that is cut, too long, or holds what a type does not allow is a
``WireError``; nothing in it can run code, or take more memory than a small multiple of its bytes.
Above 300 lines because what is written and what is read stand side by side, kind by kind. This
module must not know what a message means, nor how bytes travel.
"""

import functools
import struct
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import (
    Any,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ..errors import LinkError
from .messages import FromMember, Message, ToMember

M = TypeVar("M", bound=Message)
Write: TypeAlias = Callable[[Any], bytes]
Read: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
"""The value that begins at a position, and the position after it."""

_LENGTH = struct.Struct("<I")
_NUMBERS = {int: "q", float: "d", bool: "?"}


class WireError(LinkError):
    """Bytes from a peer are no messages of this version of Paceline."""


class Codec(Generic[M]):
    """The messages of one direction.

    Args:
        union: of their types.
    """

    def __init__(self, union: Any) -> None:
        self.kinds: tuple[Any, ...] = get_args(union)
        self._writers = {
            kind: (bytes([number]), _form(kind).write) for number, kind in enumerate(self.kinds)
        }
        self._readers = [_form(kind).read for kind in self.kinds]

    def encode(self, messages: Iterable[M]) -> bytes:
        """One frame. WireError: a field's value is not of its type."""
        parts = [WIRE]
        for message in messages:
            try:
                number, write = self._writers[type(message)]
                parts += (number, write(message))
            except (struct.error, AttributeError, TypeError, LookupError) as error:
                raise WireError(f"{message!r:.200} cannot be sent: {error}") from error
        return b"".join(parts)

    def decode(self, frame: bytes) -> list[M]:
        """The messages of one frame. WireError: it is none of this version, or it is damaged."""
        if frame[:4] != WIRE:
            raise WireError(
                "a worker and its launcher speak different versions of Paceline's messages: use "
                "the same version of Paceline in all processes"
            )
        messages: list[M] = []
        at, end = len(WIRE), len(frame)
        try:
            while at < end:
                if frame[at] >= len(self._readers):
                    raise ValueError(f"there is no message {frame[at]}")
                message, at = self._readers[frame[at]](frame, at + 1)
                messages.append(message)
        except (struct.error, IndexError, ValueError) as error:
            said = str(error) or "it is cut"
            raise WireError(
                f"a message between a worker and its launcher is damaged ({said})"
            ) from None
        return messages


# -- values ----------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How values of one type are written.

    Attributes:
        least: bytes that a value takes at least.
        codes: of the numbers that it always is, for ``struct``; "" where its length may differ.
        join: makes such a value of its numbers; a value is the tuple of them, but for one number.
    """

    write: Write
    read: Read
    least: int
    codes: str = ""
    join: Callable[[Any], Any] = tuple

    @property
    def is_number(self) -> bool:
        return len(self.codes) == 1


@functools.cache
def _form(kind: Any) -> _Form:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _NUMBERS:
        packed = struct.Struct("<" + _NUMBERS[kind])
        return _Form(packed.pack, _reader(packed, itemgetter(0)), packed.size, _NUMBERS[kind])
    if kind is str:
        return _Form(_write_text, _read_text, _LENGTH.size)
    if _is_word(kind):
        return _word(kind)
    if kind is bytes:
        return _Form(_write_bytes, _read_bytes, _LENGTH.size)
    if origin in (Union, types.UnionType):
        (one,) = (each for each in inner if each is not type(None))
        return _optional(_form(one))
    if origin is dict:
        return _mapping(_many(_form(inner[0])), _many(_form(inner[1])))
    if origin is tuple and inner[-1] is ...:
        return _many(_form(inner[0]))
    if origin is tuple:
        return _flat("".join(_form(one).codes for one in inner), tuple)
    return _record(kind)


def _flat(codes: str, join: Callable[[Any], Any]) -> _Form:
    """Of values that are tuples of so many numbers."""
    packed = struct.Struct("<" + codes)
    pack = packed.pack
    return _Form(lambda value: pack(*value), _reader(packed, join), packed.size, codes, join)


def _reader(packed: struct.Struct, join: Callable[[Any], Any]) -> Read:
    return lambda data, at: (join(packed.unpack_from(data, at)), at + packed.size)


def _write_bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + _LENGTH.size
    stop = start + _LENGTH.unpack_from(data, at)[0]
    _check(data, stop)
    return data[start:stop], stop


def _write_text(text: str) -> bytes:
    return _write_bytes(text.encode(errors="surrogatepass"))


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    found, stop = _read_bytes(data, at)
    return found.decode(errors="surrogatepass"), stop


def _is_word(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _word(kind: type[StrEnum]) -> _Form:
    """One of a few texts; another one is damage."""

    def read(data: bytes, at: int) -> tuple[StrEnum, int]:
        text, stop = _read_text(data, at)
        return kind(text), stop

    return _Form(_write_text, read, _LENGTH.size)


def _check(data: bytes, stop: int) -> None:
    if stop > len(data):
        raise ValueError("it is cut")


def _optional(form: _Form) -> _Form:
    def write(value: Any) -> bytes:
        return b"\0" if value is None else b"\1" + form.write(value)

    def read(data: bytes, at: int) -> tuple[Any, int]:
        if data[at] > 1:
            raise ValueError("it is neither there nor left out")
        return form.read(data, at + 1) if data[at] else (None, at + 1)

    return _Form(write, read, 1)


def _mapping(keys: _Form, values: _Form) -> _Form:
    def write(value: Any) -> bytes:
        return keys.write(tuple(value)) + values.write(tuple(value.values()))

    def read(data: bytes, at: int) -> tuple[Any, int]:
        names, at = keys.read(data, at)
        found, at = values.read(data, at)
        pairs = dict(zip(names, found, strict=True))
        if len(pairs) != len(names):
            raise ValueError("it has a name twice")
        return pairs, at

    return _Form(write, read, keys.least + values.least)


def _many(form: _Form) -> _Form:
    """So many values of one type; those of a fixed size are written and read all at once."""
    codes, is_number = form.codes, form.is_number
    none, prefix = _LENGTH.pack(0), _LENGTH.size
    every = struct.Struct("<" + codes).iter_unpack

    def write(values: Sequence[Any]) -> bytes:
        if not values:
            return none
        length = len(values)
        if is_number:
            return struct.pack(f"<I{length}{codes}", length, *values)
        return _LENGTH.pack(length) + b"".join(map(form.write, values))

    def read(data: bytes, at: int) -> tuple[Any, int]:
        (length,) = _LENGTH.unpack_from(data, at)
        at += prefix
        if not length:
            return (), at
        stop = at + length * form.least
        _check(data, stop)
        if is_number:
            return struct.unpack_from(f"<{length}{codes}", data, at), stop
        if codes:
            return tuple(map(form.join, every(data[at:stop]))), stop
        found = []
        for _ in range(length):
            value, at = form.read(data, at)
            found.append(value)
        return tuple(found), at

    return _Form(write, read, prefix)


# -- records ---------------------------------------------------------------------------------------


def _record(kind: Any) -> _Form:
    """A NamedTuple: the numbers of all its fields, then the fields that have a length.

    As ``dataclasses`` does, it makes the text of two functions and has Python compile it, since a
    push passes here four times: of ``Stop(version)`` they are

        lambda value: pack(value[0])
        lambda data, at: (new(kind, unpack(data, at)), at + 8)
    """
    leaves = list(_leaves(kind, "value"))
    codes = "".join(form.codes for _, form in leaves if form.is_number)
    others = [(path, form) for path, form in leaves if not form.is_number]
    join = functools.partial(tuple.__new__, kind)
    if not others and len(leaves) == len(kind._fields):
        return _flat(codes, join)
    packed = struct.Struct("<" + codes)
    names: dict[str, Any] = {"pack": packed.pack, "unpack": packed.unpack_from}
    names |= {f"write{i}": form.write for i, (_, form) in enumerate(others)}
    names |= {f"read{i}": form.read for i, (_, form) in enumerate(others)}
    written = [f"pack({', '.join(path for path, form in leaves if form.is_number)})"]
    written += [f"write{i}({path})" for i, (path, _) in enumerate(others)]
    made = _construct(kind, iter(leaves), _Counters(), names)
    numbers = "".join(f"number{i}, " for i in range(len(codes)))
    lines = [
        "def write(value):",
        f"    return {' + '.join(written)}",
        "def read(data, at):",
        *([f"    {numbers}= unpack(data, at)"] if codes else []),
        f"    at += {packed.size}",
        *(f"    other{i}, at = read{i}(data, at)" for i in range(len(others))),
        f"    return {made}, at",
    ]
    exec("\n".join(lines), names)
    least = packed.size + sum(form.least for _, form in others)
    return _Form(names["write"], names["read"], least)


def _is_record(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _leaves(kind: Any, path: str) -> Iterator[tuple[str, _Form]]:
    """The fields in order, those of records in it, too: ("value[2][1]", the form of a float)."""
    for i, hint in enumerate(get_type_hints(kind).values()):
        if _is_record(hint):
            yield from _leaves(hint, f"{path}[{i}]")
        else:
            yield f"{path}[{i}]", _form(hint)


@dataclass(slots=True)
class _Counters:
    """How many numbers, and other fields, have been used."""

    numbers: int = 0
    others: int = 0


def _construct(
    kind: Any, leaves: Iterator[tuple[str, _Form]], used: _Counters, names: dict[str, Any]
) -> str:
    """The text that makes a record out of ``number0`` ... and ``other0`` ..."""
    parts = []
    for hint in get_type_hints(kind).values():
        if _is_record(hint):
            parts.append(_construct(hint, leaves, used, names))
        elif next(leaves)[1].is_number:
            parts.append(f"number{used.numbers}")
            used.numbers += 1
        else:
            parts.append(f"other{used.others}")
            used.others += 1
    names["new"] = tuple.__new__
    names[kind.__name__] = kind
    return f"new({kind.__name__}, ({''.join(f'{part}, ' for part in parts)}))"


# -- the two directions ----------------------------------------------------------------------------


def _said(union: Any) -> str:
    """All types with their fields, as text."""
    return "\n".join(f"{kind.__name__} {_written(kind)}" for kind in get_args(union))


def _written(kind: Any) -> str:
    """A type, with the fields of all that lies in it."""
    if _is_record(kind):
        fields = get_type_hints(kind).items()
        return f"({', '.join(f'{name}: {_written(hint)}' for name, hint in fields)})"
    if _is_word(kind):
        return f"({' | '.join(kind)})"
    if inner := get_args(kind):
        return f"{get_origin(kind)}[{', '.join(map(_written, inner))}]"
    return str(kind)


WIRE = _LENGTH.pack(zlib.crc32((_said(FromMember) + "\n" + _said(ToMember)).encode()))
FROM_MEMBER: Codec[FromMember] = Codec(FromMember)
TO_MEMBER: Codec[ToMember] = Codec(ToMember)
