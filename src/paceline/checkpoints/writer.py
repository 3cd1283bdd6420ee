"""Checkpoints are written by a process beside the run, so that no step waits for a disk.

    hand_in(request) -> [ writer: pinned bytes -> safetensors -> seal ] -> answers()

A member has copied the version into the memory's pinned area before, in the order of all updates.
The writer (``python -m paceline.checkpoints.writer``) is started with the first request, reads one
request a line on standard input, says one answer a line on standard output, and ends with its
parent. Tensors get their own shapes there, also those that lie permuted (channels_last).

At a stop, and at the end, nobody is disturbed by a write, so it is done here, after what the writer
still has. A writer that somebody has stopped, or that has died, is ended for good; what it still
had is written here. Above 300 lines since both sides of its pipe stand here. This module must not
know what is due, nor runs, members or torch.
"""

import contextlib
import json
import math
import mmap
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..system.files import OpenFolder, open_to_read
from ..system.signals import die_with_parent, held_back, leave_to_the_launcher
from ..system.streams import wait_for
from ..system.vitals import ProcessState, read_vitals
from .folder import CheckpointFolder, number_of

Request = dict[str, Any]
Answer = dict[str, Any]
_STOPPED_S = 1.0
"""So long a writer may be stopped by somebody."""
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
        memory: the store's: its ``buffer`` is read here, its ``fd``, where it has one, there.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._unsent = b""
        """Of requests: a pipe takes 64 KiB, and nobody reads it while the writer is stopped."""
        self._open: deque[Request] = deque()
        """What the writer has to write."""
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
            self._answers.append(write(request, self._memory.buffer))
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
        """End the writer, after what it still has to write; may be called twice."""
        self.finish()
        self._let_go()

    def _start(self) -> "subprocess.Popen[bytes]":
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.checkpoints.writer", str(self._memory.fd)],
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
        """Hear what the writer has done, waiting so long for it; why it will do no more."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        self._send(self._process)
        assert self._process.stdin is not None
        waiting = [self._process.stdin.fileno()] if self._unsent else []
        ready = wait_for([descriptor], waiting, within_s)
        if descriptor not in ready:
            if ready:
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
        """The writer is gone, and what it had with it; the next request starts another."""
        self._let_go()
        for request in self._open:
            _folder_of(request).drop(Path(request["aside"]))
        self._answers += [{"failed": reason}] * len(self._open)
        self._open.clear()

    def _write_here(self) -> None:
        """The writer is gone: what it had is written here, as far as it was not done."""
        self._let_go()
        while self._open:
            request = self._open.popleft()
            is_there = os.path.isdir(request["aside"])  # else it was renamed, and only not told
            done = write(request, self._memory.buffer) if is_there else _settle(request)
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


def write(request: Request, memory: Any) -> Answer:
    """Write and seal one checkpoint; what became of it, never an exception of the disk's.

    Args:
        request: ``aside`` (its folder, with the members' own files in it), ``folder``, ``keep``,
            ``files`` (name -> JSON value), ``sync`` (files outside that must be on the disk
            before), and ``within`` (the identity of the run's folder).
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
        for outside in request["sync"]:
            with open_to_read(Path(outside)) as file:
                os.fsync(file.fileno())
        path = folder.seal(aside)
    except OSError as error:
        folder.drop(aside)
        return {"failed": error.strerror or str(error)}
    return {"sealed": str(path), "took_s": time.monotonic() - start_s}


def _settle(request: Request) -> Answer:
    """As ``write``, where the writer came as far as the new name, or farther."""
    start_s = time.monotonic()
    try:
        path = _folder_of(request).settle(number_of(Path(request["aside"])))
    except OSError as error:
        return {"failed": error.strerror or str(error)}
    return {"sealed": str(path), "took_s": time.monotonic() - start_s}


def _folder_of(request: Request) -> CheckpointFolder:
    return CheckpointFolder(Path(request["folder"]), request["keep"], request.get("within"))


def _write_tensors(aside: OpenFolder, memory: Any) -> None:
    """The pinned block as safetensors: the model by its own names, the optimizer's state beside."""
    with aside.read(LAYOUT) as file:
        layout = json.load(file)
    if layout["at"] is None:  # nothing is pinned: a member has written them
        return
    for name, sections in _FILES.items():
        rows = [row for section in sections for row in layout[section]]
        _write_safetensors(aside.fresh(name), rows, memory, layout["at"])


def unwritable(rows: Mapping[str, Sequence[Sequence[Any]]]) -> tuple[str, str] | None:
    """Name and dtype of the first tensor that the format cannot hold; rows as ``Layout.rows``."""
    every = (row for section in rows.values() for row in section)
    return next(((name, dtype) for name, dtype, *_ in every if dtype not in _DTYPES), None)


def _write_safetensors(fd: int, rows: list[list[Any]], memory: Any, at: int) -> None:
    """Straight from memory to the file, without a copy of the model in between.

    The format: the header's length (8 bytes, little-endian), the header (JSON), the data.
    Source: https://github.com/huggingface/safetensors#format
    """
    header, end = {}, 0
    with open(fd, "wb") as file:
        for name, dtype, item_bytes, shape, _, _ in rows:
            if dtype not in _DTYPES:
                raise OSError(f"safetensors knows no {dtype}, which {name!r} is of")
            begin, end = end, end + math.prod(shape) * item_bytes
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, item_bytes, shape, strides, offset in rows:
            file.write(_dense(memory, at + offset, item_bytes, shape, strides))


def _dense(memory: Any, offset: int, item_bytes: int, shape: list[int], strides: list[int]) -> Any:
    """The bytes of one tensor in the order of its shape; a view where they lie so."""
    count, dense = math.prod(shape), 1
    is_dense = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_dense &= size == 1 or stride == dense
        dense *= size
    if is_dense:
        return memoryview(memory)[offset : offset + count * item_bytes]
    import numpy as np

    # As opaque items of their size: NumPy knows no bfloat16, and moving is all that is done.
    flat = np.frombuffer(memory, np.dtype((np.void, item_bytes)), count, offset)
    steps = [stride * item_bytes for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False).tobytes()


def main() -> None:
    """Entry of ``python -m paceline.checkpoints.writer FD``; the end of its input ends it."""
    leave_to_the_launcher()
    descriptor = int(sys.argv[1])
    memory: mmap.mmap | None = None
    for line in sys.stdin:
        if memory is None:
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        answer = json.dumps(write(json.loads(line), memory)).encode() + b"\n"
        try:
            os.write(1, answer)
        except BrokenPipeError:  # the launcher is gone
            return


if __name__ == "__main__":
    main()
