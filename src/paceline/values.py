"""Values of settings: a text, or what a file held, as the type that a setting has.

A variable of the environment is always text, a file has types of its own and a call has Python's;
all of them become the same values here. This module must not know which settings there are.
"""

import typing
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias

Value: TypeAlias = str | int | float | bool | tuple[str, ...] | None

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def convert(value: object, annotation: Any) -> Value:
    """``value`` as the type that ``annotation`` says: a scalar, a tuple, a Literal, or None.

    Raises:
        ValueError: it cannot be; the message says what was wanted: ``a whole number``.

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
        choices = typing.get_args(kind)
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
    (kind,) = (kind for kind in typing.get_args(annotation) if kind is not NoneType)
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
    return tuple(_to_str(one) for one in value)


_CONVERTERS: Mapping[Any, tuple[Callable[[object], Value], str]] = {
    bool: (_to_bool, "true or false"),
    int: (_to_int, "a whole number"),
    float: (_to_float, "a number"),
    str: (_to_str, "a text in UTF-8"),
    tuple: (_to_strings, "a text or a list of texts"),
}
