"""Checked conversion of values from JSON and settings to their types.

    JSON        count(fields["samples"])    many(count)(fields["stops"])    by_name(real)(...)
    a setting   convert("4", int | None)    text from the environment, other types from files
                                            and calls
    name:number read_name("k-sync:3", ...)  a member of a family, and its numbers

Each raises TypeError or ValueError for any other value, and the caller adds where it came from;
`read_name` raises ConfigError with the allowed forms. Above 300 lines with all three. This
module must not know files, nor which settings there are or what the values mean.
"""

import math
import operator
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
)

from .errors import ConfigError, unknown

T = TypeVar("T")
Value: TypeAlias = str | int | float | bool | tuple[str, ...] | None
LARGEST = (1 << 63) - 1
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def integer(value: Any) -> int:
    """Check a whole number of at most 64 bits."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.50} is not a whole number")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError("a whole number is too large")
    return value


def whole(value: Any) -> int | None:
    """Return a whole number from a script, also NumPy's; None if it is not one."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def count(value: Any) -> int:
    """A whole number, 0 or more."""
    if integer(value) < 0:
        raise ValueError(f"{value} is less than 0")
    return int(value)


def real(value: Any) -> float:
    """A finite number."""
    if type(value) is int:
        value = integer(value)
    elif type(value) is not float:
        raise TypeError(f"{value!r:.50} is not a number")
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return float(value)


def number(value: Any) -> float:
    """A finite number, or null as nan: JSON has no numbers that are not finite."""
    return math.nan if value is None else real(value)


def text(value: Any) -> str:
    """A text."""
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is not a text")
    return value


