"""Every message is encoded and decoded; other bytes give one named error, whatever they are."""

import contextlib
import random
import types
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.events import Grant, Lease, Ticket
from paceline.passes import ScriptPlace
from paceline.wire.codec import FROM_MEMBER, TO_MEMBER, WIRE, Codec, WireError, _signature
from paceline.wire.messages import (
    UNCLIPPED,
    Add,
    Clocks,
    Done,
    Entry,
    Extended,
    Failed,
    FromMember,
    LogValues,
    Note,
    Push,
    Row,
    Stop,
    Told,
    ToMember,
    Whose,
)

WORDS = st.integers(-(2**63), 2**63 - 1)
DIRECTIONS = [FROM_MEMBER, TO_MEMBER]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type can have."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, float, bool, str):
        plain = {int: WORDS, float: st.floats(allow_nan=False), bool: st.booleans(), str: st.text()}
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if one is type(None) else values(one) for one in inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=4)
    if origin is tuple and inner[-1] is ...:
        return st.lists(values(inner[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


@pytest.mark.parametrize("codec", DIRECTIONS, ids=["from a member", "to a member"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_message_is_decoded_as_it_was_sent(codec: Codec[Any], data: st.DataObject) -> None:
    kinds = [data.draw(st.sampled_from(codec.kinds)) for _ in range(data.draw(st.integers(1, 3)))]
    sent = [data.draw(values(kind)) for kind in kinds]
    heard = codec.decode(codec.encode(sent))
    assert heard == sent
    assert [type(message) for message in heard] == kinds
    assert repr(heard) == repr(sent)  # inner types, too


@pytest.mark.parametrize("kind", [*FROM_MEMBER.kinds, *TO_MEMBER.kinds])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_truncated_or_damaged_message_is_refused(kind: Any, data: st.DataObject) -> None:
    codec: Codec[Any] = FROM_MEMBER if kind in FROM_MEMBER.kinds else TO_MEMBER
    frame = codec.encode([data.draw(values(kind))])
    for length in range(4, len(frame)):
        with pytest.raises(WireError, match="damaged") if length > 4 else pytest.raises(_Nothing):
            codec.decode(frame[:length])
            raise _Nothing
    rng = random.Random(len(frame))
    for _ in range(50):
        changed = bytearray(frame)
        changed[rng.randrange(4, len(frame))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(WireError):  # it may be another message
            codec.decode(bytes(changed))


class _Nothing(Exception):
    """Nothing was wrong: an empty frame is no fault."""


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_messages_or_refused(data: bytes) -> None:
    for codec in DIRECTIONS:
        with contextlib.suppress(WireError):
            codec.decode(WIRE + data)


def test_a_length_of_millions_allocates_no_memory() -> None:
    frame = FROM_MEMBER.encode([LogValues({})])
    with pytest.raises(WireError, match="truncated"):
        FROM_MEMBER.decode(frame[:-8] + b"\xff\xff\xff\x7f" + frame[-4:])


def test_another_version_is_refused_in_one_sentence() -> None:
    frame = FROM_MEMBER.encode([Done()])
    other = bytes([frame[0] ^ 1]) + frame[1:]
    with pytest.raises(WireError, match="the same version of Paceline in all processes"):
        FROM_MEMBER.decode(other)


@pytest.mark.parametrize("message", [Stop("now"), Note(3), Add(1, 2, None, 1.0, True)])  # type: ignore[arg-type]
def test_a_field_of_the_wrong_type_is_not_sent(message: Any) -> None:
    codec: Codec[Any] = FROM_MEMBER if type(message) in FROM_MEMBER.kinds else TO_MEMBER
    with pytest.raises(WireError, match="cannot be sent"):
        codec.encode([message])


def test_frequent_messages_are_small() -> None:
    """A push and a grant, with their framing, take about two cache lines each."""
    push = Push(7, 6, Told(32, 0.5, 0, 32.0), Clocks(0.1, 0.2, 0.3), 1 << 33, UNCLIPPED)
    grant = Grant(Ticket(1, 7, 6), (Lease(3, 0, 96, 128),))
    assert len(FROM_MEMBER.encode([push])) <= 136
    assert len(TO_MEMBER.encode([grant])) <= 128


def test_the_checksum_covers_the_fields_of_nested_messages() -> None:
    """Another order of a row's fields is another format: its bytes would be misread."""
    text = _signature(FromMember) + _signature(ToMember)
    for kind in (Row, Entry, Lease, Told, Clocks, Ticket, ScriptPlace):
        fields = ", ".join(f"{name}: " for name in kind._fields[:1])
        assert f"({fields}" in text, f"{kind.__name__} is not in the checksum"
    assert text.count("over_s: <class 'float'>") == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda frame: WIRE + b"\xfe", "unknown message type 254"),
        (lambda frame: frame[:-1] + b"\x07", "neither present nor absent"),
    ],
)
def test_a_value_that_no_type_allows_is_damage(damage: Any, words: str) -> None:
    frame = TO_MEMBER.encode([Extended(None)])
    with pytest.raises(WireError, match=words):
        TO_MEMBER.decode(damage(frame))


def test_a_repeated_name_is_damage() -> None:
    frame = FROM_MEMBER.encode([LogValues({"a": 1.0, "b": 2.0})])
    with pytest.raises(WireError, match="a name occurs twice"):
        FROM_MEMBER.decode(frame.replace(b"b", b"a"))


def test_an_unknown_enum_value_is_damage() -> None:
    frame = FROM_MEMBER.encode([Failed("oh no", Whose.USER)])
    assert FROM_MEMBER.decode(frame) == [Failed("oh no", Whose.USER)]
    with pytest.raises(WireError, match="'yes' is not a valid Whose"):
        FROM_MEMBER.decode(frame.replace(b"you", b"yes"))
    assert "whose: (worker | you | all)" in _signature(FromMember)


def test_an_object_that_is_not_a_message_cannot_be_sent() -> None:
    for odd in ("text", Push(0, 0, (1,), Clocks(), 0, UNCLIPPED)):  # type: ignore[arg-type]
        with pytest.raises(WireError, match="cannot be sent"):
            FROM_MEMBER.encode([odd])  # type: ignore[list-item]
