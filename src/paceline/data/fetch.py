"""Fetch a data set to this machine, or say why each source failed.

    source -> work folder -> checksums -> rename into the data folder
              (beside it)    (decompressed)      (all four, or none)

The work folder is on the same file system, so the last step is a rename: an interrupted fetch
leaves what was there before. Loading never fetches. A launcher chooses once, before workers start,
what a run uses: the requested data set, or the digits that ship with the package. This module must
not know what the samples mean, and imports no torch.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError
from .catalogue import DataSet, data_folders, find, locate, read_checked
from .sources import Outside, SourceError, ThisMachine, sources_of

Say = Callable[[str], None]


class FetchState(Enum):
    """Whether a data set can be used."""

    HERE = "here"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The state of a data set on this machine; ``problem`` says why it is damaged."""

    data_set: DataSet
    state: FetchState
    folder: Path | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Where a data set is now; ``source`` is empty if it did not have to be fetched."""

    data_set: DataSet
    folder: Path
    source: str


def inspect(data_set: DataSet, env: Mapping[str, str] | None = None) -> Inspection:
    """Look for ``data_set`` and check all files (about 0.1 s for 55 MB)."""
    located = locate(data_set, env)
    if located is None:
        return Inspection(data_set=data_set, state=FetchState.MISSING, folder=None)
    problem = ""
    if located.missing:
        problem = f"{located.folder} is incomplete: no {', '.join(located.missing)}"
    try:
        for file in data_set.files:
            if file.name in located.paths:
                read_checked(located.paths[file.name], file, remedy(data_set))
    except ConfigError as error:
        problem = str(error)
    state = FetchState.DAMAGED if problem else FetchState.HERE
    return Inspection(data_set=data_set, state=state, folder=located.folder, problem=problem)


def remedy(data_set: DataSet) -> str:
    """What a user can do about a data set that is missing or damaged."""
    if data_set.is_shipped:
        return "reinstall paceline: this file is part of the package"
    return f"`paceline data get {data_set.name}` fetches it"


def fetch(
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
    say: Say = lambda line: None,
) -> Fetched:
    """Make sure that the data set is here and intact, and fetch it if not.

    Args:
        env: the environment, which names the data folder; default this process's.
        outside: the programs and the network; default this machine's.
        say: called with a line before each slow step.

    Raises:
        ConfigError: all sources failed (with each one's reason), or the folder is not writable.
    """
    data_set = find(name)
    inspection = inspect(data_set, env)
    if inspection.state is FetchState.HERE and inspection.folder is not None:
        return Fetched(data_set=data_set, folder=inspection.folder, source="")
    if data_set.is_shipped:
        raise ConfigError(inspection.problem or f"{name} is not in the package; {remedy(data_set)}")
    if inspection.problem:
        say(inspection.problem)
    root = data_folders(env)[0]
    target = root / data_set.folders[0]
    try:
        source = _fetch_into(target, root, data_set, outside or ThisMachine(), say)
    except OSError as error:
        raise ConfigError(
            f"cannot write {name} to {target}: {error.strerror or error}; "
            f"set PACELINE_DATA to a writable folder"
        ) from error
    return Fetched(data_set=data_set, folder=target, source=source)


def _fetch_into(target: Path, root: Path, data_set: DataSet, outside: Outside, say: Say) -> str:
    """Put checked files into ``target``, all or none; returns the source's name."""
    root.mkdir(parents=True, exist_ok=True)
    for folder in (root, target):
        _refuse_shared_folder(folder)
    with tempfile.TemporaryDirectory(prefix=f".{data_set.name}-", dir=root) as work:
        source = _from_any_source(data_set, Path(work), target, outside, say)
        target.mkdir(parents=True, exist_ok=True)
        for file in data_set.files:
            os.replace(Path(work) / "sound" / file.name, target / file.name)
    return source


def _refuse_shared_folder(folder: Path) -> None:
    """Raise OSError if other users can replace the files or the folder."""
    status = os.stat(folder) if folder.exists() else None
    if status is not None and status.st_mode & stat.S_IWOTH:
        raise OSError(errno.EPERM, "everybody may write to it", str(folder))
    if folder.is_symlink() and folder.lstat().st_uid not in (os.geteuid(), 0):
        raise OSError(errno.EPERM, "it is another user's link", str(folder))


def _from_any_source(
    data_set: DataSet, work: Path, target: Path, outside: Outside, say: Say
) -> str:
    """Get checked plain files into ``work/sound`` from the first source that works.

    Returns:
        The source's name.
    """
    reasons = []
    for index, (title, source) in enumerate(sources_of(data_set)):
        say(f"{data_set.title}: trying {title}")
        folder = work / str(index)
        folder.mkdir()
        try:
            _keep_sound(data_set, source(data_set, folder, outside), work / "sound")
        except (SourceError, ConfigError) as error:
            reasons.append(f"{title}: {error}")
        else:
            return title
    tried = "\n".join(f"  - {reason}" for reason in reasons)
    raise ConfigError(
        f"{data_set.title} could not be fetched:\n{tried}\nIf you can get its files elsewhere, put "
        f"{', '.join(file.name for file in data_set.files)} (plain or .gz) into {target}"
    )


def _keep_sound(data_set: DataSet, folder: Path, sound: Path) -> None:
    """Copy the files of ``folder``, decompressed and checked, to ``sound``."""
    sound.mkdir(exist_ok=True)
    for file in data_set.files:
        plain = folder / file.name
        path = plain if plain.is_file() else folder / f"{file.name}.gz"
        content = read_checked(path, file, "trying another source")
        with (sound / file.name).open("wb") as stream:
            stream.write(content)
            stream.flush()
            # Renamed files must not be empty after a power failure.
            os.fsync(stream.fileno())


STAND_IN = "digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The data set to use, and a note if it is not the one that was requested."""

    name: str
    note: str = ""


def choose(
    name: str,
    *,
    fetch_missing: bool,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
    say: Say = lambda line: None,
) -> Choice:
    """``name`` if it is here or can be fetched, else the digits that ship with the package.

    Damaged files are never ignored: they are fetched again if that is allowed, else an error.

    Raises:
        ConfigError: ``name`` is unknown; or it is here, damaged, and was not or cannot be fetched.
    """
    data_set = find(name)
    was_missing = locate(data_set, env) is None
    if not fetch_missing:
        if was_missing:
            return _stand_in(data_set, f"is not here (`paceline data get {name}` fetches it)")
        return Choice(name=name)
    try:
        fetch(name, env=env, outside=outside, say=say)
    except ConfigError as error:
        if not was_missing:
            raise
        say(str(error))
        return _stand_in(data_set, f"could not be fetched (`paceline data get {name}` says why)")
    return Choice(name=name)


def _stand_in(data_set: DataSet, reason: str) -> Choice:
    digits = find(STAND_IN)
    note = (
        f"{data_set.title} {reason}: training on {digits.title} instead, "
        f"{digits.num_train:,} + {digits.num_test:,} real images that ship with paceline"
    )
    return Choice(name=STAND_IN, note=note)


Chooser: TypeAlias = Callable[[str], Choice]

# Uses only what is on this machine.
choose_here: Chooser = partial(choose, fetch_missing=False)
