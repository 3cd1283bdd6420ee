"""`kernels.cpp`, compiled for the processor at hand, and its functions with types.

It is compiled anew for each probe, which takes a second, into a folder that only this user can
write to and that is gone with the probe: code that is loaded is never found lying somewhere. While
a function of it runs, Python's other threads run, too.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
_MOST_S = 120.0
_MOST_LATENCIES = 100_000


class Pass(IntEnum):
    """What is done with each word of an array; STREAM counts what is read and written."""

    READ = 0
    COPY = 1
    TRIAD = 2

    @property
    def arrays(self) -> int:
        """How many arrays that moves."""
        return self.value + 1


class VectorFormat(IntEnum):
    """Of the numbers that a vector instruction multiplies and adds."""

    FP32 = 0
    FP64 = 1
    BF16 = 2
    FP16 = 3
    INT8 = 4


class BlocksRead(NamedTuple):
    """Blocks of a file, read at random places.

    Attributes:
        per_s: of all threads together.
        each_s: seconds of single ones, of one thread.
    """

    per_s: float
    each_s: list[float]


class WayTimes(NamedTuple):
    """From one end to another: seconds of a word, and of a buffer, a repeat each."""

    word_s: list[float]
    buffer_s: list[float]


@contextmanager
def compiled() -> Iterator["Kernels"]:
    """The functions, as long as the block lasts.

    Raises:
        ConfigError: there is no compiler, or it cannot compile them.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        library = Path(folder) / "kernels.so"
        failed = ""
        for tuned in (["-march=native"], ["-mcpu=native"], []):
            command = [compiler, *_FLAGS, *tuned, str(_SOURCE), "-o", str(library)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_MOST_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigError(
                    f"{compiler} cannot compile the probe's kernels: {error}"
                ) from None
            if done.returncode == 0:
                yield Kernels(ctypes.CDLL(str(library)))
                return
            failed = next((one for one in done.stderr.splitlines() if "error" in one), "it failed")
        raise ConfigError(f"{compiler} cannot compile the probe's kernels: {failed.strip()}")


def find_compiler() -> str:
    """The C++ compiler that ``CXX`` names, or the first that is here.

    Raises:
        ConfigError: there is none.
    """
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    found = next((path for name in wanted if (path := shutil.which(name))), None)
    if found is None:
        raise ConfigError(
            f"no C++ compiler: {', '.join(wanted)} is not on the path; install g++ "
            "(Debian: apt install g++) or set CXX"
        )
    return found


class Kernels:
    """The compiled functions; each is described where it stands, in `kernels.cpp`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.read_file.restype = library.write_file.restype = ctypes.c_double
        library.read_blocks.restype = ctypes.c_long

    def chase(
        self, num_bytes: int, steps: int, *, rings: int = 1, is_huge: bool = True, repeats: int = 3
    ) -> list[float]:
        """Seconds a load. MemoryError: there is not so much memory."""
        seconds = (ctypes.c_double * repeats)()
        self._check(self._library.chase(
            ctypes.c_size_t(num_bytes), ctypes.c_size_t(steps), rings, int(is_huge), repeats,
            seconds,
        ))  # fmt: skip
        return list(seconds)

    def stream(self, what: Pass, num_bytes: int, threads: int, repeats: int) -> list[float]:
        """Bytes a second, as STREAM counts them. MemoryError: there is not so much memory."""
        seconds = (ctypes.c_double * repeats)()
        self._check(
            self._library.stream(int(what), ctypes.c_size_t(num_bytes), threads, repeats, seconds)
        )
        moved = num_bytes // (64 * threads) * 64 * threads * what.arrays
        return [moved / one for one in seconds]

    def arithmetic(
        self, kind: VectorFormat, rounds: int, threads: int, repeats: int
    ) -> list[float] | None:
        """Operations a second; None: this processor has no vector instruction for it."""
        per_s = (ctypes.c_double * repeats)()
        if self._library.arithmetic(int(kind), ctypes.c_long(rounds), threads, repeats, per_s):
            return None
        return list(per_s)

    def vector_bits(self) -> int:
        """Of the vectors that were used."""
        return int(self._library.vector_bits())

    def read_blocks(
        self, fd: int, file_bytes: int, block_bytes: int, threads: int, for_s: float
    ) -> BlocksRead:
        """Blocks at random places. OSError: they cannot be read."""
        took_s, num = ctypes.c_double(), ctypes.c_long()
        each_s = (ctypes.c_double * _MOST_LATENCIES)()
        count = self._library.read_blocks(
            fd, ctypes.c_size_t(file_bytes), ctypes.c_size_t(block_bytes), threads,
            ctypes.c_double(for_s), ctypes.byref(took_s), each_s, ctypes.c_long(_MOST_LATENCIES),
            ctypes.byref(num),
        )  # fmt: skip
        if count <= 0:
            raise OSError("blocks of the file cannot be read")
        return BlocksRead(per_s=count / took_s.value, each_s=each_s[: num.value])

    def read_file(self, fd: int, file_bytes: int, block_bytes: int, threads: int) -> float:
        """Bytes a second. OSError: it cannot be read."""
        took_s = float(self._library.read_file(
            fd, ctypes.c_size_t(file_bytes), ctypes.c_size_t(block_bytes), threads
        ))  # fmt: skip
        if took_s < 0:
            raise OSError("the file cannot be read")
        return file_bytes / took_s

    def write_file(self, fd: int, file_bytes: int, block_bytes: int) -> float:
        """Bytes a second until they are on the disk. OSError: they cannot be written."""
        took_s = float(self._library.write_file(
            fd, ctypes.c_size_t(file_bytes), ctypes.c_size_t(block_bytes)
        ))  # fmt: skip
        if took_s < 0:
            raise OSError("the file cannot be written")
        return file_bytes / took_s

    def hand_over(
        self, one: int, other: int, num_bytes: int, *, words: int = 2000, repeats: int = 5
    ) -> WayTimes:
        """From one core to another through memory. MemoryError: there is not so much memory."""
        word_s, buffer_s = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        self._check(self._library.hand_over(
            one, other, ctypes.c_size_t(num_bytes), ctypes.c_long(words), repeats, word_s, buffer_s
        ))  # fmt: skip
        return WayTimes(list(word_s), list(buffer_s))

    def ping(self, fd: int, num_bytes: int, *, each_s: float = 0.05, repeats: int = 5) -> WayTimes:
        """Over a connected socket, bytes one after the other for ``each_s`` seconds a repeat.

        Raises:
            ConnectionError: the other side has gone.
        """
        word_s, buffer_s = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        if self._library.ping(
            fd, ctypes.c_double(each_s), ctypes.c_size_t(num_bytes), repeats, word_s, buffer_s
        ):
            raise ConnectionError("the other side has gone")
        return WayTimes(list(word_s), list(buffer_s))

    def answer(self, fd: int) -> None:
        """The other side of ``ping``, until the one that asks has gone."""
        self._library.answer(fd)

    def _check(self, code: int) -> None:
        if code:
            raise MemoryError("there is too little memory for the probe")
