"""Encodes and decodes messages: one encoder and one decoder, made from the types' fields.

    frame      WIRE (4 bytes) | message | message ...
    message    number of its type (1 byte) | a record
    record     all its numbers at once, nested records included | fields with a length, in order
    number     int, float: 8 bytes; bool: 1
    length     str, StrEnum: UTF-8; bytes; tuple, dict: so many values; None or a value: 1 byte
               before it

``WIRE`` is a checksum over all types and their fields, so a peer of another version is refused by
name. A frame that is truncated, too long, or holds what a type does not allow is a ``WireError``;
no frame can run code, or take more memory than a small multiple of its bytes. Above 300 lines
because writing and reading are side by side for each kind. This module must not know what a message
means, nor how bytes travel.
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
"""Returns the value that begins at a position, and the position after it."""

_LENGTH = struct.Struct("<I")
_NUMBERS = {int: "q", float: "d", bool: "?"}


class WireError(LinkError):
    """Bytes from a peer are not messages of this version of Paceline."""


class Codec(Generic[M]):
    """Encodes and decodes the messages of one direction.

    Args:
        union: the union of their types.
    """

    def __init__(self, union: Any) -> None:
        self.kinds: tuple[Any, ...] = get_args(union)
        self._writers = {
            kind: (bytes([number]), _form(kind).write) for number, kind in enumerate(self.kinds)
        }
        self._readers = [_form(kind).read for kind in self.kinds]

    def encode(self, messages: Iterable[M]) -> bytes:
        """Return one frame; raise WireError if a field's value is not of its type."""
        parts = [WIRE]
        for message in messages:
            try:
                number, write = self._writers[type(message)]
                parts += (number, write(message))
            except (struct.error, AttributeError, TypeError, LookupError) as error:
                raise WireError(f"{message!r:.200} cannot be sent: {error}") from error
        return b"".join(parts)

    def decode(self, frame: bytes) -> list[M]:
        """Return one frame's messages; raise WireError if it is damaged or of another version."""
        if frame[:4] != WIRE:
            raise WireError(
                "a worker and its launcher use different versions of Paceline's messages: use "
                "the same version of Paceline in all processes"
            )
        messages: list[M] = []
        at, end = len(WIRE), len(frame)
        try:
            while at < end:
                if frame[at] >= len(self._readers):
                    raise ValueError(f"unknown message type {frame[at]}")
                message, at = self._readers[frame[at]](frame, at + 1)
                messages.append(message)
        except (struct.error, IndexError, ValueError) as error:
            reason = str(error) or "it is truncated"
            raise WireError(
                f"a message between a worker and its launcher is damaged ({reason})"
            ) from None
        return messages


# -- values ----------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How values of one type are written.

    Attributes:
        least: minimum bytes of a value.
        codes: ``struct`` codes of a value that is a fixed number of numbers; "" for others.
        join: makes a value from its numbers; a value is their tuple, or the number itself.
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
        (present,) = (hint for hint in inner if hint is not type(None))
        return _optional(_form(present))
    if origin is dict:
        return _mapping(_many(_form(inner[0])), _many(_form(inner[1])))
    if origin is tuple and inner[-1] is ...:
        return _many(_form(inner[0]))
    if origin is tuple:
        return _flat("".join(_form(hint).codes for hint in inner), tuple)
    return _record(kind)


def _flat(codes: str, join: Callable[[Any], Any]) -> _Form:
    """Return the form of values that are tuples of a fixed number of numbers."""
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
    encoded, stop = _read_bytes(data, at)
    return encoded.decode(errors="surrogatepass"), stop


