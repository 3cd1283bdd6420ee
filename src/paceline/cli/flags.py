"""What verbs share: a run's flags, the flags of other launchers, and how a result is printed.

``config.py`` is the one place where a setting is described; here each becomes a flag with the same
help, and the given flags become settings again. Flags of other launchers are translated, or
refused with what to use instead. It also finds where our flags end: ``paceline launch`` passes
everything after the script's name to the script. A verb's result goes to standard output, its
progress to standard error. This module must not know what the settings do.
"""

import dataclasses
import json
import os
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..config import NAMES, TYPES, RunSettings, default_of, flag_of, help_of, resolve
from ..errors import ConfigError, unknown
from ..system.streams import Lasting

_DEFAULTS = {
    "workers": "the number of visible GPUs, or 1",
    "batch_size": "the task's",
    "accumulate": "the script's, or 1",
    "lr": "the task's",
    "epochs": "the task's or the script's",
    "threads": "cores / workers, at most OMP_NUM_THREADS",
    "stall_after": "sleeping workers: never; stopped ones: after 3 typical steps",
    "precision": "the script's own",
    "loader_workers": "the loader's",
    "run_dir": "runs/NAME",
    "name": "from the task, the protocol and the time",
}
"""Defaults that are determined when a run starts, in words."""


def _field(name: str) -> tuple[str, Any, Any]:
    """Name, type and default of one flag; None where it is not given, unlike any setting."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFlags:
    """Workers on several machines; see ``launch/nodes.py``."""

    nodes: Annotated[
        int | None,
        Parameter(help="Number of machines, each with --workers-per-node workers; without "
                  "MASTER_ADDR all workers are started on this machine."),
    ] = None  # fmt: skip
    workers_per_node: Annotated[
        int | None, Parameter(help="Number of workers on each of --nodes.")
    ] = None


if TYPE_CHECKING:

    class Flags:
        """The flags on the command line, by the names of ``RunSettings``."""

else:
    Flags = dataclasses.make_dataclass(
        "Flags", [_field(name) for name in NAMES], frozen=True, kw_only=True
    )
    # Before Python 3.12 its module would be "types", and cyclopts would take it for a builtin.
    Flags.__module__ = __name__

NO_FLAGS = Flags()
RunFlags = Annotated[Flags, Parameter(name="*")]
ONE_NODE = NodeFlags()
OfNodes = Annotated[NodeFlags, Parameter(name="*")]
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config", help="Settings file (TOML or YAML) [default: paceline.toml, if here]"
    ),
]


def given(flags: Flags) -> dict[str, object]:
    """The flags that were given explicitly, by name."""
    values = {name: getattr(flags, name) for name in NAMES}
    return {name: value for name, value in values.items() if value is not None}


def with_workers(flags: Flags, workers: int) -> Flags:
    """These flags with another number of workers."""
    return Flags(**{**given(flags), "workers": workers})


def settings_of(flags: Flags, config: Path | None) -> RunSettings:
    """The settings of a run; without a number of workers, one for each visible accelerator."""
    resolved = resolve(given(flags), config)
    if resolved.settings.resume is not None:
        from ..checkpoints.resumption import adopt

        return adopt(resolved)
    settings = resolved.settings
    if resolved.origins["workers"] == "default":
        from ..system.processors import count_accelerators

        return dataclasses.replace(settings, workers=max(1, count_accelerators(settings.device)))
    return settings


# -- flags of other launchers ----------------------------------------------------------------------

ALIASES: Mapping[str, str] = {
    "--num-processes": "--workers",
    "--num-workers": "--workers",
    "--nproc-per-node": "--workers",
    "--np": "--workers",
    "-n": "--workers",
    "--num-nodes": "--nodes",
    "--nnodes": "--nodes",
    "--learning-rate": "--lr",
    "--sync": "--protocol",
    "--strategy": "--protocol",
}
"""Flags of other launchers for the same setting; ``_`` is accepted for ``-``."""

ANSWERS: Mapping[str, str] = {
    "--gpus": "paceline counts workers, one per GPU: use --workers N --device cuda "
    "(by default one for each visible GPU), or --nodes N --workers-per-node W",
    "--gpu": "use --device cuda:N for one GPU, or --workers N --device cuda for N of them",
    "--node-rank": "each machine reads its rank from the environment: NODE_RANK=1 "
    "MASTER_ADDR=10.0.0.1 paceline launch --nodes 2 --workers-per-node W SCRIPT",
    "--backend": "the device decides how gradients move; to choose, use --path store or "
    "--path peers",
    "--steps": "a worker's steps are not the run's updates: use --updates N to limit updates",
    "--max-steps": "a worker's steps are not the run's updates: use --updates N to limit updates",
}
"""Flags that do not exist here, and what to use instead."""

_SWITCHES = frozenset(flag_of(name) for name in NAMES if TYPES[name] is bool) | {
    "--help", "-h", "--check",
}  # fmt: skip
"""Flags of ``launch`` that take no value."""
_VALUED = frozenset(flag_of(name) for name in NAMES if TYPES[name] is not bool) | {
    "--config", "--nodes", "--workers-per-node",
}  # fmt: skip


def translate(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our tokens with our flags' names, and the script's (from ``--`` on).

    Raises:
        ConfigError: a flag is one of ``ANSWERS``, or is unknown to ``launch`` or ``doctor``.
    """
    if tokens and tokens[0] == "launch":
        own, rest = _split(tokens[1:])
        return ["launch", *own], rest
    if tokens and tokens[0] == "doctor":
        own, rest = _split_doctor(tokens[1:])
        return ["doctor", *own], rest
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return [_ours(token) for token in tokens[:end]], list(tokens[end:])