def boolean(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise TypeError(f"{value!r:.50} is neither true nor false")
    return value


def many(take: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """Return a function that reads a list of such values as a tuple."""

    def read(value: Any) -> tuple[T, ...]:
        if type(value) is not list:
            raise TypeError(f"{value!r:.50} is not a list")
        return tuple(map(take, value))

    return read


def by_name(take: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """Return a function that reads an object of such values."""

    def read(value: Any) -> dict[str, T]:
        if type(value) is not dict:
            raise TypeError(f"{value!r:.50} is not an object")
        return {name: take(item) for name, item in value.items()}

    return read


def record(cls: type[T], value: Any) -> T:
    """Read a dataclass of texts, numbers and booleans from an object with its fields.

    Fields with a default may be missing.

    Raises:
        TypeError: a value has another type, or a field is missing.
        ValueError: a field is unknown; the message lists the known ones.
    """
    hints = get_type_hints(cls)
    fields = by_name(lambda item: item)(value)
    for name, item in fields.items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r:.50}; known are {', '.join(hints)}")
        kinds = get_args(hints[name]) or (hints[name],)
        if type(item) is int and float in kinds:
            real(item)
        elif type(item) not in kinds:
            raise TypeError(f"{name} is {item!r:.50}")
        elif type(item) is int or type(item) is float:
            real(item)
    return cls(**fields)


def refuse_constant(word: str) -> NoReturn:
    """For ``json.loads(parse_constant=...)``: NaN and Infinity are not JSON."""
    raise ValueError(f"{word} is not a JSON number")


def convert(value: object, annotation: Any) -> Value:
    """``value`` as the type that ``annotation`` says: a scalar, a tuple, a Literal, or None.

    Raises:
        ValueError: the value does not fit; the message is what was wanted: ``a whole number``.

    Example:
        >>> convert("4", int | None)
        4
        >>> convert("1=5x 2=3x", tuple[str, ...])
        ('1=5x', '2=3x')
    """
    kind, is_optional = _kind(annotation)
    if value is None and is_optional:
        return None
    if typing.get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ValueError(f"one of {', '.join(str(choice) for choice in choices)}")
        return typing.cast(Value, value)
    converter, words = _CONVERTERS[typing.get_origin(kind) or kind]
    try:
        return converter(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(words) from None


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type without None, and whether None is allowed."""
    if not isinstance(annotation, UnionType) and typing.get_origin(annotation) is not typing.Union:
        return annotation, False
    (kind,) = (kind for kind in get_args(annotation) if kind is not NoneType)
    return kind, True


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else ""
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def _to_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _to_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    if "\0" in value:
        raise ValueError
    value.encode()  # a name in another encoding could be written, and not be printed
    return value


def _to_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(map(_to_str, value.split()))
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(_to_str(item) for item in value)


_CONVERTERS: Mapping[Any, tuple[Callable[[object], Value], str]] = {
    bool: (_to_bool, "true or false"),
    int: (_to_int, "a whole number"),
    float: (_to_float, "a number"),
    str: (_to_str, "a text in UTF-8"),
    tuple: (_to_strings, "a text or a list of texts"),
}


class Length(NamedTuple):
    """A duration in epochs or in updates; the other one is 0."""

    epochs: float
    updates: int


def read_length(text: str | None) -> Length | None:
    """Read ``5ep`` (epochs) or ``200`` (updates); None stays None.

    Raises:
        ValueError: the text has another form, or is not above 0.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?)(ep)?", text.strip())
    number = float(match[1]) if match else 0.0
    if not match or not 0.0 < number <= LARGEST or not (match[2] or number.is_integer()):
        raise ValueError("5ep (epochs) or 200 (updates), above 0")
    return Length(number, 0) if match[2] else Length(0.0, int(number))


# -- a member of a family, by its name and its number ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NameNumber:
    """The meaning of a number in ``name:number`` of a family's member.

    Attributes:
        symbol: its letter in a message: ``K``.
        meaning: what it counts, as text.
        minimum: the smallest value that `shown` proposes.
        default: the value if it is left out; None: it is required.
        example: the value that a message proposes.
    """

    symbol: str
    meaning: str
    minimum: int
    default: int | None = None
    example: int = 1
    kinds: ClassVar[tuple[str, str]] = ("a whole number", "whole numbers")

    def read(self, text: str) -> int:
        """Return the number. ValueError: the text is not one."""
        return int(text)

    def write(self, value: int) -> str:
        return str(value)

    @property
    def shown(self) -> str:
        """What a message proposes."""
        return self.write(max(self.minimum, self.example))


def written(name: str, values: Sequence[object]) -> str:
    """Return a member with its numbers as text: ``k-sync:3``."""
    return f"{name}:{','.join(map(str, values))}" if values else name


def spelled(name: str, arguments: Sequence[NameNumber]) -> str:
    """Return the form of a member: ``ring``, ``hierarchical:G``, ``hub[:R]``."""
    text = written(name, [argument.symbol for argument in arguments])
    is_optional = any(argument.default is not None for argument in arguments)
    return f"{name}[{text.removeprefix(name)}]" if is_optional else text


def read_name(
    text: str,
    kind: str,
    members: Mapping[str, Sequence[NameNumber]],
    aliases: Mapping[str, str],
) -> tuple[str, tuple[int, ...]]:
    """Read ``name``, ``name:number`` or ``name:number,number``: the member and its numbers.

    Args:
        text: as the user wrote it.
        kind: the family, for messages: ``protocol``.
        members: name -> its numbers.
        aliases: alias -> name.

    Raises:
        ConfigError: the name is unknown, or its numbers are missing, not numbers, or not wanted.

    Example:
        >>> read_name("k-sync:3", "protocol", {"k-sync": [NameNumber(
        ...     symbol="K", meaning="pushes an update", minimum=1)]}, {})
        ('k-sync', (3,))
    """
    written_name, colon, numbers = text.strip().partition(":")
    name = aliases.get(written_name, written_name)
    if name not in members:
        raise unknown(kind, written_name, [*members, *aliases])
    arguments = members[name]
    if not arguments:
        if colon:
            raise ConfigError(f"{name} takes no number, got {text!r}; write {name}")
        return name, ()
    if not colon and arguments[0].default is not None:
        return name, ()
    try:
        pairs = zip(arguments, numbers.split(","), strict=True)
        return name, tuple(argument.read(number) for argument, number in pairs)
    except ValueError:
        raise _no_numbers(name, arguments, numbers, text) from None


def _no_numbers(name: str, arguments: Sequence[NameNumber], numbers: str, text: str) -> ConfigError:
    kind = arguments[0].kinds[len(arguments) > 1]
    meanings = " and ".join(f"{argument.symbol} ({argument.meaning})" for argument in arguments)
    return ConfigError(
        f"{spelled(name, arguments)} needs {kind} {meanings}, got "
        f"{repr(numbers) if numbers else 'nothing'} in {text!r}; write for example "
        f"{written(name, [argument.shown for argument in arguments])}"
    )
