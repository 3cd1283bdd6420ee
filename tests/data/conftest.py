"""A data set of six images, with correct checksums, wherever a test puts it."""

import gzip
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.data.catalogue import CATALOGUE, DataFile, DataSet, Package


def encode_idx(values: NDArray[np.uint8]) -> bytes:
    """The writer that belongs to ``parse_idx``; the package itself only reads."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.fixture
def encode() -> Callable[[NDArray[np.uint8]], bytes]:
    return encode_idx


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """The data set, its files' true bytes, and the folder of data sets that a fetch writes to."""

    data_set: DataSet
    contents: dict[str, bytes]
    root: Path
    env: dict[str, str]

    def put(self, folder: Path, *, compress: bool = False) -> None:
        """Lay the files down, plain or compressed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents.items():
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    images = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
    labels = np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    contents = {
        "train-images": encode_idx(images[:4]),
        "train-labels": encode_idx(labels[:4]),
        "test-images": encode_idx(images[4:]),
        "test-labels": encode_idx(labels[4:]),
    }

    def described(name: str) -> DataFile:
        content = contents[name]
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return DataFile(name=name, md5=md5, num_bytes=len(content))

    data_set = DataSet(
        name="tiny",
        title="Tiny",
        licence="none",
        train_images=described("train-images"),
        train_labels=described("train-labels"),
        test_images=described("test-images"),
        test_labels=described("test-labels"),
        num_train=4,
        num_test=2,
        side_px=4,
        max_value=255,
        classes=("a", "b", "c"),
        folders=("tiny", "Tiny/raw"),
        system_folders=(tmp_path / "system",),
        addresses=("https://first.invalid/", "https://second.invalid/"),
        debian=Package(name="dataset-tiny", folder="usr/share/tiny"),
        npm=Package(name="tiny-data@1.0", folder="package/data"),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", data_set)
    root = tmp_path / "data"
    env = {"PACELINE_DATA": str(root), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return Tiny(data_set=data_set, contents=contents, root=root, env=env)
