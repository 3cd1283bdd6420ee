"""What an optimizer and its schedules are set to, as text, from one worker to another.

A worker that joins a run under way has the script's first learning rate; this brings it to that of
the others, and tells it at which version the epoch opened. Only plain numbers, words, and lists and
dicts of them travel. It must not know how.
"""

import json
from typing import Any

from torch.optim import Optimizer

from .schedules import Schedules


def settings_text(optimizer: Optimizer, schedules: Schedules) -> str:
    """The settings of all parameter groups, and where each schedule and the epoch stand."""
    place = schedules.place
    return json.dumps({
        "groups": [_plain(group) for group in optimizer.param_groups],
        "schedules": [_plain(one.state()) for one in schedules],
        "epoch": (place.epoch_version, place.epoch_applied),
    })  # fmt: skip


def adopt(text: str, optimizer: Optimizer, schedules: Schedules) -> None:
    """Take over what `settings_text` said, where there is the same setting."""
    values = json.loads(text)
    schedules.place.begin(*values["epoch"])
    for group, said in zip(optimizer.param_groups, values["groups"], strict=False):
        group.update({name: _like(group[name], said[name]) for name in said if name in group})
    for schedule, said in zip(schedules, values["schedules"], strict=False):
        schedule.load(_merged(schedule.state(), said))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What of it can be said, in a scheduler of schedulers what of each."""
    return {
        name: list(map(_plain, value)) if _are_dicts(value) else value
        for name, value in values.items()
        if name != "params" and (_is_plain(value) or _are_dicts(value))
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _are_dicts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """``before``, and what was said in place of it; the rest was made by the script."""
    return before | {name: _like(before.get(name), value) for name, value in said.items()}


def _like(before: object, value: Any) -> object:
    """JSON has no tuples."""
    if isinstance(before, list) and _are_dicts(before) and _are_dicts(value):
        return [_merged(one, said) for one, said in zip(before, value, strict=True)]
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
