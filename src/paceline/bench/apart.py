"""An object in a process of its own, whose methods are called by lines of JSON.

    here                          there (python -m paceline.bench.apart)
    Apart("module:Class", {...})  Class(**arguments)
    .ask("block", count=50)  -->  .block(count=50)
                             <--  its result, or the error

A measurement in its own process has its own caches, counters, threads and peak memory, and its
failure ends no other. The process ends when this side closes or dies, since its standard input ends
then. This module must not know what is measured.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Self

from ..errors import ConfigError, PacelineError, WorkerError
from ..system.interpreter import safe_path_flag

Answer = Mapping[str, Any]


class Apart:
    """A process with one object in it.

    Args:
        target: "package.module:Class", imported there.
        arguments: of the class, as plain JSON.
        environment: variables to add to this process's.
    """

    def __init__(
        self, target: str, arguments: Answer, environment: Mapping[str, str] | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115, closed by close()
            mode="w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [sys.executable, *safe_path_flag(), "-m", __name__, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._send(dict(arguments))

    def ask(self, what: str, **arguments: object) -> Answer:
        """Call a method there, wait, and return its result.

        Raises:
            ConfigError: the method, or the class, raised a PacelineError.
            WorkerError: it raised another error, or the process died.
        """
        self.begin(what, **arguments)
        return self.end()

    def begin(self, what: str, **arguments: object) -> None:
        """Call a method there without waiting."""
        self._send({"do": what, "with": arguments})

    def end(self) -> Answer:
        """Wait for the method that `begin` called and return its result; raises as `ask` does."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(
                f"the process ended with {self._process.wait()}: {self._last_error_line()}"
            )
        answer: Answer = json.loads(line)
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        if "failed" in answer:
            raise WorkerError(answer["failed"])
        return answer

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its death is reported by the next read
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _last_error_line(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it printed no error"


def serve(target: str) -> None:
    """Create the object and call its methods until standard input ends."""
    # Standard output is for answers: other output goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    measured: object = None
    arguments = json.loads(sys.stdin.readline() or "{}")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if measured is None:
                measured = _find(target)(**arguments)
            answer = getattr(measured, request["do"])(**request["with"])
        except PacelineError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # a measured object may raise anything; it is sent back
            from ..system.reasons import reason

            answer = {"failed": reason(error)}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


def _find(target: str) -> Callable[..., object]:
    """Import the class, without garbage collection: imports leave nothing to collect."""
    module, _, name = target.partition(":")
    gc.disable()
    try:
        factory: Callable[..., object] = getattr(importlib.import_module(module), name)
    finally:
        gc.enable()
    return factory


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.argv[1])
    # Threads that a compiler left running must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)
