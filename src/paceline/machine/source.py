"""The source of facts about a machine: files below a root, outputs of commands, the environment.

A recorded machine is another root with recorded outputs (tests/support/machines.py), read by the
same code. Nothing here raises: a value that cannot be read is empty. This module must not know what
anything means.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_MOST_S = 30.0
"""A hanging driver never answers."""
_MOST_LINES = 20_000
_MOST_BYTES = 1 << 20
"""Limit for a file; the kernel's files cannot be read in pieces of 4 MiB."""


class CommandOutput(NamedTuple):
    """The output of a command.

    Attributes:
        code: exit code; -1: it timed out.
        text: standard output and error, in order.
    """

    code: int
    text: str

    @property
    def is_good(self) -> bool:
        """Whether the command succeeded."""
        return self.code == 0


class MachineSource:
    """The machine that this runs on.

    Args:
        root: where the file system begins.
        environ: variables of the environment; by default those of this process.
    """

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.environ = dict(os.environ if environ is None else environ)
        self.platform = sys.platform
        self._outputs: dict[tuple[str, ...], CommandOutput | None] = {}

    def text(self, path: str) -> str:
        """Return a file's text, stripped; empty: it is missing or cannot be read."""
        try:
            with open(self._at(path), "rb") as file:
                return file.read(_MOST_BYTES).decode(errors="replace").strip("\0 \n\t")
        except OSError:
            return ""

    def link(self, path: str) -> str:
        """Return the last part of a link's target; empty: it is not a link."""
        try:
            return os.path.basename(os.readlink(self._at(path)))
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted naturally for numbers."""
        try:
            entries = os.listdir(self._at(folder))
        except OSError:
            return []
        return sorted(entries, key=lambda name: (len(name), name))

    def exists(self, path: str) -> bool:
        """Whether there is such a file, folder or device."""
        return os.path.lexists(self._at(path))

    def may_open(self, path: str) -> bool:
        """Whether a device's file can be opened to read and write."""
        try:
            os.close(os.open(self._at(path), os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            return error.errno not in _DENIED
        return True

    def run(self, *command: str, most_s: float = _MOST_S) -> CommandOutput | None:
        """Return a command's output, run once; None: there is no such command."""
        if command not in self._outputs:
            self._outputs[command] = self._run(command, most_s)
        return self._outputs[command]

    def _run(self, command: Sequence[str], most_s: float) -> CommandOutput | None:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", stdin=subprocess.DEVNULL, env={**self.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except OSError:
            return None
        try:
            text, _ = process.communicate(timeout=most_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                process.communicate(timeout=1.0)
            return CommandOutput(-1, "")
        return CommandOutput(process.returncode, "\n".join(text.splitlines()[:_MOST_LINES]))

    def package(self, name: str) -> str:
        """Return an installed package's version without importing it; empty: not installed."""
        from importlib import metadata

        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    def package_text(self, name: str, file: str) -> str:
        """Return a file's text from a package without importing it; empty: it is missing."""
        from importlib import metadata

        with contextlib.suppress(metadata.PackageNotFoundError, OSError):
            return Path(str(metadata.distribution(name).locate_file(file))).read_text()
        return ""

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


_DENIED = (1, 13)
"""EPERM: the control group of a container; EACCES: the file's own rights."""
