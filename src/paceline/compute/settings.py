"""What an optimizer and its schedules are set to, as text, from one worker to another.

A worker that joins a run under way has the script's first learning rate; this brings it to that of
the others. Only plain numbers, words and lists of them travel. It must not know how.
"""

import json
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from .schedule import Schedule


def settings_text(optimizer: Optimizer, schedules: Sequence[Schedule]) -> str:
    """The settings of all parameter groups, and where each schedule stands."""
    groups = [_plain(group) for group in optimizer.param_groups]
    return json.dumps({"groups": groups, "schedules": [_plain(one.state()) for one in schedules]})


def adopt(text: str, optimizer: Optimizer, schedules: Sequence[Schedule]) -> None:
    """Take over what `settings_text` said, where there is the same setting."""
    values = json.loads(text)
    for group, said in zip(optimizer.param_groups, values["groups"], strict=False):
        group.update({name: _like(group[name], said[name]) for name in said if name in group})
    for schedule, said in zip(schedules, values["schedules"], strict=False):
        before = schedule.state()
        schedule.load({name: _like(before.get(name), value) for name, value in said.items()})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "params" and _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _like(before: object, value: object) -> object:
    """JSON has no tuples."""
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