def _is_word(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _word(kind: type[StrEnum]) -> _Form:
    """Return the form of an enum of texts; any other text is damage."""

    def read(data: bytes, at: int) -> tuple[StrEnum, int]:
        text, stop = _read_text(data, at)
        return kind(text), stop

    return _Form(_write_text, read, _LENGTH.size)


def _check(data: bytes, stop: int) -> None:
    if stop > len(data):
        raise ValueError("it is truncated")


def _optional(form: _Form) -> _Form:
    def write(value: Any) -> bytes:
        return b"\0" if value is None else b"\1" + form.write(value)

    def read(data: bytes, at: int) -> tuple[Any, int]:
        if data[at] > 1:
            raise ValueError("an optional value is marked neither present nor absent")
        return form.read(data, at + 1) if data[at] else (None, at + 1)

    return _Form(write, read, 1)


def _mapping(keys: _Form, values: _Form) -> _Form:
    def write(value: Any) -> bytes:
        return keys.write(tuple(value)) + values.write(tuple(value.values()))

    def read(data: bytes, at: int) -> tuple[Any, int]:
        names, at = keys.read(data, at)
        items, at = values.read(data, at)
        pairs = dict(zip(names, items, strict=True))
        if len(pairs) != len(names):
            raise ValueError("a name occurs twice")
        return pairs, at

    return _Form(write, read, keys.least + values.least)


def _many(form: _Form) -> _Form:
    """Return the form of many values of one type; those of a fixed size are read all at once."""
    codes, is_number = form.codes, form.is_number
    empty, prefix = _LENGTH.pack(0), _LENGTH.size
    iter_unpack = struct.Struct("<" + codes).iter_unpack

    def write(values: Sequence[Any]) -> bytes:
        if not values:
            return empty
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
            return tuple(map(form.join, iter_unpack(data[at:stop]))), stop
        items = []
        for _ in range(length):
            value, at = form.read(data, at)
            items.append(value)
        return tuple(items), at

    return _Form(write, read, prefix)


# -- records ---------------------------------------------------------------------------------------


def _record(kind: Any) -> _Form:
    """Return the form of a NamedTuple: the numbers of all fields, then the fields with a length.

    Like ``dataclasses``, it makes the text of two functions and compiles it, since a push passes
    here four times. For ``Stop(version)`` they are

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
    writes = [f"pack({', '.join(path for path, form in leaves if form.is_number)})"]
    writes += [f"write{i}({path})" for i, (path, _) in enumerate(others)]
    constructor = _construct(kind, iter(leaves), _Counters(), names)
    numbers = "".join(f"number{i}, " for i in range(len(codes)))
    lines = [
        "def write(value):",
        f"    return {' + '.join(writes)}",
        "def read(data, at):",
        *([f"    {numbers}= unpack(data, at)"] if codes else []),
        f"    at += {packed.size}",
        *(f"    other{i}, at = read{i}(data, at)" for i in range(len(others))),
        f"    return {constructor}, at",
    ]
    exec("\n".join(lines), names)
    least = packed.size + sum(form.least for _, form in others)
    return _Form(names["write"], names["read"], least)


def _is_record(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _leaves(kind: Any, path: str) -> Iterator[tuple[str, _Form]]:
    """Yield the fields in order, nested records included: ("value[2][1]", a float's form)."""
    for i, hint in enumerate(get_type_hints(kind).values()):
        if _is_record(hint):
            yield from _leaves(hint, f"{path}[{i}]")
        else:
            yield f"{path}[{i}]", _form(hint)


@dataclass(slots=True)
class _Counters:
    """How many numbers and other fields were used."""

    numbers: int = 0
    others: int = 0


def _construct(
    kind: Any, leaves: Iterator[tuple[str, _Form]], used: _Counters, names: dict[str, Any]
) -> str:
    """Return the code that makes a record from ``number0`` ... and ``other0`` ..."""
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


def _signature(union: Any) -> str:
    """Return all types with their fields, as text."""
    return "\n".join(f"{kind.__name__} {_type_text(kind)}" for kind in get_args(union))


def _type_text(kind: Any) -> str:
    """Return a type with all its nested fields, as text."""
    if _is_record(kind):
        fields = get_type_hints(kind).items()
        return f"({', '.join(f'{name}: {_type_text(hint)}' for name, hint in fields)})"
    if _is_word(kind):
        return f"({' | '.join(kind)})"
    if inner := get_args(kind):
        return f"{get_origin(kind)}[{', '.join(map(_type_text, inner))}]"
    return str(kind)


WIRE = _LENGTH.pack(zlib.crc32((_signature(FromMember) + "\n" + _signature(ToMember)).encode()))
FROM_MEMBER: Codec[FromMember] = Codec(FromMember)
TO_MEMBER: Codec[ToMember] = Codec(ToMember)
