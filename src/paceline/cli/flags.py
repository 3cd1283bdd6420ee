"""The flags of a run, made from its settings, and the way back to settings.

``config.py`` is the one place where a setting is described; here each becomes a flag with the
same help. This module must not know what the settings do.
"""

import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..config import NAMES, TYPES, RunSettings, default_of, help_of, resolve

_DEFAULTS = {
    "workers": "the GPUs that are seen, or 1",
    "batch_size": "the task's or the loader's",
    "lr": "the task's or the optimizer's",
    "epochs": "the task's or the script's",
    "threads": "cores / workers",
    "stall_after": "who sleeps: never; who is stopped: after 3 usual steps",
    "precision": "the script's own",
    "loader_workers": "the loader's",
    "run_dir": "runs/NAME",
    "name": "from the task, the protocol and the time",
}
"""Defaults that are found when a run starts."""


def _field(name: str) -> tuple[str, Any, Any]:
    """One flag: None where it was not given, so that what was given can be told apart."""
    kind = TYPES[name]
    if typing.get_origin(kind) is tuple:
        kind = list[str]
    default = default_of(name)
    plain = "" if default is None or default is False or default == () else str(default)
    shown = _DEFAULTS.get(name, plain)
    text = f"{help_of(name)} [default: {shown}]" if shown else help_of(name)
    negative = None if kind is bool and name != "json" else ()
    parameter = Parameter(help=text, show_default=False, negative=negative)
    return name, Annotated[kind | None, parameter], None


if TYPE_CHECKING:

    class Flags:
        """What was given on the command line, by the names of ``RunSettings``."""

else:
    Flags = dataclasses.make_dataclass(
        "Flags", [_field(name) for name in NAMES], frozen=True, kw_only=True
    )
    # Before Python 3.12 such a class says that it lives in "types", and is taken for a builtin.
    Flags.__module__ = __name__

NO_FLAGS = Flags()
RunFlags = Annotated[Flags, Parameter(name="*")]
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config", help="Settings file (TOML or YAML) [default: paceline.toml, if here]"
    ),
]


def given(flags: Flags) -> dict[str, object]:
    """Only what was given explicitly."""
    values = {name: getattr(flags, name) for name in NAMES}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(flags: Flags, config: Path | None) -> RunSettings:
    """The settings of a run; workers are the accelerators that are seen, where nobody chose."""
    resolved = resolve(given(flags), config)
    if resolved.settings.resume is not None:
        from ..checkpoints.resumption import adopt

        return adopt(resolved)
    settings = resolved.settings
    if resolved.origins["workers"] == "default":
        from ..replica.device import count_accelerators

        return dataclasses.replace(settings, workers=max(1, count_accelerators(settings.device)))
    return settings
