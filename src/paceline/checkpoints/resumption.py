"""Resume a run that was cut off.

    --resume RUN -> newest complete checkpoint -> settings not given now are taken from it
                                               -> other differences: reported, or refused by name

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

_NOT_ADOPTED = frozenset(
    (
        "resume", "run_dir", "name", "dry_run", "json", "checkpoint_every", "keep", "log",
        "updates", "seconds", "target_accuracy", "fault", "parameters",
    )
)  # fmt: skip
"""Settings for display, location, end and injected faults: they are not taken from the checkpoint,
and differences are not reported."""
_GIVEN_ANEW = frozenset(("split",))
"""Settings that are not taken from the checkpoint, either, but whose differences are reported."""
_MUST_MATCH = ("seed", "batch_size", "mini_batch_size", "init", "scale_lr", "warmup")
"""Settings that must not change, since they would make it another run."""
_BY_LAUNCHER = ("respawn", "stall_after", "on_worker_error", "preload", "path")
"""Settings for what starts the processes: under engine torchrun that is a launcher of its own."""
_NOT_WITH_SPLIT = ("compile", "precision", "channels_last", "compress", "fast", "collective")
"""Settings that no split supports: a run that is split from here on continues without them."""
_MOST_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a run is resumed from.

    Attributes:
        folder: the run's folder.
        checkpoint: its newest complete checkpoint.
        saved: ``run.json`` of the checkpoint.
        state: the coordinator's saved state.
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
        """The run's unique token; None: an older version began the run, without one."""
        token: str | None = self.saved.get("token")
        return token

    @property
    def epoch(self) -> int:
        """The epoch that the script is in, or is about to begin."""
        return int(self.saved["epoch"])

    @property
    def place(self) -> ScriptPlace:
        """Where in ``pace.epochs`` the script was."""
        return ScriptPlace.read(self.saved["place"])

    @property
    def first_member(self) -> int:
        """The lowest member number that the run has not used."""
        return next_member(dict(self.state))

    def refuse_another(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigError if the model or data are not those of the checkpoint."""
        for name, saved in self.saved["identity"].items():
            current = identity.get(name)
            if current != saved:
                raise ConfigError(
                    f"{self.folder} cannot be resumed with another {name.replace('_', ' ')}: it "
                    f"has {saved}, this run {current}; start a new run, or use what it had"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run executes, and what it continues.

    Attributes:
        about: the program, as plain data: task or script, and its arguments.
        resumption: what the run is resumed from; None: it is new.
        note: why it was restarted, for the trace; empty if it was not.
    """

    about: Mapping[str, Any]
    resumption: Resumption | None = None
    note: str = ""


def find(settings: RunSettings) -> Resumption | None:
    """Return the run that ``--resume`` names; None: it is not given, or ``auto`` finds no run.

    Raises:
        ConfigError: there is no such run, it has no checkpoint, or all are damaged.
    """
    folder = locate(settings)
    return None if folder is None else read(folder)


def locate(settings: RunSettings) -> Path | None:
    """Return the folder of the run that ``--resume`` names, without reading it; None: see `find`.

    ``auto`` names the folder that a new run would have, or the latest.
    """
    if settings.resume is None:
        return None
    if settings.resume != "auto":
        return _find_named(settings.resume)
    own = RUNS / (settings.name or "latest") if settings.run_dir is None else Path(settings.run_dir)
    folder = _without_link(own)
    return folder if has_checkpoint(folder) else None


def has_checkpoint(folder: Path) -> bool:
    """Return whether the run in ``folder`` ever wrote a checkpoint; it may be damaged by now."""
    return (folder / FOLDER).is_dir() and not CheckpointFolder(folder / FOLDER).is_empty


def read(folder: Path) -> Resumption:
    """Return the newest complete checkpoint of the run in ``folder``. ConfigError: it has none."""
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
    """Return the settings of a resumed run: those given now, and the saved ones for the rest."""
    settings = resolved.settings
    resumption = find(settings)
    if resumption is None:
        return settings
    saved = resumption.saved["settings"]
    changes = {
        name: check(name, saved[name], str(resumption.checkpoint.path / RUN))
        for name in NAMES
        if name in saved
        and name not in _NOT_ADOPTED | _GIVEN_ANEW
        and resolved.origins[name] == "default"
    }
    if changes.get("engine") == "torchrun":  # its launcher chooses it, not a setting
        del changes["engine"]
    if settings.engine == "torchrun":  # its launcher decides these
        changes = {name: value for name, value in changes.items() if name not in _BY_LAUNCHER}
        if changes.get("collective") == "shared":  # ranks may share none: they look
            del changes["collective"]
    if divides(settings.split):
        changes = {name: value for name, value in changes.items() if name not in _NOT_WITH_SPLIT}
    sizes = ("batch_size", "mini_batch_size")
    if any(resolved.origins[name] != "default" for name in sizes):
        for name in sizes:  # one that is given replaces the saved one of either kind
            changes.pop(name, None)
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]  # each was checked


