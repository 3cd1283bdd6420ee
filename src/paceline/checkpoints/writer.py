"""Write checkpoints in a process beside the run, so that no step waits for a disk.

    hand_in(request) -> [ writer: pinned bytes -> safetensors -> seal ] -> answers()

Before a request, a member has copied the version into the memory's pinned area, in the order of all
updates. The writer (``python -m paceline.checkpoints.writer``) is started with the first request,
reads one request a line on standard input, writes one answer a line to a pipe of its own, since any
library may print, and ends with its parent. It writes tensors in their own shapes, also those with
permuted strides (channels_last).

At a stop and at the end a write delays nobody, so it is done in this process, after the writer's
pending requests. A writer that was stopped or has died is killed; its pending requests are written
in this process. So they are if a second signal, which ends the run wherever it is, came while a
request was sent or an answer was read. Above 300 lines since both sides of its pipe are here. This
module must not know what is due, nor runs, members or torch.
"""

import contextlib
import fcntl
import json
import math
import mmap
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..system.files import OpenFolder, open_to_read
from ..system.interpreter import safe_path_flag
from ..system.signals import die_with_parent, held_back, leave_to_the_launcher
from ..system.streams import wait_for
from ..system.vitals import ProcessState, read_vitals
from .folder import CheckpointFolder, number_of

Request = dict[str, Any]
Answer = dict[str, Any]
_STOPPED_S = 1.0
"""How long a writer may be stopped (SIGSTOP) before it is killed."""
_LOOK_S = 0.1
LAYOUT, CUT = "layout.json", "cut"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_FILES = {MODEL: ("parameters", "buffers"), OPTIMIZER: ("state",)}
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class WriteQueue:
    """One run's writer.

    Args:
        memory: the store's; this process reads its ``buffer``, the writer its ``fd``, if any.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = -1
        """The end of the writer's pipe from which its answers are read."""
        self._partial_line = b""
        self._unsent = b""
        """Bytes of requests: a pipe takes 64 KiB, and a stopped writer does not read it."""
        self._pending: deque[Request] = deque()
        """Requests that the writer has not answered."""
        self._stopped_s = math.inf
        """Since when the writer has been seen stopped."""
        self._answers: list[Answer] = []
        self._is_in_doubt = False
        """Whether bytes are on their way to or from the writer, or were when an exception came: it
        may never answer, and is killed."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._pending)

    def hand_in(self, request: Request, *, is_last: bool) -> None:
        """Have a request written; ``is_last``: in this process, before this returns."""
        if is_last or self._is_in_doubt or not hasattr(self._memory, "fd"):
            self.finish()
        if is_last or not hasattr(self._memory, "fd"):
            self._answers.append(write(request, self._memory.buffer))
            return
        with self._exchanging():
            self._pending.append(request)
            try:
                process = self._start() if self._process is None else self._process
            except OSError as error:
                self._fail_pending(error.strerror or str(error))
                return
            self._unsent += json.dumps(request).encode() + b"\n"
            self._send(process)

    def finish(self) -> None:
        """Wait until all requests are written; then the pinned memory may change."""
        while self._pending:
            if self._is_in_doubt or self._process is None or self._read(_LOOK_S):
                self._write_pending()

    def answers(self) -> list[Answer]:
        """Return the answers to requests that ended since the last call, without waiting."""
        if self._is_in_doubt:
            self.finish()
        elif self._pending and (reason := self._read(0.0)):
            self._fail_pending(reason)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the writer after its pending requests; may be called twice."""
        self.finish()
        self._end_writer()

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Leave the writer in doubt if an exception comes: hence no ``finally``."""
        self._is_in_doubt = True
        yield
        self._is_in_doubt = False

    def _start(self) -> "subprocess.Popen[bytes]":
        with held_back():
            self._replies, answering = _pipe()
            descriptors = [self._memory.fd, answering]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *safe_path_flag(), "-m", "paceline.checkpoints.writer",
                     *map(str, descriptors)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C is for the launcher
                    preexec_fn=die_with_parent,
                )  # fmt: skip
            except BaseException:  # raised again: no writer will answer
                os.close(self._replies)
                raise
            finally:
                os.close(answering)
        assert self._process.stdin is not None
        for pipe in (self._process.stdin.fileno(), self._replies):
            os.set_blocking(pipe, False)
        self._partial_line = self._unsent = b""
        self._stopped_s = math.inf
        return self._process

    def _send(self, process: "subprocess.Popen[bytes]") -> None:
        """Send as much of the unsent requests as the pipe takes now."""
        assert process.stdin is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has just died, which _read detects
            self._unsent = b""

    def _read(self, within_s: float) -> str:
        """Read the writer's answers, waiting up to ``within_s`` for one.

        Returns:
            Why the writer can do no more; empty if it can.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        descriptor = self._replies
        with self._exchanging():
            self._send(process)
        waiting = [process.stdin.fileno()] if self._unsent else []
        ready = wait_for([descriptor], waiting, within_s)
        if descriptor not in ready:
            if ready or not self._is_stopped(process.pid):
                return ""
            process.kill()
            return "its writer was stopped (SIGSTOP)"
        with self._exchanging():
            data = os.read(descriptor, 1 << 16)
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._pending.popleft()
                self._answers.append(json.loads(line))
        return "" if data else f"its writer ended (exit {process.wait()})"

    def _is_stopped(self, pid: int) -> bool:
        """Return whether the writer has been stopped for `_STOPPED_S`: it may never continue."""
        now_s = time.monotonic()
        is_stopped = read_vitals(pid).state is ProcessState.STOPPED
        self._stopped_s = min(self._stopped_s, now_s) if is_stopped else math.inf
        return now_s - self._stopped_s >= _STOPPED_S

    def _fail_pending(self, reason: str) -> None:
        """Answer all pending requests as failed; the next request starts another writer."""
        self._end_writer()
        for request in self._pending:
            _folder_of(request).drop(Path(request["aside"]))
        self._answers += [{"failed": reason}] * len(self._pending)
        self._pending.clear()

    def _write_pending(self) -> None:
        """Write the pending requests in this process, as far as the writer has not done it."""
        self._end_writer()
        while self._pending:
            request = self._pending[0]
            is_unsealed = os.path.isdir(request["aside"])  # else it was renamed before the answer
            answer = write(request, self._memory.buffer) if is_unsealed else _settle(request)
            self._pending.popleft()
            self._answers.append(answer)

    def _end_writer(self) -> None:
        """Kill the writer, which has nothing to do, and may be stopped."""
        if (process := self._process) is not None:
            process.kill()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            os.close(self._replies)
            process.wait()
        self._process, self._is_in_doubt = None, False


