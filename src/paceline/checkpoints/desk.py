"""Where checkpoints are handed in to be written: to the scribe beside the run, or done at once.

    hand_in(request) -> [ scribe ] -> answers()

The scribe is started with the first request. At a stop, and at the end, nobody is disturbed by a
write, so it is done here, after what the scribe still has. This module must not know what is due.
"""

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from . import scribe

Request = dict[str, Any]
Answer = dict[str, Any]


class Desk:
    """One run's writer.

    Args:
        memory: the store's: its ``buffer`` is read here, its ``fd``, where it has one, there.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._num_open = 0
        self._answers: list[Answer] = []

    @property
    def is_busy(self) -> bool:
        """Whether a request is being written."""
        return self._num_open > 0

    def hand_in(self, request: Request, *, is_last: bool) -> None:
        """Have this written; ``is_last``: now, and return when it is done."""
        if is_last or not hasattr(self._memory, "fd"):
            self._wait()
            self._answers.append(scribe.write(request, self._memory.buffer))
            return
        self._num_open += 1
        try:
            process = self._start() if self._process is None else self._process
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            self._lost(error.strerror or str(error))

    def answers(self) -> list[Answer]:
        """What has been written, or could not be, since the last call; does not wait."""
        if self._num_open:
            self._read(is_blocking=False)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the scribe, after what it still has to write; may be called twice."""
        self._wait()
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            assert process.stdout is not None
            process.stdout.close()
            process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.checkpoints.scribe", str(self._memory.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.fd],
            start_new_session=True,  # Ctrl-C is the launcher's to hear
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return self._process

    def _wait(self) -> None:
        while self._num_open:
            self._read(is_blocking=True)

    def _read(self, *, is_blocking: bool) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, is_blocking)
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._lost(f"its writer ended (exit {self._process.wait()})")
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._answers.append(json.loads(line))
            self._num_open -= 1

    def _lost(self, reason: str) -> None:
        """The scribe is gone; the next request starts another."""
        self._answers += [{"failed": reason}] * self._num_open
        self._num_open, self._process, self._unread = 0, None, b""
