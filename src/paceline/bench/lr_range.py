"""A learning-rate range test over N workers: loss against rate, and the rate to take.

    N workers train, the rate grows each update (lr_worker.py) -> the run's trace
    loss of each update at its rate -> smoothed -> where it falls fastest, is least, rises again

The run is a real one, under any protocol, so the loss of an update is that of the samples that it
averages, and a rate that is too high for this number of workers shows. Above 300 lines, since
measurement, table and picture are one file. This module must not know how a run is carried out.

Source: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
Changed: the rate grows geometrically, so that it can span orders of magnitude, and the loss is
observed instead of the accuracy.
"""

import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import RunSettings
from ..errors import ConfigError
from ..events import Apply
from ..launch.launcher import launch_run
from ..program import ScriptProgram
from ..report.chart import Curve, Diagram, draw_chart
from ..report.live import QuietObserver
from ..report.summary import Summary
from ..report.text import Point, table
from ..trace import FILE_NAME, read_header, read_trace
from ..trace.records import Handed, Ordered
from ..workloads import load_task
from .lr_script import script_program
from .lr_worker import LrRamp

_IN_WORKER = f"{__package__}.lr_worker"
_HALF = 2
"""Updates on each side of an update that its smoothed loss averages."""
_FEWEST_UPDATES = 4 * _HALF + 2
_LEAST_FALL = 0.03
"""Share of the first loss: a curve that falls by less gives no advice."""
_SAFE = 3.0
"""The advised rate is at least this factor below the rate of the least loss."""
_RISES = 0.1
"""Share of the whole fall by which the loss must exceed its least value to count as rising."""
_ROWS = 14
_BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LrQuestion:
    """The question.

    Args:
        ramp: the task or script, and the rates.
        args: of the script.
        workers: N >= 1.
        protocol: when their gradients are combined.
        device: of the workers.
        seed: of weights and sample order.
    """

    ramp: LrRamp
    args: tuple[str, ...] = ()
    workers: int = 1
    protocol: str = "full-sync"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        ramp = self.ramp
        if not 0.0 < ramp.lowest < ramp.highest < math.inf:
            raise ConfigError(
                f"--lowest and --highest must be rates with 0 < lowest < highest, got "
                f"{ramp.lowest:g} and {ramp.highest:g}"
            )
        if ramp.updates < _FEWEST_UPDATES:
            raise ConfigError(f"--updates must be >= {_FEWEST_UPDATES}, got {ramp.updates}")
        if self.args and not ramp.is_script:
            raise ConfigError(f"{ramp.spec} is a task, but {' '.join(self.args)} is for a script")
        if ramp.is_script and (ramp.batch_size is not None or ramp.init is not None):
            raise ConfigError(
                "--batch-size, --mini-batch-size and --init are for tasks: a script has its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """The result.

    Attributes:
        samples: that an update averages.
        source: the data.
        rates, losses: of each update, in order; the loss is of the parameters before it.
        cut_after: updates after which the script's loop ended early; None: it did not.
    """

    question: LrQuestion
    samples: int
    source: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    cut_after: int | None = None

    @property
    def smooth(self) -> tuple[float, ...]:
        """Each loss as a centred mean of its neighbours, of fewer at the ends."""
        means = []
        for i in range(len(self.losses)):
            half = min(_HALF, i, len(self.losses) - 1 - i)
            near = self.losses[i - half : i + half + 1]
            means.append(sum(near) / len(near))
        return tuple(means)

    @property
    def lowest(self) -> int:
        """The update with the least smoothed loss."""
        smooth = self.smooth
        return min(range(len(smooth)), key=smooth.__getitem__)

    @property
    def falls(self) -> bool:
        """Whether the loss falls enough for advice."""
        start = sum(self.losses[:_HALF]) / _HALF
        return start - self.smooth[self.lowest] > _LEAST_FALL * abs(start)

    @property
    def steepest(self) -> int:
        """The update at which the loss falls fastest against the logarithm of the rate."""
        smooth = self.smooth
        inside = range(_HALF, max(_HALF + 1, self.lowest - _HALF + 1))
        last = len(smooth) - 1

        def slope(i: int) -> float:
            return smooth[min(last, i + _HALF)] - smooth[max(0, i - _HALF)]

        return min(inside, key=slope)

    @property
    def rises(self) -> int | None:
        """The first update after the lowest at which the loss has risen again; None: it has not."""
        smooth, low = self.smooth, self.lowest
        edge = smooth[low] + _RISES * (self.losses[0] - smooth[low])
        return next((i for i in range(low, len(smooth)) if smooth[i] > edge), None)

    @property
    def advised(self) -> float | None:
        """The advised rate, to two figures; None if the loss does not fall."""
        if not self.falls:
            return None
        rate = min(self.rates[self.steepest], self.rates[self.lowest] / _SAFE)
        return float(f"{rate:.2g}")

    @property
    def reason(self) -> str:
        """The reason for the advice, in words."""
        if self.advised is None:
            words = f"the loss does not fall between {self.rates[0]:.3g} and {self.rates[-1]:.3g}"
            if self.cut_after is not None:
                return f"{words}, and {self._cut()}"
            more = "" if self.question.ramp.is_script else ", or another --init"
            return f"{words}: try a higher --highest, more --updates{more}"
        steepest, lowest = self.rates[self.steepest], self.rates[self.lowest]
        words = f"the loss falls fastest at {steepest:.2g} and is least at {lowest:.2g}"
        if steepest > lowest / _SAFE:
            words += "; advised is a third of that, since a whole training is longer than this test"
        if self.rises is not None:
            words += f"; from {self.rates[self.rises]:.2g} on it rises"
        elif self.cut_after is not None:
            words += f"; higher rates than {self.rates[-1]:.3g} were not tried, since {self._cut()}"
        return words

    def _cut(self) -> str:
        """Return the note that the script's loop ended early, and what to try."""
        made, wanted = self.cut_after or 0, self.question.ramp.updates
        fewer = f", or use --updates {made}" if made >= _FEWEST_UPDATES else ""
        words = f"the script's loop ended after {made} of {wanted} updates"
        return f"{words}: give it more epochs{fewer}"


def measure_range(question: LrQuestion) -> LrRange:
    """Run the test and return the losses by rate.

    Raises:
        ConfigError: the task is unknown, the run's settings are invalid, or too few losses are
            finite.
        WorkerError: a worker failed.
    """
    ramp = question.ramp
    if ramp.is_script:
        source, program = "the script's own data", script_program(ramp, question.args)
    else:
        source = load_task(ramp.spec, question.workers, ramp.init).splits().source
        program = ScriptProgram(path=_IN_WORKER, args=(ramp.write(),), is_module=True)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        run = Path(folder) / "run"
        settings = RunSettings(
            workers=question.workers, protocol=question.protocol, device=question.device,
            seed=question.seed, run_dir=str(run), checkpoint_every="never", nonfinite="skip",
            updates=ramp.updates if ramp.is_script else None,
        )  # fmt: skip
        summary = launch_run(program, settings, QuietObserver(io.StringIO()))
        header = read_header(run / FILE_NAME)
        losses = [(i, loss) for i, loss in enumerate(_losses(run)) if math.isfinite(loss)]
    if len(losses) <= 2 * _HALF:
        raise ConfigError(
            f"the loss was not finite after {len(losses)} updates at rates from "
            f"{ramp.lowest:g}: begin lower, with --lowest {ramp.lowest / 100:g}"
        )
    cut_after = None
    if isinstance(summary, Summary) and summary.ended == "finished":
        cut_after = summary.updates if summary.updates < ramp.updates else None
    return LrRange(
        question=question,
        samples=header.number("batch_size"),
        source=source,
        rates=tuple(ramp.rate(version) for version, _ in losses),
        losses=tuple(loss for _, loss in losses),
        cut_after=cut_after,
    )


def _losses(run: Path) -> Iterator[float]:
    """Yield each update's loss: the mean of its pushes' losses, with the weights of the update."""
    pushes: dict[tuple[int, int], float] = {}
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[record.fact.ticket[:2]] = record.fact.loss
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            tickets, weights = record.order
            pairs = zip(tickets, weights, strict=True)
            yield sum(pushes[ticket[:2]] * weight for ticket, weight in pairs) / sum(weights)


def render_range(result: LrRange) -> list[str]:
    """Return the lines of the report: loss against rate, then the advice."""
    smooth = result.smooth
    stride = max(1, -(-len(smooth) // _ROWS))
    chosen = sorted({*range(0, len(smooth), stride), result.lowest, result.steepest})
    most = 1.25 * max(result.losses[: _HALF + 1])
    marks = {result.steepest: "falls fastest", result.lowest: "least"} if result.falls else {}
    rows = [
        (
            f"{result.rates[i]:.2g}",
            f"{smooth[i]:.4g}",
            f"{'#' * max(0, min(_BAR, round(_BAR * smooth[i] / (most or 1.0)))):<{_BAR}}|",
            marks.get(i, ""),
        )
        for i in chosen
    ]
    question = result.question
    where = f"{question.workers} worker{'s' * (question.workers != 1)}, {question.protocol}"
    lines = [
        f"{question.ramp.spec}: {where}, {result.samples:,} samples an update; {result.source}",
        "",
    ]
    lines += [*table(("lr", "loss", "", ""), rows), ""]
    advised = result.advised
    return [*lines, f"--lr {advised:g}: {result.reason}" if advised is not None else result.reason]


def range_json(result: LrRange) -> dict[str, object]:
    """Return the result as one JSON object."""
    rises = result.rises
    return {
        "task": result.question.ramp.spec,
        "source": result.source,
        "workers": result.question.workers,
        "protocol": result.question.protocol,
        "samples_per_update": result.samples,
        "rates": list(result.rates),
        "losses": list(result.losses),
        "smoothed_losses": list(result.smooth),
        "steepest": result.rates[result.steepest],
        "lowest": result.rates[result.lowest],
        "rises": None if rises is None else result.rates[rises],
        "cut_after": result.cut_after,
        "advised": result.advised,
        "reason": result.reason,
    }


def draw_range(result: LrRange) -> str:
    """Return an SVG file's text: loss over the learning rate, on a logarithmic axis."""
    start = math.floor(math.log10(result.rates[0]))
    # A diverging loss would flatten the rest of the curve.
    ceiling = 2.0 * max(result.losses[: _HALF + 1])

    def points(values: Sequence[float]) -> tuple[Point, ...]:
        pairs = zip(result.rates, values, strict=True)
        return tuple(
            Point(t=math.log10(rate) - start, value=min(value, ceiling)) for rate, value in pairs
        )

    smooth = points(result.smooth)
    curves = [
        Curve(name=f"mean of {2 * _HALF + 1} updates (thin: each)", points=smooth,
              others=(points(result.losses),)),
    ]  # fmt: skip
    if result.falls:
        marks = ((result.steepest, "falls fastest"), (result.lowest, "least"))
        curves += [
            Curve(name=f"{words}: {result.rates[i]:.2g}", points=(smooth[i],), dots=(smooth[i],))
            for i, words in marks
        ]
    question = result.question
    advised = "no rate is advised" if result.advised is None else f"advised: {result.advised:g}"
    return draw_chart(
        f"{question.ramp.spec}: loss against learning rate",
        f"{question.workers} workers, {question.protocol}, {result.samples:,} samples an update; "
        f"{advised}",
        [
            Diagram(
                label="training loss of an update",
                curves=tuple(curves),
                x_label="learning rate",
                log10_from=start,
                stop=math.log10(result.rates[-1]) - start,
            )
        ],
    )
