"""The process that forks programs (see forked.py): one thread, and all modules imported once.

    asker --socket--> words, folder, environment, with streams
    asker <--socket-- its process, then its exit code

This file must not know what a program does.
"""

import atexit
import builtins
import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import forked
from paceline.engines.local.preload import import_once


def _asked_paths() -> list[str]:
    return [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]


_PATHS = [one for one in sys.path[1:] if one not in _asked_paths()]
"""The default module path of python."""


class Forker:
    """Forks a program per connection and reports there how it ended.

    Args:
        user: the process that it ends with.
        place: the socket's folder.
    """

    def __init__(self, user: socket.socket, place: str) -> None:
        self._user, self._place = user, place
        self._address = f"{place}/forks"
        self._lines: dict[int, socket.socket] = {}
        """By process."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(100)
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)

    def run(self) -> None:
        """Serve until the user is gone; then end all forked programs."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        self._user.send(self._address.encode())
        with selectors.DefaultSelector() as selector:
            for one in (self._user, self._listener, self._wake_in):
                selector.register(one, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake_in in ready:
                    os.read(self._wake_in, 4096)
                    self._reap()
                if self._listener in ready:
                    self._fork()
                if self._user in ready:
                    break
        for pid in self._lines:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._place, ignore_errors=True)

    def _fork(self) -> None:
        line, _ = self._listener.accept()
        _, streams, _, _ = socket.recv_fds(line, 1, 2)
        if not streams:  # the caller is gone
            line.close()
            return
        with line.makefile("rb") as file:
            request = json.load(file)
        import_once(request.pop("preload"), [])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (self._user, self._listener, line, *self._lines.values()):
                one.close()
            os.close(self._wake_in)
            os.close(self._wake_out)
            forked.address = self._address
            _become(streams, **request)
        for stream in streams:
            os.close(stream)
        _send(line, pid)
        self._lines[pid] = line

    def _reap(self) -> None:
        while self._lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with contextlib.suppress(BrokenPipeError), self._lines.pop(pid) as line:
                _send(line, os.waitstatus_to_exitcode(status))


def _send(line: socket.socket, number: int) -> None:
    line.send(f"{number:{forked.NUMBER_BYTES}}".encode())


def _become(
    streams: Sequence[int],
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    has_session: bool,
) -> None:
    """In the child: run that program to its end."""
    if has_session:
        os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    gc.enable()
    _draw_seeds()
    code = 1
    try:
        _run(list(words))
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        own = _own_part(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _draw_seeds() -> None:
    """Seed as the imports would; Python's own generator does so itself."""
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()


def _run(words: list[str]) -> None:
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    own = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [own, *_asked_paths(), *_PATHS]
    if not is_module:
        _run_script(os.path.abspath(words[0]))
        return
    if words[1] == "torch.distributed.run":
        _let_it_fork_its_ranks()
        sys.modules[words[1]].main()
    else:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)


def _let_it_fork_its_ranks() -> None:
    """torchrun starts a rank through python; here the rank is forked from its arguments."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def fork(self: Any, args: Sequence[str], env: Mapping[str, str]) -> forked.Forked:
        python, *words = args
        assert python == sys.executable, args
        return forked.Forked(
            words[words[0] == "-u" :],
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    SubprocessHandler._popen = fork


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the forker."""
    leading = (__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in leading:
        trace = trace.tb_next
    return trace


def _import_all() -> None:
    gc.disable()
    import torch._dynamo  # otherwise imported by the first optimizer of each program
    import torch.distributed.run  # noqa: F401

    import paceline.engines.torchrun.engine
    import paceline.script.worker  # noqa: F401

    gc.freeze()  # programs do not copy the pages that a collection would touch


def main(descriptor: str) -> None:
    _import_all()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"what is forked must have one thread, it has {threads}"
    Forker(socket.socket(fileno=int(descriptor)), tempfile.mkdtemp(prefix="forks-")).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
