"""The idx format of MNIST and its kin: a header that tells the shape, then the values.

    00 00 | type | num_dims | size of each dim, 4 bytes big-endian | values, last dim fastest
           0x08 = unsigned byte

It must not know where the bytes came from; it is told a name for its messages.
"""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .checked import Bytes

_UNSIGNED_BYTE = 0x08
_OTHER_TYPES = {
    0x09: "signed bytes",
    0x0B: "16-bit integers",
    0x0C: "32-bit integers",
    0x0D: "32-bit floats",
    0x0E: "64-bit floats",
}


def parse_idx(content: Bytes | bytes, origin: str) -> NDArray[np.uint8]:
    """The values of an idx file of unsigned bytes, in its own shape, sharing ``content``'s memory.

    Args:
        origin: where the bytes came from, for messages.

    Raises:
        ConfigError: no idx header, another type of value, or a size that the header denies.
    """
    shape = _shape(content, origin)
    header_bytes = 4 + 4 * len(shape)
    wanted_bytes = header_bytes + math.prod(shape)
    if len(content) != wanted_bytes:
        sizes = " x ".join(map(str, shape))
        raise ConfigError(
            f"{origin} is cut or damaged: its header says {sizes} values, "
            f"{wanted_bytes:,} bytes in all, but it has {len(content):,}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _shape(content: Bytes | bytes, origin: str) -> tuple[int, ...]:
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ConfigError(
            f"{origin} is no idx file: it must begin with the bytes 00 00, "
            f"found {bytes(content[:4]).hex(' ') or 'nothing'}"
        )
    value_type, num_dims = content[2], content[3]
    if value_type != _UNSIGNED_BYTE:
        found = _OTHER_TYPES.get(value_type, "no type of the format")
        raise ConfigError(
            f"{origin} must hold unsigned bytes (type 0x08), found type "
            f"0x{value_type:02x} ({found})"
        )
    if num_dims < 1 or len(content) < 4 + 4 * num_dims:
        raise ConfigError(
            f"{origin} is cut inside its header: it names {num_dims} dimensions and has "
            f"{len(content)} bytes"
        )
    return struct.unpack(f">{num_dims}I", bytes(content[4 : 4 + 4 * num_dims]))
