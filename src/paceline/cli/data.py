"""``paceline data``: which data sets there are, which are here, and how to get the others."""

import json as json_format
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from ..data.fetch import Inspection

Json = Annotated[bool, Parameter(negative=(), help="One JSON object.")]


def register(app: App) -> None:
    """Put the verb into the application."""
    verb = App(name="data", help="Data sets here, and how to get them.")
    verb.default(show)
    verb.command(get)
    app.command(verb)


def show(*, json: Json = False) -> None:
    """List the data sets, and where each lies or was looked for."""
    from ..data.catalogue import CATALOGUE, data_folders
    from ..data.fetch import inspect

    found = [inspect(data_set) for data_set in CATALOGUE.values()]
    if json:
        rows = [_row(inspection) for inspection in found]
        print(json_format.dumps({"data_folder": str(data_folders()[0]), "data_sets": rows}))
        return
    for inspection in found:
        print("\n".join(_lines(inspection)))


def get(name: str, /, *, json: Json = False) -> None:
    """Fetch a data set, unless it is here and sound.

    Parameters
    ----------
    name
        The data set: fashion-mnist, mnist or digits.
    """
    from ..data.fetch import fetch

    # What is under way goes to standard error: with --json nothing else may be on standard output.
    fetched = fetch(name, say=lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        row = {
            "name": name,
            "folder": str(fetched.folder),
            "source": fetched.source or None,
            "was_here": not fetched.source,
            "num_bytes": fetched.data_set.num_bytes,
        }
        print(json_format.dumps(row))
        return
    how = f"fetched from {fetched.source}" if fetched.source else "was here already"
    print(f"{fetched.data_set.title}: {how}, every sum is right: {fetched.folder}")


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
    """One data set in a terminal: what it is, then where it is or was looked for."""
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
