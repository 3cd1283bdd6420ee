"""From the name of a data set to samples that a network can be trained on.

Loading reads files that are here and never fetches, so a worker cannot start a download. Files are
in the idx format of MNIST and its kin: a header that tells the shape, then the values.

    00 00 | type | num_dims | size of each dim, 4 bytes big-endian | values, last dim fastest
           0x08 = unsigned byte

It must not know which network it is for.
"""

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError
from .arrays import ArrayDataset, Splits
from .catalogue import Bytes, DataFile, DataSet, Located, find, locate, looked_in, read_checked
from .fetch import choose, remedy
from .sources import Outside

_UNSIGNED_BYTE = 0x08
_OTHER_TYPES = {
    0x09: "signed bytes",
    0x0B: "16-bit integers",
    0x0C: "32-bit integers",
    0x0D: "32-bit floats",
    0x0E: "64-bit floats",
}


def load(name: str, *, side_px: int | None = None, env: Mapping[str, str] | None = None) -> Splits:
    """Training and test images of a data set that is here: float32 (1, side, side) in [0, 1].

    Args:
        side_px: scale the images to this height and width (bilinear); default as they are.

    Raises:
        ConfigError: the data set is not here, incomplete, damaged or not what it claims to be.
    """
    data_set = find(name)
    located = locate(data_set, env)
    if located is None:
        folders = ", ".join(map(str, looked_in(data_set, env)))
        raise ConfigError(f"{name} is not here (looked in {folders}); {remedy(data_set)}")
    if located.missing:
        raise ConfigError(
            f"{name} in {located.folder} is incomplete: no {', '.join(located.missing)}; "
            f"{remedy(data_set)}"
        )
    train = _samples(data_set, located, data_set.train_images, data_set.train_labels, side_px)
    test = _samples(data_set, located, data_set.test_images, data_set.test_labels, side_px)
    scaled = (
        f", scaled up to {side_px}x{side_px}" if side_px not in (None, data_set.side_px) else ""
    )
    return Splits(
        train=train,
        test=test,
        source=f"{data_set.title} ({len(train):,} + {len(test):,} images{scaled})",
        classes=data_set.classes,
    )


def load_or_fallback(
    name: str,
    *,
    fetch_missing: bool,
    side_px: int | None = None,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
) -> tuple[Splits, str]:
    """``choose`` and ``load`` in one: the samples, and the line that says what stands in, or ""."""
    choice = choose(name, fetch_missing=fetch_missing, env=env, outside=outside)
    return load(choice.name, side_px=side_px, env=env), choice.note


def _samples(
    data_set: DataSet,
    located: Located,
    images_file: DataFile,
    labels_file: DataFile,
    side_px: int | None,
) -> ArrayDataset:
    images = _values(data_set, located, images_file).unsqueeze(1)
    labels = _values(data_set, located, labels_file).to(torch.int64)
    scale = 1 / data_set.max_value
    if side_px is None or side_px == data_set.side_px:
        return ArrayDataset(images, labels, scale=scale)
    size = (side_px, side_px)
    floats = torch.nn.functional.interpolate(images * scale, size=size, mode="bilinear")
    return ArrayDataset(floats, labels)


def _values(data_set: DataSet, located: Located, file: DataFile) -> Tensor:
    path = located.paths[file.name]
    return torch.from_numpy(parse_idx(read_checked(path, file, remedy(data_set)), str(path)))


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
