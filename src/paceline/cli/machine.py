"""``paceline env``, ``data`` and ``config``: this machine, its data sets, a run's settings."""

import json as json_text
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from ..config import MOST_PROCESSES, NAMES, Resolved, resolve
from ..fields import Value
from .flags import NO_FLAGS, ConfigFile, Json, RunFlags, given, say, show

if TYPE_CHECKING:
    from ..data.fetch import Inspection

data = App(name="data", help="List data sets here, and fetch them.")
config = App(name="config", help="Show settings, and where each came from.")


def env(
    *,
    require: Annotated[
        Literal["gpu"] | None,
        Parameter(help="With gpu, exit with code 1 if no GPU can be used."),
    ] = None,
    json: Json = False,
) -> None:
    """Print the processor, memory, disks, devices and libraries here, for a bug report.

    If an accelerator is present but cannot be used, the cause and a command that helps. Exit code
    0 if one can be used or none is present, 1 if one is present and none can be used.

    Example: paceline env --require gpu
    """
    from ..machine.causes import find_cause
    from ..machine.inventory import read_inventory
    from ..machine.lines import render
    from ..machine.source import MachineSource

    machine = read_inventory(MachineSource())
    verdict = find_cause(machine)
    show(
        json,
        lambda: {**verdict.to_json(), "machine": machine.to_json()},
        lambda: render(machine, verdict),
    )
    if verdict.cause is not None or (require is not None and not verdict.is_usable):
        sys.exit(1)


@data.default
def list_(*, json: Json = False) -> None:
    """List the data sets, and where each is or was searched for."""
    from ..data.catalogue import CATALOGUE, data_folders
    from ..data.fetch import inspect

    inspections = [inspect(data_set) for data_set in CATALOGUE.values()]
    show(
        json,
        lambda: {
            "data_folder": str(data_folders()[0]),
            "data_sets": [_row(inspection) for inspection in inspections],
        },
        lambda: [line for inspection in inspections for line in _lines(inspection)],
    )


@data.command
def get(name: str, /, *, json: Json = False) -> None:
    """Fetch a data set, unless it is here and its checksums are right.

    Parameters
    ----------
    name
        The data set: fashion-mnist, mnist or digits.
    """
    from ..data.fetch import fetch

    # Progress goes to standard error: with --json standard output holds only the JSON object.
    fetched = fetch(name, say=say)
    fields = {
        "name": name,
        "folder": str(fetched.folder),
        "source": fetched.source or None,
        "was_here": not fetched.source,
        "num_bytes": fetched.data_set.num_bytes,
    }
    how = f"fetched from {fetched.source}" if fetched.source else "was here already"
    line = f"{fetched.data_set.title}: {how}, checksums are right: {fetched.folder}"
    show(json, lambda: fields, lambda: [line])


def _row(inspection: "Inspection") -> dict[str, Any]:
    from ..data.catalogue import looked_in

    data_set = inspection.data_set
    return {
        "name": data_set.name,
        "title": data_set.title,
        "state": inspection.state.value,
        "folder": str(inspection.folder) if inspection.folder else None,
        "problem": inspection.problem or None,
        "looked_in": [str(folder) for folder in looked_in(data_set)],
        "num_train": data_set.num_train,
        "num_test": data_set.num_test,
        "image_shape": [data_set.side_px, data_set.side_px],
        "num_bytes": data_set.num_bytes,
        "licence": data_set.licence,
    }


def _lines(inspection: "Inspection") -> list[str]:
    """Lines on one data set: what it is, then where it is or was searched for."""
    from ..data.catalogue import looked_in

    data_set = inspection.data_set
    size = f"{data_set.side_px}x{data_set.side_px}"
    lines = [
        f"{data_set.name:<14} {inspection.state.value:<8} {data_set.num_train:,} + "
        f"{data_set.num_test:,} images {size}, {data_set.num_bytes / 1e6:,.1f} MB"
    ]
    if inspection.problem:
        lines.append(f"    {inspection.problem}")
    elif inspection.folder:
        lines.append(f"    {inspection.folder}")
    else:
        lines += [f"    not in {folder}" for folder in looked_in(data_set)]
        lines.append(f"    `paceline data get {data_set.name}` fetches it")
    return lines


@config.command(name="show")
def show_settings(
    *,
    origin: Annotated[
        bool, Parameter(negative=(), help="Show where each setting came from.")
    ] = False,
    flags: RunFlags = NO_FLAGS,
    config: ConfigFile = None,
) -> None:
    """Show the settings that a run given these flags would have."""
    explicit = given(flags)
    resolved = resolve(explicit, config)
    _check_names(resolved)
    settings = resolved.settings
    if settings.resume is not None:
        from ..checkpoints.resumption import adopt

        settings = adopt(resolved)
    values: dict[str, Value] = {name: getattr(settings, name) for name in NAMES}
    origins = {
        name: where if values[name] == getattr(resolved.settings, name) else "the run"
        for name, where in resolved.origins.items()
    }
    if resolved.settings.json:
        rows = {
            name: {"value": value, "origin": origins[name]}
            for name, value in values.items()
            if name != "json"
        }
        print(json_text.dumps({"settings": rows}, allow_nan=False))
        return
    width = max(len(name) for name in NAMES)
    texts = {name: _text(value) for name, value in values.items()}
    column = max(len(text) for text in texts.values())
    for name in NAMES:
        if name != "json":
            where = f"  {origins[name]}" if origin else ""
            print(f"{name:<{width}}  {texts[name]:<{column}}{where}".rstrip())


def _check_names(resolved: Resolved) -> None:
    """Refuse settings that every run would refuse.

    Without --workers, workers are checked against the most that one machine runs. A split has a
    number of workers itself, so it is checked only with --workers.

    Raises:
        ConfigError: a setting has an unknown name or an invalid form.
    """
    from ..checkpoints.due import parse_every
    from ..compression import parse as parse_compression
    from ..conditions.delays import parse_delays
    from ..conditions.faults import FaultPlan
    from ..conditions.slowness import parse_slowness
    from ..partition.names import read_split
    from ..protocols import protocol_of
    from ..run.collective import AUTO, path_of

    settings, has_workers = resolved.settings, resolved.origins["workers"] != "default"
    workers = settings.workers if has_workers else MOST_PROCESSES
    protocol = protocol_of(settings, workers)
    parse_delays(settings.delay, workers)
    parse_slowness(settings.slow, workers)
    FaultPlan.parse(settings.fault, workers)
    parse_every(settings.checkpoint_every)
    parse_compression(settings.compress)
    if settings.collective != AUTO:
        path_of(replace(settings, workers=workers), protocol)
    if has_workers:
        read_split(settings.split, workers)


def _text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(value) or "-"
    return str(value)
