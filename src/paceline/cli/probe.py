"""``paceline probe``: measure this machine's caches, memory, disk, arithmetic and links."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from ..errors import ConfigError, FileError
from .flags import Json, draw, say, show, writable

_HERE = Path()
Plot = Annotated[
    Path | None,
    Parameter(name=("--plot", "--picture"), help="Draw the picture into this SVG file."),
]

probe = App(name="probe")
"""Its help is that of `probe_`, with the examples."""


@probe.default
def probe_(
    *,
    peer: str = "",
    serve: Annotated[
        int | None,
        Parameter(help="Answer probes of other machines at this port, and measure nothing here."),
    ] = None,
    folder: Path = _HERE,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure caches, memory, disk, arithmetic and links beside the textbook's numbers.

    Takes less than a minute and needs no root. The results are kept in
    ~/.cache/paceline/ceilings.json, which plans, partitions and benches read.

    Example: paceline probe --plot probe.svg
    Example: paceline probe --peer 10.0.0.7

    Parameters
    ----------
    peer
        Measure the link to this machine, HOST or HOST:PORT; there, run paceline probe --serve
        29461 first.
    folder
        A folder on the disk to measure.
    """
    from ..probe.messages import find_peer
    from ..probe.messages import serve as answer
    from ..probe.picture import draw_probe
    from ..probe.probing import ProbeQuestion, keep, probe_machine
    from ..probe.tables import render_probe

    if serve is not None:
        if peer or plot is not None or json or folder != _HERE:
            raise ConfigError("--serve only answers probes: use it without other flags")
        from ..probe.kernels import compiled

        with compiled() as kernels:
            answer(kernels, serve, say)
    writable(plot)
    if peer:
        find_peer(peer)
    if not folder.is_dir():
        raise ConfigError(f"--folder {folder} is not a folder; name one on the disk to measure")
    result = probe_machine(ProbeQuestion(folder=folder.absolute(), peer=peer), say)
    draw(plot, lambda: draw_probe(result))
    try:
        kept = f"kept in {keep(result)}"
    except FileError as error:
        kept = f"not kept: {error}"
    show(json, result.to_json, lambda: render_probe(result))
    say(kept)


@probe.command
def roofline(
    spec: str,
    /,
    *,
    input: list[str] | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare each layer with this machine's limits: its operations, bytes, time and share.

    Example: paceline probe roofline lenet --plot roofline.svg

    Parameters
    ----------
    spec
        A task, a run's folder, or package.module:function that returns a model.
    input
        Shape of one input of your own model, batch first (repeat it for several inputs): 1,3,32,32
        or 1,128:int64.
    batch_size
        Number of samples in a batch [default: the task's, or 32].
    device
        Where to compute: auto (an accelerator, if one is here), cpu, cuda, cuda:1 ...
    """
    import torch

    from ..bench.device import chosen_device
    from ..exports.subject import parse_input
    from ..predict.split_models import SplitQuestion, find_model
    from ..probe.roofline import draw_roofline, measure_roofline, render_roofline

    writable(plot)
    shapes = tuple(parse_input(text) for text in input or ())
    subject = find_model(SplitQuestion(spec=spec, num_workers=1, inputs=shapes))
    usual = subject.task.batch_size if subject.task else 32
    batch = usual if batch_size is None else batch_size
    result = measure_roofline(subject, batch, torch.device(chosen_device(device)))
    draw(plot, lambda: draw_roofline(result))
    show(json, result.to_json, lambda: render_roofline(result))
