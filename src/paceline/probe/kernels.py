"""`kernels.cpp`, compiled for this processor, and its functions with types.

Each probe compiles it again, which takes a second, into a temporary folder that only this user can
write to: no library left by somebody else is ever loaded. Python's other threads run while one of
its functions runs.
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
    """The operation on each word of an array; STREAM counts bytes read and written."""

    READ = 0
    COPY = 1
    TRIAD = 2

    @property
    def arrays(self) -> int:
        """Number of arrays that it reads or writes."""
        return self.value + 1


class VectorFormat(IntEnum):
    """Number format of a vector multiply-add."""

    FP32 = 0
    FP64 = 1
    BF16 = 2
    FP16 = 3
    INT8 = 4


class BlocksRead(NamedTuple):
    """Reads of blocks of a file at random offsets.

    Attributes:
        per_s: reads a second, all threads together.
        each_s: seconds of the single reads of one thread.
    """

    per_s: float
    each_s: list[float]


class WayTimes(NamedTuple):
    """Seconds one way of a word and of a buffer, one value for each repeat."""

    word_s: list[float]
    buffer_s: list[float]


@contextmanager
def compiled() -> Iterator["Kernels"]:
    """Compile the kernels and yield them; the library is removed after the block.

    Raises:
        ConfigError: there is no compiler, or compilation fails.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        library = Path(folder) / "kernels.so"
        error_line = ""
        for target_flags in (["-march=native"], ["-mcpu=native"], []):
            command = [compiler, *_FLAGS, *target_flags, str(_SOURCE), "-o", str(library)]
            try:
                process = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_MOST_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigError(
                    f"{compiler} cannot compile the probe's kernels: {error}"
                ) from None
            if process.returncode == 0:
                yield Kernels(ctypes.CDLL(str(library)))
                return
            error_line = next(
                (line for line in process.stderr.splitlines() if "error" in line), "it failed"
            )
        raise ConfigError(f"{compiler} cannot compile the probe's kernels: {error_line.strip()}")


def find_compiler() -> str:
    """Return the C++ compiler named by ``CXX``, or the first one installed.

    Raises:
        ConfigError: there is none.
    """
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    compiler = next((path for name in wanted if (path := shutil.which(name))), None)
    if compiler is None:
        raise ConfigError(
            f"no C++ compiler: {', '.join(wanted)} is not on PATH; install g++ "
            "(Debian: apt install g++) or set CXX"
        )
    return compiler


class Kernels:
    """The compiled functions; `kernels.cpp` describes each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.read_file.restype = library.write_file.restype = ctypes.c_double
        library.read_blocks.restype = ctypes.c_long

    def chase(
        self, num_bytes: int, steps: int, *, rings: int = 1, is_huge: bool = True, repeats: int = 3
    ) -> list[float]:
        """Return seconds for each load. MemoryError: too little memory."""
        seconds = (ctypes.c_double * repeats)()
        self._check(self._library.chase(
            ctypes.c_size_t(num_bytes), ctypes.c_size_t(steps), rings, int(is_huge), repeats,
            seconds,
        ))  # fmt: skip
        return list(seconds)

    def stream(self, what: Pass, num_bytes: int, threads: int, repeats: int) -> list[float]:
        """Return bytes a second, as STREAM counts them. MemoryError: too little memory."""
        seconds = (ctypes.c_double * repeats)()
        self._check(
            self._library.stream(int(what), ctypes.c_size_t(num_bytes), threads, repeats, seconds)
        )
        moved = num_bytes // (64 * threads) * 64 * threads * what.arrays
        return [moved / duration_s for duration_s in seconds]

    def arithmetic(
        self, kind: VectorFormat, rounds: int, threads: int, repeats: int
    ) -> list[float] | None:
        """Return operations a second; None: this processor has no vector instruction for it."""
        per_s = (ctypes.c_double * repeats)()
        if self._library.arithmetic(int(kind), ctypes.c_long(rounds), threads, repeats, per_s):
            return None
        return list(per_s)

    def vector_bits(self) -> int:
        """Return the width of the vectors used."""
        return int(self._library.vector_bits())

    def read_blocks(
        self, fd: int, file_bytes: int, block_bytes: int, threads: int, for_s: float
    ) -> BlocksRead:
        """Read blocks at random offsets. OSError: they cannot be read."""
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
        """Return bytes read a second. OSError: the file cannot be read."""
        took_s = float(self._library.read_file(
            fd, ctypes.c_size_t(file_bytes), ctypes.c_size_t(block_bytes), threads
        ))  # fmt: skip
        if took_s < 0:
            raise OSError("the file cannot be read")
        return file_bytes / took_s

    def write_file(self, fd: int, file_bytes: int, block_bytes: int) -> float:
        """Return bytes written to disk a second. OSError: they cannot be written."""
        took_s = float(self._library.write_file(
            fd, ctypes.c_size_t(file_bytes), ctypes.c_size_t(block_bytes)
        ))  # fmt: skip
        if took_s < 0:
            raise OSError("the file cannot be written")
        return file_bytes / took_s

    def hand_over(
        self, sender: int, receiver: int, num_bytes: int, *, words: int = 2000, repeats: int = 5
    ) -> WayTimes:
        """Measure from one core to another through memory. MemoryError: too little memory."""
        word_s, buffer_s = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        self._check(self._library.hand_over(
            sender, receiver, ctypes.c_size_t(num_bytes), ctypes.c_long(words), repeats, word_s,
            buffer_s,
        ))  # fmt: skip
        return WayTimes(list(word_s), list(buffer_s))

    def ping(self, fd: int, num_bytes: int, *, each_s: float = 0.05, repeats: int = 5) -> WayTimes:
        """Send bytes over a connected socket, one at a time, for ``each_s`` seconds a repeat.

        Raises:
            ConnectionError: the other side closed the connection, or was silent for too long.
        """
        word_s, buffer_s = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        if self._library.ping(
            fd, ctypes.c_double(each_s), ctypes.c_size_t(num_bytes), repeats, word_s, buffer_s
        ):
            raise ConnectionError("the other side closed the connection, or was silent too long")
        return WayTimes(list(word_s), list(buffer_s))

    def answer(self, fd: int) -> None:
        """Answer ``ping`` until the other side closes the connection, or is silent too long."""
        self._library.answer(fd)

    def _check(self, code: int) -> None:
        if code:
            raise MemoryError("there is too little memory for the probe")
