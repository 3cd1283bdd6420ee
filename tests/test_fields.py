"""Each value is checked for its type or refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from paceline.fields import (
    boolean,
    by_name,
    convert,
    count,
    integer,
    many,
    number,
    real,
    record,
    text,
)


@pytest.mark.parametrize(
    ("take", "wrong"),
    [
        (integer, True), (integer, 1.0), (integer, 1 << 63), (count, -1), (real, "1"),
        (real, math.inf), (real, True), (text, 1), (boolean, 1), (many(count), (1,)),
        (many(count), [1, -1]), (by_name(real), [1.0]), (by_name(real), {"a": None}),
    ],
)  # fmt: skip
def test_json_of_the_wrong_type_is_refused(take: Callable[[Any], Any], wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        take(wrong)


def test_json_of_the_right_type_is_accepted() -> None:
    assert many(count)([1, 2]) == (1, 2)
    assert by_name(real)({"a": 1}) == {"a": 1.0}
    assert math.isnan(number(None))


@dataclass
class Size:
    """A record with a default."""

    name: str
    num: int = 1


def test_record_is_read_from_its_fields() -> None:
    assert record(Size, {"name": "a"}) == Size("a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a", "nun": 2}, "unknown field 'nun'; known are name, num"),
        ({"name": 1}, "name is 1"), ({"num": 2}, "name"), ([], "not an object"),
    ],
)  # fmt: skip
def test_record_with_a_wrong_field_is_refused_by_name(fields: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        record(Size, fields)


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        ("4", int | None, 4), (None, int | None, None), ("yes", bool, True), ("1e-3", float, 1e-3),
        ("1=5x 2=3x", tuple[str, ...], ("1=5x", "2=3x")), ("a", Literal["a", "b"], "a"),
    ],
)  # fmt: skip
def test_setting_is_converted(value: object, kind: Any, found: object) -> None:
    assert convert(value, kind) == found


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("x", int, "a whole number"), (True, int, "a whole number"), (None, float, "a number"),
        ("maybe", bool, "true or false"), ("c", Literal["a", "b"], "one of a, b"),
        ("a\0", str, "a text in UTF-8"), (3, tuple[str, ...], "a text or a list of texts"),
    ],
)  # fmt: skip
def test_setting_of_the_wrong_type_is_refused_with_the_expected_one(
    value: object, kind: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        convert(value, kind)
