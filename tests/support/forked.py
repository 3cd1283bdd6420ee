"""Python programs forked from one process that has imported torch and paceline.

    test process  --begins, once-->  forker.py  --fork-->  a program, another, ...
    a torchrun that was forked  --asks likewise-->  --fork-->  its ranks

A fresh program imports torch for two to three seconds before it does what a test checks. A forked
one has its own arguments, environment, folder and streams, runs as ``__main__`` and ends as under
python, by its exit code or signal. It does not cover the start, imports and shutdown of python:
tests of those, or the only test of a kind of start, run python itself. This file must not know
what a program does.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import IO, Any

NUMBER_BYTES = 12
"""Length of a number on the socket, in decimal digits."""

_START_S = 100.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For the process that forks: it must have a single thread."""

address = ""
"""The socket of the process that forks; inherited by its children."""
forkers: list["subprocess.Popen[bytes]"] = []
"""That process, if this one started it."""


class Forked:
    """A program with the interface of ``subprocess.Popen``.

    Args:
        words: the arguments of ``python``: a script and its arguments, or ``-m``, a module and
            its.
        cwd: its folder.
        env: its environment. The number of threads stays one, whatever this says, until the
            program sets another.
        preload: modules that it has from the start, which takes others no time either.
        stdout: a file, PIPE, or None: this process's own.
        stderr: likewise, or STDOUT.
    """

    def __init__(
        self,
        words: Sequence[object],
        *,
        cwd: object = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self.returncode: int | None = None
        self._said = {1: b"", 2: b""}
        self._pipes: dict[int, int] = {}
        """By the stream's number, those that are open."""
        request = {
            "words": [str(word) for word in words],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "has_session": start_new_session,
            "preload": [*preload],
        }
        out = self._stream(1, stdout)
        error = out if stderr == STDOUT else self._stream(2, stderr)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address or _begin())
        socket.send_fds(self._line, [b" "], [out, error])
        self._line.sendall(json.dumps(request).encode())
        self._line.shutdown(socket.SHUT_WR)
        self.pid = self._number()
        for one in {out, error} - {1, 2}:
            os.close(one)

    def _stream(self, number: int, given: IO[Any] | int | None) -> int:
        if given == PIPE:
            self._pipes[number], writes = os.pipe()
            return writes
        if given is None:
            return number
        return os.dup(given if isinstance(given, int) else given.fileno())

    def _number(self) -> int:
        return int(self._line.recv(NUMBER_BYTES))

    def poll(self) -> int | None:
        return self._await(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def communicate(self, timeout: float = 100.0) -> tuple[str, str]:
        """The output of the program and its children, once no process can write any more."""
        end_s = time.monotonic() + timeout
        while self._pipes:
            ready = wait(self._pipes.values(), max(end_s - time.monotonic(), 0))
            if not ready:
                raise TimeoutExpired("a forked program", timeout, self._said[1], self._said[2])
            for number in [one for one, pipe in self._pipes.items() if pipe in ready]:
                data = os.read(self._pipes[number], 1 << 16)
                self._said[number] += data
                if not data:
                    os.close(self._pipes.pop(number))
        self.wait(max(end_s - time.monotonic(), 1.0))
        return self._said[1].decode(), self._said[2].decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._line.settimeout(timeout)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                self.returncode = self._number()
                self._line.close()
        return self.returncode


def run(
    words: Sequence[object], *, timeout: float = 100.0, **settings: Any
) -> "subprocess.CompletedProcess[str]":
    """Fork a program and wait for its end, as ``subprocess.run(..., capture_output=True)``."""
    program = Forked(words, **{"stdout": PIPE, "stderr": PIPE, **settings})
    try:
        output = program.communicate(timeout)
    except TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess([*map(str, words)], program.wait(), *output)


def _begin() -> str:
    """Start the process that forks; it ends with this one."""
    global address
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forker.py")), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, **_ONE_THREAD},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    forkers.append(process)
    theirs.close()
    ours.settimeout(_START_S)
    address = ours.recv(1000).decode()
    assert address, "the process that forks did not begin"
    atexit.register(_end, ours, process)
    return address


def _end(line: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    line.close()
    process.wait(_START_S)
