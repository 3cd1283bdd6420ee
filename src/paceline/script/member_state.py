"""State that only one member has: written into a checkpoint, and restored from it.

    groups of the optimizer, schedulers, loss scale, random states, the order of the epoch,
    the user's own (pace.keep), under local-sgd the whole state of the optimizer that steps here
        -> worker-K.json, worker-K.safetensors
    the main member's of the user's own, which all members begin with
        -> main.json, main.safetensors

Model and optimizer state come from the pinned block, by the names of ``state_dict``, or, for a
split model, tensor by tensor from all members; they are loaded into the user's
own objects before these are laid out in shared memory. No pickle: loading runs no code.

A worker that joins a run in progress has the script's first learning rate: it gets the settings of
the others' optimizer and schedules as text (`settings_text`, `adopt`), with the version at which
the epoch opened. Only plain numbers, strings, and lists and dicts of them are sent. This module
must not know when a checkpoint is taken, or how members talk. Above 300 lines, since writing and
restoring are read side by side.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoints.folder import FOLDER, MANIFEST, Checkpoint, CheckpointFolder
from ..checkpoints.state import can_be_packed, load_tensors, pack, tensor_chunks, unpack
from ..checkpoints.writer import LAYOUT, MODEL, OPTIMIZER
from ..errors import ConfigError
from ..store.layout import Layout, TensorPlace
from ..store.optimizer_copy import EXISTS
from ..system.files import OpenFolder
from .schedules import Schedules
from .unprepared import AnyScheduler

_REFUSALS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors of ``load_state_dict`` and similar methods for a state that does not fit."""
_MAIN = "main"
_PART = re.compile(r"worker-(\d{1,9})\.json")
"""The name of a worker's part of a checkpoint, with its seat."""

_Packed: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]
"""The state by name, and the tensors in it."""


class _State(NamedTuple):
    """What a member writes: all that it has, and of that what the user keeps."""

    own: _Packed
    kept: _Packed


