"""Where checkpoints are handed in to be written: to the scribe beside the run, or done at once.

    hand_in(request) -> [ scribe ] -> answers()

The scribe is started with the first request. At a stop, and at the end, nobody is disturbed by a
write, so it is done here, after what the scribe still has. A scribe that somebody has stopped, or
that has died, is ended for good; what it still had is written here. This module must not know what
is due.
"""

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..system.signals import die_with_parent, held_back
from ..system.vitals import ProcessState, read_vitals
from . import scribe
from .shelf import CheckpointFolder

Request = dict[str, Any]
Answer = dict[str, Any]
_STOPPED_S = 1.0
"""So long a scribe may be stopped by somebody."""
_LOOK_S = 0.1


class WriteQueue:
    """One run's writer.

    Args:
        memory: the store's: its ``buffer`` is read here, its ``fd``, where it has one, there.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._unsent = b""
        """Of requests: a pipe takes 64 KiB, and nobody reads it while the scribe is stopped."""
        self._open: deque[Request] = deque()
        """What the scribe has to write."""
        self._stopped_s = math.inf
        """Since when it has been seen stopped."""
        self._answers: list[Answer] = []

    @property
    def is_busy(self) -> bool:
        """Whether a request is being written."""
        return bool(self._open)

    def hand_in(self, request: Request, *, is_last: bool) -> None:
        """Have this written; ``is_last``: now, and return when it is done."""
        if is_last or not hasattr(self._memory, "fd"):
            self.finish()
            self._answers.append(scribe.write(request, self._memory.buffer))
            return
        self._open.append(request)
        try:
            process = self._start() if self._process is None else self._process
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._unsent += json.dumps(request).encode() + b"\n"
        self._send(process)

    def finish(self) -> None:
        """Return when all that was handed in is written: what lies in the memory may change."""
        while self._open:
            if self._read(_LOOK_S):
                self._write_here()

    def answers(self) -> list[Answer]:
        """What has been written, or could not be, since the last call; does not wait."""
        if self._open and (reason := self._read(0.0)):
            self._fail(reason)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the scribe, after what it still has to write; may be called twice."""
        self.finish()
        self._let_go()

    def _start(self) -> "subprocess.Popen[bytes]":
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.checkpoints.scribe", str(self._memory.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._memory.fd],
                start_new_session=True,  # Ctrl-C is the launcher's to hear
                preexec_fn=die_with_parent,
            )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._unread = self._unsent = b""
        self._stopped_s = math.inf
        return self._process

    def _send(self, process: "subprocess.Popen[bytes]") -> None:
        """As much as it takes now."""
        assert process.stdin is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has just died: that is found where its answers are read
            self._unsent = b""

    def _read(self, within_s: float) -> str:
        """Hear what the scribe has done, waiting so long for it; why it will do no more."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        self._send(self._process)
        assert self._process.stdin is not None
        waiting = [self._process.stdin.fileno()] if self._unsent else []
        ready, writable, _ = select.select([descriptor], waiting, [], within_s)
        if not ready:
            if writable:
                return ""
            if not self._is_stopped(self._process.pid):
                return ""
            self._process.kill()
            return "its writer was stopped by somebody"
        data = os.read(descriptor, 1 << 16)
        if not data:
            return f"its writer ended (exit {self._process.wait()})"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._answers.append(json.loads(line))
            self._open.popleft()
        return ""

    def _is_stopped(self, pid: int) -> bool:
        """Whether it has been stopped for a while: nobody knows for how long it will be."""
        now_s = time.monotonic()
        is_stopped = read_vitals(pid).state is ProcessState.STOPPED
        self._stopped_s = min(self._stopped_s, now_s) if is_stopped else math.inf
        return now_s - self._stopped_s >= _STOPPED_S

    def _fail(self, reason: str) -> None:
        """The scribe is gone, and what it had with it; the next request starts another."""
        self._let_go()
        for request in self._open:
            shelf = CheckpointFolder(Path(request["shelf"]), request["keep"], request.get("within"))
            shelf.drop(Path(request["aside"]))
        self._answers += [{"failed": reason}] * len(self._open)
        self._open.clear()

    def _write_here(self) -> None:
        """The scribe is gone: what it had is written here, as far as it was not done."""
        self._let_go()
        while self._open:
            request = self._open.popleft()
            is_there = os.path.isdir(request["aside"])  # else it was sealed, and only not told
            done = scribe.write(request, self._memory.buffer) if is_there else {"took_s": 0.0}
            self._answers.append(done)

    def _let_go(self) -> None:
        """End it; it has nothing to do, and may be stopped."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        process.wait()
