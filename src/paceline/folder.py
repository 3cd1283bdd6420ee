"""The folder of one run: ``runs/NAME``, and ``runs/latest`` that points to it.

A run that is refused before its first step leaves no trace of itself: ``discard`` takes away what
was made for it and nothing else. This module must not know what a run writes into its folder.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from .config import RunSettings
from .errors import ConfigError

_RUNS = Path("runs")


class RunFolder:
    """A folder that was made, or found empty of runs, for one run; or one whose run goes on.

    Args:
        path: where; folders above it are made, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = [one for one in (path, *path.parents) if not one.exists()]
        self._link: Path | None = None
        self._before: str | None = None
        path.mkdir(parents=True, exist_ok=True)

    def point_from(self, link: Path) -> None:
        """Let ``link`` point here, unless something that is no link has its name."""
        if link.exists() and not link.is_symlink():
            return
        self._link = link
        self._before = str(link.readlink()) if link.is_symlink() else None
        _relink(link, self.path.name)

    def discard(self, names: Iterable[str]) -> None:
        """Take back the folder and, in it, what has these names; all else stays."""
        for one in (self.path / name for name in names):
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink(missing_ok=True)
        if self._link is not None:
            _relink(self._link, self._before)
        with contextlib.suppress(OSError):  # somebody else's file lies there: it stays
            for folder in self._made:
                folder.rmdir()


def make_folder(settings: RunSettings, program_name: str, *, is_latest: bool = True) -> RunFolder:
    """The folder that ``--run-dir`` or ``--name`` asks for, else one named after the run.

    Args:
        is_latest: whether ``runs/latest`` points to it from now on: to a run that somebody wants
            to go on with, not to one that was made to measure or in virtual time.

    Raises:
        ConfigError: there is a run in it already.
    """
    if settings.run_dir is not None:
        path = Path(settings.run_dir)
        if (path / "trace.jsonl").exists():
            raise ConfigError(f"{path} already holds a run; name another --run-dir")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, no folder; name another --run-dir")
        return RunFolder(path)
    path = _dated(f"{program_name}-{settings.protocol}")
    if settings.name:
        path = _RUNS / settings.name
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another --name")
    folder = RunFolder(path)
    if is_latest:
        folder.point_from(_RUNS / "latest")
    return folder


def fresh_folder(stem: str, path: Path | None = None) -> Path:
    """A folder for several runs: ``path``, or one named after ``stem`` and the time.

    Raises:
        ConfigError: there is something in it already.
    """
    place = _dated(stem) if path is None else path
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise ConfigError(f"{place} is not empty; name another --run-dir")
    place.mkdir(parents=True, exist_ok=True)
    return place


def _dated(stem: str) -> Path:
    """A path under ``runs/`` where nothing is."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)
    path = first = _RUNS / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def _relink(link: Path, target: str | None) -> None:
    link.unlink(missing_ok=True)
    if target is not None:
        link.symlink_to(target)