def refuse(resumption: Resumption, settings: RunSettings, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if the settings or the program would make it another run."""
    saved_settings = resumption.saved["settings"]
    for name in _MUST_MATCH:
        saved_value, value = saved_settings.get(name, default_of(name)), getattr(settings, name)
        if value != saved_value and value is not None:
            raise ConfigError(
                f"{resumption.folder} cannot be resumed with {name} = {value}: it has "
                f"{saved_value}; leave it out, or start a new run"
            )
    program = resumption.saved["about"]
    for name in ("task", "script"):
        if program.get(name) != about.get(name):
            raise ConfigError(
                f"{resumption.folder} cannot be resumed with another {name}: it has "
                f"{program.get(name)}, this run {about.get(name)}; start a new run"
            )


def state_for(
    resumption: Resumption, ledger: Ledger, protocol: SyncProtocol, *, is_sized: bool = True
) -> dict[str, Any]:
    """Return the coordinator's state for this protocol and number of workers; see ``audit``.

    What the protocol learned is kept if the kind of protocol is the same; batches that no worker
    has begun are divided again if an update has another number of pushes.

    Raises:
        ConfigError: the saved state is not a coordinator's.
    """
    saved_name = str(resumption.saved["settings"].get("protocol", "")).partition(":")[0]
    learned = protocol.learned if saved_name == protocol.name else ()
    try:
        audit(dict(resumption.state), ledger.every_epoch, is_sized=is_sized)
        saved_protocol = resumption.state["protocol"]
        state = {
            **resumption.state,
            "protocol": {**protocol.state(), **{name: saved_protocol[name] for name in learned}},
            "ledger": recut(resumption.state["ledger"], ledger.every_epoch),
        }
        Coordinator(copy.deepcopy(protocol), copy.deepcopy(ledger)).resume(state)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise damaged(resumption.checkpoint.path / COORDINATOR, repr(error)) from None
    return state


def differences(
    resumption: Resumption, settings: RunSettings, about: Mapping[str, Any]
) -> list[str]:
    """Return the settings that have changed, one line each: ``workers: 2, now 4``."""
    saved = resumption.saved["settings"]
    rows = [
        (name, saved.get(name), getattr(settings, name))
        for name in NAMES
        if name in saved and name not in _NOT_ADOPTED
    ]
    rows.append(("arguments", resumption.saved["about"].get("arguments"), about.get("arguments")))
    return [
        f"{name}: {_word(then)}, now {_word(now)}"
        for name, then, now in rows
        if _word(then) != _word(now)
    ]


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _without_link(folder: Path) -> Path:
    """Return what ``runs/latest`` points to: the link may soon point to another run."""
    return folder.resolve() if folder.is_symlink() else folder


def _find_named(text: str) -> Path:
    """Return the folder of a run, given as a folder or a name. ConfigError: there is none."""
    for folder in (Path(text), RUNS / text):
        refuse_trials(folder)
        if (folder / "trace.jsonl").is_file() or has_checkpoint(folder):
            return _without_link(folder)
    raise ConfigError(
        f"there is no run {text!r} to resume; give its folder, its name under {RUNS}/, "
        "latest or auto"
    )


def _seconds(value: Any) -> float:
    if not 0.0 <= real(value) < _MOST_S:
        raise ValueError(f"{value} seconds")
    return float(value)


_SAVED: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("version", "epoch", "trace_bytes"), count),
    **dict.fromkeys(("elapsed_s", "opened_s", "trained_s"), _seconds),
    "place": ScriptPlace.read,
    "stream": stream_place,
}
"""Fields that ``run.json`` must have, and the function that reads each."""


def _check(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a checkpoint's files are invalid, or the trace is of another run.

    A trace that ends before the checkpoint was damaged; the run can be resumed without it.
    """
    saved, state = checkpoint.json(RUN), checkpoint.json(COORDINATOR)
    path = checkpoint.path / RUN
    for name, read_field in _SAVED.items():
        try:
            read_field(saved.get(name))
        except (TypeError, ValueError) as error:
            raise damaged(path, f"{name}: {error}") from None
    for name in ("settings", "about", "identity"):
        if not isinstance(saved.get(name), dict):
            raise damaged(path, f"{name} is missing")
    for name in ("protocol", "ledger", "members", "stats"):
        if not isinstance(state.get(name), dict):
            raise damaged(checkpoint.path / COORDINATOR, f"{name} is missing")
    try:
        audit_members(state["members"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(checkpoint.path / COORDINATOR, repr(error)) from None
    if state.get("version") != saved["version"]:
        raise damaged(
            path, f"its version is {saved['version']}, the coordinator's is {state.get('version')}"
        )
    _refuse_cut(checkpoint)
    trace = folder / "trace.jsonl"
    refuse_other_format(trace)
    _refuse_another(trace, checkpoint, saved.get("token"))


def _refuse_cut(checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a member's file says that the run cannot be resumed here."""
    for name in fnmatch.filter(checkpoint.files, "worker-*.json"):
        if reason := checkpoint.json(name).get(CUT):
            raise ConfigError(f"{checkpoint.path}: {reason}")


def _refuse_another(trace: Path, checkpoint: Checkpoint, token: object) -> None:
    """Raise ConfigError if the checkpoint and the trace are of different runs."""
    try:
        header = read_header(trace)
    except ConfigError:  # unreadable: a new trace begins at the checkpoint
        return
    if header.fields.get("token") != token:
        raise ConfigError(f"the checkpoint {checkpoint.path} is of another run than {trace}")
