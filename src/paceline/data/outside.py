"""What a fetch may do outside this process: run a program, download a file.

It stands apart so that tests hand in a machine of their own, without a network. It must not know
what is fetched.
"""

import http.client
import shutil
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class SourceError(Exception):
    """One way to get a data set did not work; the next one is tried. Never reaches the user."""


class Outside(Protocol):
    """The programs and the network of a machine."""

    def has(self, program: str) -> bool:
        """Whether ``program`` can be run here."""

    def run(self, command: Sequence[str], folder: Path, timeout_s: float) -> None:
        """Run to the end in ``folder``, asking nothing; raises SourceError if it fails."""

    def download(self, address: str, path: Path, timeout_s: float) -> None:
        """Write what lies at ``address`` to ``path``; raises SourceError if it fails.

        ``timeout_s`` is the longest silence of the other side, not the time of the whole.
        """


class ThisMachine:
    """The real one."""

    def has(self, program: str) -> bool:
        return shutil.which(program) is not None

    def run(self, command: Sequence[str], folder: Path, timeout_s: float) -> None:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SourceError(f"{command[0]} took more than {timeout_s:.0f} s") from None
        except OSError as error:
            raise SourceError(f"{command[0]}: {error.strerror or error}") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise SourceError(f"{command[0]}: {said[-1] if said else f'exit {done.returncode}'}")

    def download(self, address: str, path: Path, timeout_s: float) -> None:
        try:
            with urllib.request.urlopen(address, timeout=timeout_s) as answer, path.open("wb") as f:
                shutil.copyfileobj(answer, f)
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(str(getattr(error, "reason", "") or error)) from error