def _ours(token: str) -> str:
    """One token with our flag's name; a value stays as it is."""
    flag, equals, value = token.partition("=")
    spelled = flag.replace("_", "-") if flag.startswith("--") else flag
    if spelled in ANSWERS:
        raise ConfigError(f"there is no {flag}: {ANSWERS[spelled]}")
    return ALIASES.get(spelled, spelled) + equals + value


def _split(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of ``launch``, and the script's tokens: its name and all after it."""
    own: list[str] = []
    i = 0
    while i < len(tokens):
        token = _ours(tokens[i])
        if token in ("-m", "--module"):
            return [*own, "--module"], ["--", *tokens[i + 1 :]]
        if token == "--":
            return own, ["--", *tokens[i + 1 :]]
        if not token.startswith("-"):
            return own, ["--", *tokens[i:]]
        flag, equals, _ = token.partition("=")
        name = flag.replace("--no-", "--", 1)
        if name not in _SWITCHES and flag not in _VALUED:
            raise unknown("flag", flag, _SWITCHES | _VALUED | {"-m"}, "before the script's name")
        own.append(token)
        if flag in _VALUED and not equals and i + 1 < len(tokens):
            i += 1
            own.append(tokens[i])
        i += 1
    return own, []


def _split_doctor(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of ``doctor``, wherever they are, and the script's tokens."""
    from .doctor import DoctorFlags

    kinds = {
        f"--{field.name.replace('_', '-')}": field.type for field in dataclasses.fields(DoctorFlags)
    }
    switches = {name for name, kind in kinds.items() if kind is bool} | {"--help", "-h"}
    own: list[str] = []
    rest: list[str] = []
    has_script = False
    remaining = iter(tokens)
    for token in remaining:
        flag, equals, _ = token.partition("=")
        if token == "--":
            rest += remaining
        elif flag in switches or flag in kinds:
            own.append(token)
            has_value = flag not in switches and not equals
            own += [value for value in (next(remaining, None),) if value] if has_value else []
        elif has_script:
            rest.append(token)
        elif token.startswith("-"):
            raise unknown("flag", flag, {*kinds, *switches}, "before the script's name")
        else:
            has_script = True
            own.append(token)
    return own, ["--", *rest] if rest else []


Json = Annotated[bool, Parameter(negative=(), help="Print the result as one JSON object.")]
"""The flag of every verb that has a result."""


def show(
    is_json: bool, fields: Callable[[], Mapping[str, Any]], lines: Callable[[], Iterable[str]]
) -> None:
    """Print the result, as one JSON object or in lines."""
    print(json.dumps(fields(), allow_nan=False) if is_json else "\n".join(lines()))


def writable(path: Path | None) -> None:
    """Check before the work that a file can be written there; None: none is wanted.

    Raises:
        ConfigError: its folder does not exist, the path is a folder, or permission is denied.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        parent = f"cannot be written: {path.parent} is not a folder"
        what = "is a folder" if path.is_dir() else parent
        raise ConfigError(f"{path} {what}; name a file in an existing folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied; name another file")


def draw(path: Path | None, picture: Callable[[], str]) -> None:
    """Write an SVG in UTF-8, whatever the locale; None: none is wanted."""
    if path is not None:
        path.write_text(picture(), encoding="utf-8")


_MEMORY_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_memory(text: str) -> int:
    """``512MiB`` or ``2GiB`` in bytes.

    Raises:
        ConfigError: it is not a size of that form, or less than a byte.
    """
    number, unit = text[:-3], text[-3:].lower()
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    num_bytes = value * _MEMORY_UNITS.get(unit, 0)
    if not 1 <= num_bytes < float("inf"):
        raise ConfigError(f"--memory must be a size such as 512MiB or 2GiB, got {text!r}")
    return int(num_bytes)


def say(line: str) -> None:
    """Print a line on standard error."""
    errors = Lasting(sys.stderr)
    errors.write(f"{line}\n")
    errors.flush()


def num_columns() -> int:
    """Width of the terminal; 80 where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
