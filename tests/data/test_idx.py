"""The idx format: what is written is read, and a wrong header is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from paceline.data.arrays import parse_idx
from paceline.errors import ConfigError


def _encode(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@given(arrays(np.uint8, array_shapes(max_dims=4, max_side=5)))
def test_a_written_array_is_read_again(values: np.ndarray) -> None:
    assert np.array_equal(parse_idx(_encode(values), "a test"), values)


@given(st.binary(max_size=64))
def test_any_bytes_give_an_array_or_a_clear_error(content: bytes) -> None:
    try:
        values = parse_idx(content, "some bytes")
    except ConfigError:
        return
    assert 4 + 4 * values.ndim + values.size == len(content)


@given(st.integers(0, 31))
def test_a_file_truncated_anywhere_is_refused(keep_bytes: int) -> None:
    content = _encode(np.zeros((4, 4), dtype=np.uint8) + 7)[:keep_bytes]
    assert keep_bytes < 28 or len(content) == 28
    if keep_bytes < 28:
        with pytest.raises(ConfigError, match=r"^cut\.idx is "):
            parse_idx(content, "cut.idx")


def test_a_file_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its header says 2 x 3 values, 18 bytes.* has 19"):
        parse_idx(_encode(np.zeros((2, 3), dtype=np.uint8)) + b"!", "long.idx")


def test_other_value_types_are_named() -> None:
    content = struct.pack(">HBBI", 0, 0x0D, 1, 1) + bytes(4)
    with pytest.raises(ConfigError, match=r"unsigned bytes.*0x0d \(32-bit floats\)"):
        parse_idx(content, "floats.idx")


def test_a_file_of_another_format_is_refused_with_its_first_bytes() -> None:
    with pytest.raises(ConfigError, match=r"not an idx file.*1f 8b 08 00"):
        parse_idx(b"\x1f\x8b\x08\x00", "still.gz")
