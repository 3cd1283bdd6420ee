"""A run that was cut off, and what it takes to resume it.

    --resume RUN -> its newest complete checkpoint -> settings not given now -> what differs
                                                    -> what must not differ: refused by name

Reading runs no code: JSON here, safetensors in the members. This module must not know engines,
members or how a checkpoint is written. Above 300 lines, since reading a checkpoint and refusing it
belong together.
"""

import copy
import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import NAMES, Resolved, RunSettings, check, default_of
from ..core.coordinator import Coordinator
from ..core.ledger import Ledger
from ..core.rest_state import audit, audit_members, next_member, recut
from ..errors import ConfigError
from ..fields import count, real
from ..partition.names import divides
from ..passes import ScriptPlace, stream_place
from ..protocols.base import SyncProtocol
from ..run_dir import RUNS, refuse_trials
from ..trace import read_header, refuse_other_format
from .folder import FOLDER, Checkpoint, CheckpointFolder, damaged
from .writer import CUT

RUN, COORDINATOR = "run.json", "coordinator.json"

_OF_THE_CALL = frozenset(
    (
        "resume", "run_dir", "name", "dry_run", "json", "checkpoint_every", "keep", "log",
        "updates", "seconds", "target_accuracy", "fault", "parameters", "split",
    )
)  # fmt: skip
"""Settings on display, location, end and injected faults: they are not taken over, and differences
are not reported."""
_OF_THE_MODEL = ("seed", "batch_size", "mini_batch_size", "init", "scale_lr", "warmup")
"""Settings that would make it another run."""
_OF_A_LAUNCHER = ("respawn", "stall_after", "on_worker_error", "preload", "path")
"""Settings for what starts a run's processes, which among ranks is torchrun."""
_OF_WHOLE_MODELS = ("compile", "precision", "channels_last", "compress", "fast")
"""Settings that no split supports: a run that is split from now on continues without them."""
_LONGEST_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a run is resumed from.

    Attributes:
        folder: of the run.
        checkpoint: the newest complete one.
        saved: ``run.json`` of it.
        state: of the coordinator at rest.
    """

    folder: Path
    checkpoint: Checkpoint
    saved: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def version(self) -> int:
        return int(self.saved["version"])

    @property
    def token(self) -> str | None:
        """The run's unique token; None: it began when runs had none."""
        token: str | None = self.saved.get("token")
        return token

    @property
    def epoch(self) -> int:
        """The epoch that the script is in, or is about to begin."""
        return int(self.saved["epoch"])

    @property
    def place(self) -> ScriptPlace:
        """Where in ``pace.epochs`` the script is then."""
        return ScriptPlace.read(self.saved["place"])

    @property
    def first_member(self) -> int:
        """The lowest member number that the run has not used."""
        return next_member(dict(self.state))

    def refuse_another(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigError if the model or data are not those of the checkpoint."""
        for name, was in self.saved["identity"].items():
            now = identity.get(name)
            if now != was:
                raise ConfigError(
                    f"{self.folder} cannot be resumed with another {name.replace('_', ' ')}: it "
                    f"has {was}, this run {now}; start a new run, or use what it had"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run comes from.

    Attributes:
        about: the program, as plain data: task or script, and its arguments.
        resumption: what it is resumed from; None: it is new.
        note: why it was restarted, for the trace; empty if it was not.
    """

    about: Mapping[str, Any]
    resumption: Resumption | None = None
    note: str = ""


def find(settings: RunSettings) -> Resumption | None:
    """The run that ``--resume`` names; None: it is not given, or ``auto`` finds none.

    Raises:
        ConfigError: there is no such run, it has no checkpoint, or all are damaged.
    """
    folder = locate(settings)
    return None if folder is None else read(folder)


def locate(settings: RunSettings) -> Path | None:
    """As `find`, without reading it; ``auto``: the folder it would have, or the latest."""
    if settings.resume is None:
        return None
    if settings.resume != "auto":
        return _named(settings.resume)
    own = RUNS / (settings.name or "latest") if settings.run_dir is None else Path(settings.run_dir)
    folder = _itself(own)
    return folder if has_checkpoint(folder) else None


def has_checkpoint(folder: Path) -> bool:
    """Whether the run in ``folder`` has ever written a checkpoint; it may be damaged by now."""
    return (folder / FOLDER).is_dir() and not CheckpointFolder(folder / FOLDER).is_empty


def read(folder: Path) -> Resumption:
    """The newest complete checkpoint of the run in ``folder``."""
    if not (folder / FOLDER).is_dir():
        raise ConfigError(f"{folder} has no checkpoint to resume from")
    checkpoint = CheckpointFolder(folder / FOLDER).newest(lambda one: _check(folder, one))
    return Resumption(
        folder=folder,
        checkpoint=checkpoint,
        saved=checkpoint.json(RUN),
        state=checkpoint.json(COORDINATOR),
    )


def adopt(resolved: Resolved) -> RunSettings:
    """The settings of a resumed run: those given now, and for the rest those it had."""
    settings = resolved.settings
    found = find(settings)
    if found is None:
        return settings
    saved = found.saved["settings"]
    changes = {
        name: check(name, saved[name], str(found.checkpoint.path / RUN))
        for name in NAMES
        if name in saved and name not in _OF_THE_CALL and resolved.origins[name] == "default"
    }
    if changes.get("engine") == "torchrun":  # which a launcher starts, and no setting
        del changes["engine"]
    if settings.engine == "torchrun":  # there the launcher decides these
        changes = {name: value for name, value in changes.items() if name not in _OF_A_LAUNCHER}
        if changes.get("collective") == "shared":  # by memory, which ranks do not share
            del changes["collective"]
    if divides(settings.split):
        changes = {name: value for name, value in changes.items() if name not in _OF_WHOLE_MODELS}
    given = {one for one in ("batch_size", "mini_batch_size") if resolved.origins[one] != "default"}
    if given:  # the other convention is not the saved one's to choose
        for one in ("batch_size", "mini_batch_size"):
            changes.pop(one, None)
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]  # each was checked