class MemberState:
    """One member's part in checkpoints.

    Args:
        folder: of the run; None: there is none, and nothing is written.
        found: the checkpoint that the run resumes from; None: it is a new run.
        seat: the worker's number.
        identity: of the run's folder.
        epoch: the one in which the run resumes, whose order is drawn again.

    Attributes:
        drawn: returns for a kept sampler the epoch that it drew last and its state before that;
            for any other object None.
    """

    def __init__(
        self,
        folder: Path | None,
        found: Path | None,
        seat: int,
        identity: Sequence[int] | None = None,
        epoch: int = 0,
    ) -> None:
        self._epoch = epoch
        self._kept: list[Any] = []
        self._names_kept: set[str] = set()
        """Names of what the user keeps."""
        self.drawn: Callable[[Any], list[Any] | None] = lambda thing: None
        self._folder = (
            None if folder is None else CheckpointFolder(folder / FOLDER, within=identity)
        )
        self._seat = seat
        self._found = found
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._own: dict[str, Any] = {} if found is None else self._read_own(found)
        self._held: tuple[int, _State] | None = None
        """The state at the end of the last loop, until the next has begun."""

    # -- what is remembered ---------------------------------------------------------------------

    def add(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Keep what ``save`` returns; in a resumed run ``load`` is called now."""
        self._parts[name] = (save, load)
        if name not in self._own:
            return
        try:
            load(self._own[name])
        except _REFUSALS as error:
            raise ConfigError(
                f"{name!r} of the checkpoint {self._found} cannot be taken over: {error!r:.200}"
            ) from error

    def has(self, name: str) -> bool:
        """Whether the checkpoint has an entry of this name."""
        return name in self._own

    def add_of_all(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[int, Callable[[int], Any]], None],
    ) -> None:
        """Keep what ``save`` returns; in a resumed run ``load`` may read all workers' parts.

        Args:
            load: gets the former number of workers, and a function that reads the part of each.
        """
        self._parts[name] = (save, lambda _: None)
        if self._found is None or name not in self._own:
            return
        found, seats = self._found, _seats_of(self._found)
        try:
            load(len(seats), lambda number: _read_part(found, seats[number])[name])
        except _REFUSALS as error:
            raise ConfigError(
                f"{name!r} of the checkpoint {found} cannot be taken over: {error!r:.200}"
            ) from error

    def keep(self, name: str, thing: Any) -> None:
        """Keep a user's object with ``state_dict`` and ``load_state_dict``, or a generator.

        For the loader's sampler, its state before it drew the current epoch is kept as well.

        Raises:
            ConfigError: it has neither, or the name is taken.
        """
        if f"own {name}" in self._parts:
            raise ConfigError(f"pace.keep({name}=...) was called twice")
        pairs = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
        for save, load in pairs:
            if hasattr(thing, save) and hasattr(thing, load):
                put_back = getattr(thing, load)
                self._names_kept |= {f"own {name}", f"drawn {name}"}
                self.add(f"own {name}", getattr(thing, save), put_back)
                if save == "state_dict":
                    self._kept.append(thing)
                    drawn = partial(self._draw_again, put_back)
                    self.add(f"drawn {name}", lambda: self.drawn(thing), drawn)
                return
        raise ConfigError(
            f"pace.keep({name}=...) needs an object with state_dict() and load_state_dict(), "
            f"got {type(thing).__name__}"
        )

    def is_kept(self, thing: Any) -> bool:
        """Whether the user keeps this object."""
        return any(kept is thing for kept in self._kept)

    def _draw_again(self, put_back: Callable[[Any], None], drawn: list[Any] | None) -> None:
        if drawn is not None and drawn[0] == self._epoch:
            put_back(drawn[1])

    # -- writing --------------------------------------------------------------------------------

    def write_into(self, folder: str, within: Sequence[int] | None) -> None:
        """Write checkpoints into this folder from now on."""
        self._folder = CheckpointFolder(Path(folder), within=within)

    def hold(self, epoch: int) -> None:
        """Hold the state at the loop's end: a run that stops before the next loop resumes here.

        The script then repeats what it does in between, such as a scheduler's step.
        """
        self._held = epoch, self._pack()

    def release(self) -> None:
        """Drop the held state: the next loop has begun."""
        self._held = None

    def is_held(self, behind: int) -> bool:
        """Whether the state of the end of this epoch's loop is held."""
        return self._held_at(behind) is not None

    def write(self, number: int, behind: int = -1) -> None:
        """Write this member's part of checkpoint ``number``. OSError: the disk.

        Args:
            behind: the epoch at whose end the checkpoint was taken; -1: taken elsewhere.
        """
        held = self._held_at(behind)
        packed = self._pack().own if held is None else held.own
        self._write(number, f"worker-{self._seat}", packed)

    def write_kept(self, number: int, behind: int = -1) -> None:
        """Write what the user keeps, as the main member; otherwise as ``write``."""
        held = self._held_at(behind)
        self._write(number, _MAIN, self._pack_kept() if held is None else held.kept)

    def _write(self, number: int, name: str, packed: _Packed) -> None:
        from safetensors.torch import save

        own, tensors = packed
        with self._aside(number) as aside:
            # Complete or not there: who dies or is late here leaves no part that is sealed.
            aside.replace(f"{name}.safetensors", save(tensors))
            aside.replace(f"{name}.json", json.dumps(own, allow_nan=False).encode())

    def _held_at(self, behind: int) -> _State | None:
        """Return the state at the end of that epoch's loop, if it is held."""
        if self._held is not None and self._held[0] == behind:
            return self._held[1]
        return None

    def _pack_kept(self) -> _Packed:
        tensors: dict[str, Tensor] = {}
        return self._packed(self._names_kept, tensors), tensors

    def _pack(self) -> _State:
        kept = self._pack_kept()
        tensors = dict(kept[1])
        own = kept[0] | self._packed(self._parts.keys() - self._names_kept, tensors)
        return _State((own, tensors), kept)

    def _packed(self, names: Collection[str], tensors: dict[str, Tensor]) -> dict[str, Any]:
        parts = self._parts
        return {name: pack(parts[name][0](), tensors, name) for name in parts if name in names}

    def write_tensors(
        self, number: int, layout: Layout, read: Callable[[TensorPlace], Tensor]
    ) -> None:
        """Write the tensors of a split model, one in memory at a time."""
        files = {MODEL: (layout.parameters, layout.buffers), OPTIMIZER: (layout.state,)}
        with self._aside(number) as aside:
            for name, sections in files.items():
                places = {one.name: one for section in sections for one in section.places}
                shapes = {one.name: one.without_memory() for one in places.values()}
                aside.replace(name, tensor_chunks(shapes, partial(_read_from, places, read)))
        self.write_layout(number, layout, None)

    def write_layout(self, number: int, layout: Layout, at: int | None) -> None:
        """Write the layout of the pinned block, which starts at byte ``at``; None: no block."""
        numbers = [entry.place.name for entry in layout.entries if entry.is_number]
        text = json.dumps({"at": at, "numbers": numbers, **layout.rows()})
        with self._aside(number) as aside:
            aside.write(LAYOUT, text.encode())

    def _aside(self, number: int) -> AbstractContextManager[OpenFolder]:
        assert self._folder is not None
        return self._folder.open_aside(number)

    # -- resuming -------------------------------------------------------------------------------

    def load(self, model: nn.Module, rule: Optimizer) -> None:
        """Put parameters, buffers and optimizer state into the objects that hold them.

        Args:
            rule: the optimizer that the store applies: the user's own, or one of differences.

        Raises:
            ConfigError: they are of another model, or what was written is damaged.
        """
        if self._found is None:
            return
        _load_model(model, load_tensors(self._found / MODEL))
        _load_optimizer(rule, list(model.parameters()), self._found)

    def _read_own(self, found: Path) -> dict[str, Any]:
        """This seat's part; if there is none, another seat's, which serves as well; of what the
        user keeps, the main member's."""
        seats = _seats_of(found)
        if not seats:
            raise ConfigError(f"the checkpoint {found} has no part of a worker")
        own = _read_part(
            found, self._seat if self._seat in seats else seats[self._seat % len(seats)]
        )
        return own | (_read(found, _MAIN) if f"{_MAIN}.json" in _files_of(found) else {})


def _read_from(
    places: Mapping[str, TensorPlace], read: Callable[[TensorPlace], Tensor], name: str
) -> Tensor:
    return read(places[name])


def _seats_of(found: Path) -> list[int]:
    """The seats whose parts a checkpoint has, by its manifest: no other file was verified."""
    names = map(_PART.fullmatch, _files_of(found))
    return sorted(int(match[1]) for match in names if match)


def _files_of(found: Path) -> Collection[str]:
    files: Collection[str] = Checkpoint(found, 0, ()).json(MANIFEST).get("files", {})
    return files


def _read_part(found: Path, seat: int) -> dict[str, Any]:
    return _read(found, f"worker-{seat}")


def _read(found: Path, part: str) -> dict[str, Any]:
    tensors = load_tensors(found / f"{part}.safetensors")
    try:
        rows = Checkpoint(found, 0, ()).json(f"{part}.json")
        return {name: unpack(value, tensors) for name, value in rows.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{found}/{part}.json is damaged: {error!s:.300}") from None


def _load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(own.keys() ^ saved.keys()):
        where = "this model" if name in own else "the checkpoint"
        raise ConfigError(f"{name!r:.200} is only in {where}: the checkpoint is of another model")
    with torch.no_grad():
        for name, tensor in own.items():
            value = saved[name]
            if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                raise ConfigError(
                    f"{name!r} is {value.dtype} of shape {tuple(value.shape)} in the checkpoint, "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)} in this model"
                )
            tensor.copy_(value)


