"""``paceline report``: the summary of a run, or what became of one sample, from its trace."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cyclopts import App

from ..errors import ConfigError
from .output import Json, num_columns, show


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(report)


def report(
    run: Path = Path("runs/latest"),
    /,
    *,
    sample: int | None = None,
    position: int | None = None,
    json: Json = False,
) -> None:
    """Print the summary of a run again, or what became of one sample.

    Example: paceline report runs/latest --sample 123

    Parameters
    ----------
    run
        The run's folder.
    sample
        Which update used this sample of the data set, by which worker and how stale.
    position
        The same for a position in the order of the epochs, where a script has its own sampler.
    """
    if sample is not None or position is not None:
        _report_sample(run, sample, position, is_json=json)
        return
    from ..report.summary import summarize
    from ..report.terminal import render_summary

    summary = summarize(run)
    show(json, summary.to_json, lambda: render_summary(summary, num_columns()))


def _report_sample(run: Path, sample: int | None, position: int | None, *, is_json: bool) -> None:
    from ..data.order import redraw
    from ..report.whereabouts import render_sample, report_sample
    from ..trace.records import Header

    if sample is not None and position is not None:
        raise ConfigError("--sample and --position name the same thing twice; give one of them")

    def draw(header: Header, epoch: int) -> Sequence[int]:
        num_samples = header.number("num_samples")
        if position is not None:
            return range(num_samples)
        kind = header.text("order", "own")
        return redraw(kind, num_samples, header.number("seed"), epoch)

    wanted = sample if sample is not None else position
    assert wanted is not None
    found = report_sample(run, wanted, draw)
    show(is_json, lambda: asdict(found), lambda: render_sample(found))
