"""``paceline probe``: what this machine takes for everything that training is made of."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .flags import Json, say, show, writable

probe = App(name="probe", help="What this machine takes: caches, memory, disk, arithmetic, links.")


@probe.default
def probe_(
    *,
    peer: str = "",
    serve: Annotated[int | None, Parameter(help="Answer probes at this port, instead.")] = None,
    folder: Path = Path(),
    picture: Path | None = None,
    json: Json = False,
) -> None:
    """Measure this machine, in less than a minute and without root, beside the textbook's numbers.

    What it finds is kept in ~/.cache/paceline/ceilings.json, where plans, partitions and benches
    look.

    Example: paceline probe --picture probe.svg
    Example: paceline probe --peer 10.0.0.7

    Parameters
    ----------
    peer
        Another machine, HOST or HOST:PORT, where paceline probe --serve 29461 runs.
    folder
        On the disk that is measured.
    picture
        An SVG file to draw it into.
    """
    from ..probe.messages import read_peer
    from ..probe.messages import serve as answer
    from ..probe.picture import draw_probe
    from ..probe.probing import ProbeQuestion, keep, probe_machine
    from ..probe.tables import render_probe

    if serve is not None:
        from ..probe.kernels import compiled

        with compiled() as kernels:
            answer(kernels, serve, say)
    writable(picture)
    if peer:
        read_peer(peer)
    found = probe_machine(ProbeQuestion(folder=folder.absolute(), peer=peer), say)
    if picture is not None:
        picture.write_text(draw_probe(found))
    show(json, found.to_json, lambda: render_probe(found))
    say(f"kept in {keep(found)}")