def _load_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter], found: Path) -> None:
    """The state of each parameter, in the layout's order: ``0.exp_avg`` is of parameter 0."""
    try:
        layout = Checkpoint(found, 0, ()).json(LAYOUT)
        rows, numbers = layout["state"], set(layout["numbers"])
        saved = load_tensors(found / OPTIMIZER)
        exists = {name.partition(".")[0] for name in saved if _is_made(name, saved)}
        for name, dtype, _, shape, strides, _ in rows:
            text, _, key = name.partition(".")
            if key == EXISTS or text not in exists:
                continue
            value = saved[name]
            if name in numbers:
                number = float(value)
                made: Any = int(number) if number.is_integer() else number
            else:
                made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
                made.copy_(value)
            optimizer.state[parameters[int(text)]][key] = made
    except (OSError, *_REFUSALS) as error:
        raise ConfigError(f"the optimizer's state in {found} is damaged: {error!r:.300}") from None


def _is_made(name: str, saved: Mapping[str, Tensor]) -> bool:
    """Whether this entry says that the optimizer has made its parameter's state."""
    return name.endswith(f".{EXISTS}") and bool(saved[name].any())


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group: lr, momentum, ..."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Set each group to what ``groups_of`` returned."""
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"the optimizer of the checkpoint has {len(groups)} parameter groups, this one "
            f"{len(optimizer.param_groups)}"
        )
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for name, value in values.items():
            if name in group and not _are_alike(group[name], value):
                raise ConfigError(
                    f"the optimizer's {name} is {value!r:.50} in the checkpoint, here it is "
                    f"{group[name]!r:.50}"
                )
        group.update(values)