def _pipe() -> tuple[int, int]:
    """Return a pipe's ends, none of which takes the number of a standard stream that is closed."""
    ends = os.pipe()
    read_end, write_end = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return read_end, write_end


def write(request: Request, memory: Any) -> Answer:
    """Write and seal one checkpoint; an error of the disk is returned, not raised.

    Args:
        request: ``aside`` (its folder, with the members' own files in it), ``folder``, ``keep``,
            ``files`` (name -> JSON value), ``sync`` (paths of other files that must be on the disk
            first), and ``within`` (the identity of the run's folder).
        memory: a buffer over the store's memory.

    Returns:
        ``{"sealed": path, "took_s": seconds}`` or ``{"failed": reason}``.
    """
    start_s = time.monotonic()
    aside, folder = Path(request["aside"]), _folder_of(request)
    try:
        with folder.open_aside(number_of(aside)) as place:
            for name, value in request["files"].items():
                place.write(name, json.dumps(value, allow_nan=False).encode())
            _write_tensors(place, memory)
        for file_path in request["sync"]:
            with open_to_read(Path(file_path)) as file:
                os.fsync(file.fileno())
        path = folder.seal(aside)
    except OSError as error:
        folder.drop(aside)
        return {"failed": error.strerror or str(error)}
    return {"sealed": str(path), "took_s": time.monotonic() - start_s}


def _settle(request: Request) -> Answer:
    """Finish a checkpoint that the writer has renamed, or sealed; returns as ``write``."""
    start_s = time.monotonic()
    try:
        path = _folder_of(request).settle(number_of(Path(request["aside"])))
    except OSError as error:
        return {"failed": error.strerror or str(error)}
    return {"sealed": str(path), "took_s": time.monotonic() - start_s}


def _folder_of(request: Request) -> CheckpointFolder:
    return CheckpointFolder(Path(request["folder"]), request["keep"], request.get("within"))


def _write_tensors(aside: OpenFolder, memory: Any) -> None:
    """Write the pinned block as safetensors: one file for the model, one for optimizer state."""
    with aside.read(LAYOUT) as file:
        layout = json.load(file)
    if layout["at"] is None:  # nothing is pinned: a member has written the tensors
        return
    for name, sections in _FILES.items():
        rows = [row for section in sections for row in layout[section]]
        _write_safetensors(aside.fresh(name), rows, memory, layout["at"])


def unwritable(rows: Mapping[str, Sequence[Sequence[Any]]]) -> tuple[str, str] | None:
    """Return the name and dtype of the first tensor that the format cannot hold, or None.

    Args:
        rows: see ``Layout.rows``.
    """
    all_rows = (row for section in rows.values() for row in section)
    return next(((name, dtype) for name, dtype, *_ in all_rows if dtype not in _DTYPES), None)


def _write_safetensors(fd: int, rows: list[list[Any]], memory: Any, base_offset: int) -> None:
    """Write a file directly from memory, without a copy of the model.

    The format: the header's length (8 bytes, little-endian), the header (JSON), the data.
    Source: https://github.com/huggingface/safetensors#format
    """
    header, end = {}, 0
    with open(fd, "wb") as file:
        for name, dtype, item_bytes, shape, _, _ in rows:
            if dtype not in _DTYPES:
                raise OSError(f"{name!r} is {dtype}, which a safetensors file cannot hold")
            begin, end = end, end + math.prod(shape) * item_bytes
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, item_bytes, shape, strides, offset in rows:
            file.write(_dense(memory, base_offset + offset, item_bytes, shape, strides))


def _dense(memory: Any, offset: int, item_bytes: int, shape: list[int], strides: list[int]) -> Any:
    """Return the bytes of one tensor in the order of its shape; a view if they are contiguous."""
    count, expected_stride = math.prod(shape), 1
    is_dense = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_dense &= size == 1 or stride == expected_stride
        expected_stride *= size
    if is_dense:
        return memoryview(memory)[offset : offset + count * item_bytes]
    import numpy as np

    # As opaque items of their size: NumPy has no bfloat16, and the items are only moved.
    flat = np.frombuffer(memory, np.dtype((np.void, item_bytes)), count, offset)
    steps = [stride * item_bytes for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False).tobytes()


def main() -> None:
    """Run ``python -m paceline.checkpoints.writer MEMORY ANSWERS`` until its input ends.

    Both are descriptors: of the store's memory, and to write answers to.
    """
    leave_to_the_launcher()
    descriptor, answers = map(int, sys.argv[1:])
    memory: mmap.mmap | None = None
    for line in sys.stdin:
        if memory is None:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        answer = json.dumps(write(json.loads(line), memory)).encode() + b"\n"
        try:
            os.write(answers, answer)
        except BrokenPipeError:  # the launcher is gone
            return


if __name__ == "__main__":
    main()
