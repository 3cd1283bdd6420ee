"""Values out of JSON, each of the type that it must have: what a file says is not taken on trust.

    count(fields["samples"])    many(count)(fields["stops"])    by_name(real)(fields["values"])

Each raises TypeError or ValueError where the value is another; who reads the file says which file
it was. This module must not know files, nor what the values mean.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

T = TypeVar("T")
LARGEST = (1 << 63) - 1


def integer(value: Any) -> int:
    """A whole number that 64 bits hold."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.50} is no whole number")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError("a whole number is too large")
    return value


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
        raise TypeError(f"{value!r:.50} is no number")
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return float(value)


def number(value: Any) -> float:
    """A number, or null for one that is not finite, which JSON cannot say: nan."""
    return math.nan if value is None else real(value)


def text(value: Any) -> str:
    """A text."""
    if type(value) is not str:
        raise TypeError(f"{value!r:.50} is no text")
    return value


def boolean(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise TypeError(f"{value!r:.50} is neither true nor false")
    return value


def many(take: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A list of such values, as a tuple."""

    def read(value: Any) -> tuple[T, ...]:
        if type(value) is not list:
            raise TypeError(f"{value!r:.50} is no list")
        return tuple(map(take, value))

    return read


def by_name(take: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """An object of such values."""

    def read(value: Any) -> dict[str, T]:
        if type(value) is not dict:
            raise TypeError(f"{value!r:.50} is no object")
        return {name: take(one) for name, one in value.items()}

    return read


def record(cls: type[T], value: Any) -> T:
    """A dataclass of texts, numbers and booleans, from an object with its fields.

    Fields with a default may be missing; one that the class has not is refused.
    """
    hints = get_type_hints(cls)
    given = by_name(lambda one: one)(value)
    for name, one in given.items():
        kinds = get_args(hints[name]) or (hints[name],)
        if type(one) is int and float in kinds:
            real(one)
        elif type(one) not in kinds:
            raise TypeError(f"{name} is {one!r:.50}")
        elif type(one) is int or type(one) is float:
            real(one)
    return cls(**given)


def refuse_constant(word: str) -> NoReturn:
    """For ``json.loads(parse_constant=...)``: NaN and Infinity are no JSON."""
    raise ValueError(f"{word} is no number of JSON")