def refuse(found: Resumption, settings: RunSettings, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if settings or the program make it another run."""
    saved = found.saved["settings"]
    for name in _OF_THE_MODEL:
        was, now = saved.get(name, default_of(name)), getattr(settings, name)
        if now != was and now is not None:
            raise ConfigError(
                f"{found.folder} cannot be resumed with {name} = {now}: it has {was}; leave it "
                "out, or start a new run"
            )
    program = found.saved["about"]
    for name in ("task", "script"):
        if program.get(name) != about.get(name):
            raise ConfigError(
                f"{found.folder} cannot be resumed with another {name}: it has "
                f"{program.get(name)}, this run {about.get(name)}; start a new run"
            )


def state_for(
    found: Resumption, ledger: Ledger, protocol: SyncProtocol, *, is_sized: bool = True
) -> dict[str, Any]:
    """The coordinator's state for this protocol and this number of workers; see ``audit``.

    What the protocol learned is kept if it is of the same kind; batches that no worker has begun
    are divided again if an update has another number of pushes.

    Raises:
        ConfigError: what was saved is not what a coordinator saves.
    """
    was = str(found.saved["settings"].get("protocol", "")).partition(":")[0]
    learned = protocol.learned if was == protocol.name else ()
    try:
        audit(dict(found.state), ledger.every_epoch, is_sized=is_sized)
        old = found.state["protocol"]
        state = {
            **found.state,
            "protocol": {**protocol.state(), **{name: old[name] for name in learned}},
            "ledger": recut(found.state["ledger"], ledger.every_epoch),
        }
        Coordinator(copy.deepcopy(protocol), copy.deepcopy(ledger)).resume(state)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise damaged(found.checkpoint.path / COORDINATOR, repr(error)) from None
    return state


def differences(found: Resumption, settings: RunSettings, about: Mapping[str, Any]) -> list[str]:
    """The settings that have changed, one line each: ``workers: 2, now 4``."""
    saved = found.saved["settings"]
    rows = [
        (name, saved.get(name), getattr(settings, name))
        for name in NAMES
        if name in saved and name not in _OF_THE_CALL
    ]
    rows.append(("arguments", found.saved["about"].get("arguments"), about.get("arguments")))
    return [
        f"{name}: {_word(was)}, now {_word(now)}"
        for name, was, now in rows
        if _word(was) != _word(now)
    ]


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _itself(folder: Path) -> Path:
    """What ``runs/latest`` points to, since the link may soon point to another run."""
    return folder.resolve() if folder.is_symlink() else folder


def _named(text: str) -> Path:
    for folder in (Path(text), RUNS / text):
        refuse_trials(folder)
        if (folder / "trace.jsonl").is_file() or has_checkpoint(folder):
            return _itself(folder)
    raise ConfigError(
        f"there is no run {text!r} to resume; give its folder, its name under {RUNS}/, "
        "latest or auto"
    )


def _seconds(value: Any) -> float:
    if not 0.0 <= real(value) < _LONGEST_S:
        raise ValueError(f"{value} seconds")
    return float(value)


_SAVED: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("version", "epoch", "trace_bytes"), count),
    **dict.fromkeys(("elapsed_s", "opened_s", "trained_s"), _seconds),
    "place": ScriptPlace.read,
    "stream": stream_place,
}
"""Fields that ``run.json`` must have -> how each is read."""


def _check(folder: Path, one: Checkpoint) -> None:
    """Raise ConfigError if a checkpoint's files are invalid, or the trace is of another run.

    A trace that ends before the checkpoint was damaged, which is no reason to lose the run.
    """
    saved, state = one.json(RUN), one.json(COORDINATOR)
    path = one.path / RUN
    for name, take in _SAVED.items():
        try:
            take(saved.get(name))
        except (TypeError, ValueError) as error:
            raise damaged(path, f"{name}: {error}") from None
    for name in ("settings", "about", "identity"):
        if not isinstance(saved.get(name), dict):
            raise damaged(path, f"{name} is missing")
    for name in ("protocol", "ledger", "members", "stats"):
        if not isinstance(state.get(name), dict):
            raise damaged(one.path / COORDINATOR, f"{name} is missing")
    try:
        audit_members(state["members"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(one.path / COORDINATOR, repr(error)) from None
    if state.get("version") != saved["version"]:
        raise damaged(path, f"it is of version {saved['version']}, the coordinator of another")
    _refuse_cut(one)
    trace = folder / "trace.jsonl"
    refuse_other_format(trace)
    _refuse_another(trace, one, saved.get("token"))


def _refuse_cut(one: Checkpoint) -> None:
    """Raise ConfigError if a member's part says why the run cannot be resumed here."""
    for name in fnmatch.filter(one.files, "worker-*.json"):
        if why := one.json(name).get(CUT):
            raise ConfigError(f"{one.path}: {why}")


def _refuse_another(trace: Path, one: Checkpoint, token: object) -> None:
    """Raise ConfigError if the checkpoint and the trace are of different runs."""
    try:
        header = read_header(trace)
    except ConfigError:  # unreadable: it is begun again with the checkpoint
        return
    if header.fields.get("token") != token:
        raise ConfigError(f"the checkpoint {one.path} is of another run than {trace}")