def _are_alike(now: Any, was: Any) -> bool:
    """Whether a setting that was read can take the other's place: numbers, or one type.

    Args:
        now: of a live optimizer; as a checkpoint would give it back, numbers are Python's.
    """
    tensors: dict[str, Tensor] = {}
    with contextlib.suppress(ConfigError):
        now = unpack(pack(now, tensors), tensors)
    if _is_number(now) and _is_number(was):
        return math.isfinite(was) or float(now) == float(was) or math.isnan(now)
    if isinstance(now, tuple | list) and isinstance(was, tuple | list):
        return len(now) == len(was) and all(map(_are_alike, now, was))
    return now is None or was is None or type(now) is type(was)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- what a member that comes later is told --------------------------------------------------------


def settings_text(optimizer: Optimizer, schedules: Schedules) -> str:
    """The settings of all parameter groups, the state of each schedule, and the epoch's start."""
    place = schedules.place
    return json.dumps({
        "groups": [_plain(group) for group in optimizer.param_groups],
        "schedules": [_plain(schedule.state()) for schedule in schedules],
        "strays": [_plain(stray.state_dict()) for stray in schedules.strays],
        "epoch": (place.epoch_version, place.epoch_applied),
    })  # fmt: skip


def adopt(text: str, optimizer: Optimizer, schedules: Schedules) -> None:
    """Take over the settings of `settings_text` that exist here, too."""
    values = json.loads(text)
    schedules.place.begin(*values["epoch"])
    for group, said in zip(optimizer.param_groups, values["groups"], strict=False):
        group.update({name: _like(group[name], said[name]) for name in said if name in group})
    for schedule, said in zip(schedules, values["schedules"], strict=False):
        schedule.load(_merged(schedule.state(), said))
    schedules.take_strays = partial(_take_strays, values["strays"])


def _take_strays(rows: Sequence[dict[str, Any]], strays: Sequence[AnyScheduler]) -> None:
    for one, said in zip(strays, rows, strict=False):
        one.load_state_dict(_merged(one.state_dict(), said))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values that can be sent; of a scheduler of schedulers, those of each."""
    said = {name: value.item() if _is_scalar(value) else value for name, value in values.items()}
    return {
        name: list(map(_plain, value)) if _are_dicts(value) else value
        for name, value in said.items()
        if name != "params" and (_is_plain(value) or _are_dicts(value))
    }


def _is_scalar(value: object) -> bool:
    """Whether it is a scalar tensor, as a learning rate may be."""
    return isinstance(value, Tensor) and value.ndim == 0


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _are_dicts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """``before`` updated with what was sent; the script has made the rest."""
    return before | {name: _like(before.get(name), value) for name, value in said.items()}


def _like(before: object, value: Any) -> object:
    """``value`` in the type of ``before``: JSON has no tuples and no tensors."""
    if isinstance(before, list) and _are_dicts(before) and _are_dicts(value):
        return [_merged(one, said) for one, said in zip(before, value, strict=True)]
    if isinstance(before, Tensor) and isinstance(value, int | float):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def extra_states(model: nn.Module, *, is_kept: bool) -> Iterator[tuple[str, nn.Module]]:
    """Modules with state besides tensors, by ``get_extra_state``.

    Args:
        is_kept: whether they are kept in checkpoints.

    Raises:
        ConfigError: a checkpoint cannot hold such a state.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            if is_kept and not can_be_packed(module.get_extra_state()):
                raise ConfigError(
                    f"the extra state of {name or 'the model'} ({type(module).__name__}."
                    "get_extra_state) is not made of numbers, strings, tensors, lists and dicts, "
                    "which a checkpoint can hold: change it, or give --checkpoint-every never"
                )
            yield name, module
