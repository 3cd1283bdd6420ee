"""A learning-rate range test over N workers: loss against rate, and the rate to take.

    N workers train, the rate grows each update (lr_worker.py) -> the run's trace
    loss of each update at its rate -> smoothed -> where it falls fastest, is least, rises again

The run is a real one, under any protocol, so the loss of an update is that of the samples that it
averages, and a rate that is too high with so many workers shows. Above 300 lines, since what is
measured, its table and its picture are one file. This module must not know how a run is carried
out.

Source: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
Changed: the rate grows geometrically, so that it may span orders of magnitude, and loss is looked
at in place of accuracy.
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
"""Updates on each side of one, whose mean its smoothed loss is."""
_FEWEST_UPDATES = 4 * _HALF + 2
_LEAST_FALL = 0.03
"""Of the first loss: a curve that falls by less tells nothing."""
_SAFE = 3.0
"""A rate that is advised is at least so much below that of the least loss."""
_RISES = 0.1
"""Of the whole fall: by so much above the least loss, it rises again."""
_ROWS = 14
_BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LrQuestion:
    """What is asked for.

    Args:
        ramp: the task, or the script, and its rates.
        args: the script's own.
        workers: N >= 1.
        protocol: when their gradients are combined.
        device: where they compute.
        seed: of weights and order.
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
            raise ConfigError(f"{ramp.spec} is a task, and {' '.join(self.args)} is for a script")
        if ramp.is_script and (ramp.batch_size is not None or ramp.init is not None):
            raise ConfigError(
                "--batch-size, --mini-batch-size and --init are for tasks: a script has its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """What was measured.

    Attributes:
        samples: that an update averages.
        source: the data.
        rates, losses: of each update, in order; the loss before it was made.
        cut_after: updates after which the script's loop was over, before the highest rate; else
            None.
    """

    question: LrQuestion
    samples: int
    source: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    cut_after: int | None = None

    @property
    def smooth(self) -> tuple[float, ...]:
        """Each loss as the mean of its neighbourhood; at the ends a smaller one, still centred."""
        found = []
        for i in range(len(self.losses)):
            half = min(_HALF, i, len(self.losses) - 1 - i)
            near = self.losses[i - half : i + half + 1]
            found.append(sum(near) / len(near))
        return tuple(found)

    @property
    def lowest(self) -> int:
        """The update with the least smoothed loss."""
        smooth = self.smooth
        return min(range(len(smooth)), key=smooth.__getitem__)

    @property
    def falls(self) -> bool:
        """Whether the loss fell enough to tell anything."""
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
        """The first update behind the lowest whose loss has risen again; None: none has."""
        smooth, low = self.smooth, self.lowest
        edge = smooth[low] + _RISES * (self.losses[0] - smooth[low])
        return next((i for i in range(low, len(smooth)) if smooth[i] > edge), None)

    @property
    def advised(self) -> float | None:
        """The rate to take, to two figures; None where the loss does not fall."""
        if not self.falls:
            return None
        rate = min(self.rates[self.steepest], self.rates[self.lowest] / _SAFE)
        return float(f"{rate:.2g}")

    @property
    def reason(self) -> str:
        """Why that rate, in words."""
        if self.advised is None:
            words = f"the loss does not fall between {self.rates[0]:.3g} and {self.rates[-1]:.3g}"
            if self.cut_after is not None:
                return f"{words}, and {self._cut()}"
            more = "" if self.question.ramp.is_script else ", or another --init"
            return f"{words}: take a higher --highest, more --updates{more}"
        steepest, lowest = self.rates[self.steepest], self.rates[self.lowest]
        words = f"the loss falls fastest at {steepest:.2g} and is least at {lowest:.2g}"
        if steepest > lowest / _SAFE:
            words += "; taken is a third of that, for a whole training and not a short one"
        if self.rises is not None:
            words += f"; from {self.rates[self.rises]:.2g} on it rises"
        elif self.cut_after is not None:
            words += f"; higher rates than {self.rates[-1]:.3g} were not tried, since {self._cut()}"
        return words

    def _cut(self) -> str:
        """That the script's loop was over too early, and the way out."""
        made, asked = self.cut_after or 0, self.question.ramp.updates
        fewer = f", or --updates {made}" if made >= _FEWEST_UPDATES else ""
        words = f"the script's loop was over after {made} of {asked} updates"
        return f"{words}: give it more epochs{fewer}"


def measure_range(question: LrQuestion) -> LrRange:
    """Run the test.

    Raises:
        ConfigError: the task is unknown, or the run cannot be as asked.
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
        found = [(i, loss) for i, loss in enumerate(_losses(run)) if math.isfinite(loss)]
    if len(found) <= 2 * _HALF:
        raise ConfigError(
            f"the loss was no number after {len(found)} updates at rates from "
            f"{ramp.lowest:g}: begin lower, --lowest {ramp.lowest / 100:g}"
        )
    cut_after = None
    if isinstance(summary, Summary) and summary.ended == "finished":
        cut_after = summary.updates if summary.updates < ramp.updates else None
    return LrRange(
        question=question,
        samples=header.number("batch_size"),
        source=source,
        rates=tuple(ramp.rate(version) for version, _ in found),
        losses=tuple(loss for _, loss in found),
        cut_after=cut_after,
    )


def _losses(run: Path) -> Iterator[float]:
    """Of each update: the mean of its pushes' losses, weighted as they were averaged."""
    pushes: dict[tuple[int, int], float] = {}
    for record in read_trace(run / FILE_NAME):
        if isinstance(record, Handed):
            pushes[record.fact.ticket[:2]] = record.fact.loss
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            tickets, weights = record.order
            pairs = zip(tickets, weights, strict=True)
            yield sum(pushes[one[:2]] * weight for one, weight in pairs) / sum(weights)


def render_range(one: LrRange) -> list[str]:
    """Loss against rate, then the advice."""
    smooth = one.smooth
    stride = max(1, -(-len(smooth) // _ROWS))
    chosen = sorted({*range(0, len(smooth), stride), one.lowest, one.steepest})
    most = 1.25 * max(one.losses[: _HALF + 1])
    marks = {one.steepest: "falls fastest", one.lowest: "least"} if one.falls else {}
    rows = [
        (
            f"{one.rates[i]:.2g}",
            f"{smooth[i]:.4g}",
            f"{'#' * max(0, min(_BAR, round(_BAR * smooth[i] / (most or 1.0)))):<{_BAR}}|",
            marks.get(i, ""),
        )
        for i in chosen
    ]
    question = one.question
    where = f"{question.workers} worker{'s' * (question.workers != 1)}, {question.protocol}"
    lines = [f"{question.ramp.spec}: {where}, {one.samples:,} samples an update; {one.source}", ""]
    lines += [*table(("lr", "loss", "", ""), rows), ""]
    advised = one.advised
    return [*lines, f"--lr {advised:g}: {one.reason}" if advised is not None else one.reason]


def range_json(one: LrRange) -> dict[str, object]:
    """As one JSON object."""
    rises = one.rises
    return {
        "task": one.question.ramp.spec,
        "source": one.source,
        "workers": one.question.workers,
        "protocol": one.question.protocol,
        "samples_per_update": one.samples,
        "rates": list(one.rates),
        "losses": list(one.losses),
        "smoothed_losses": list(one.smooth),
        "steepest": one.rates[one.steepest],
        "lowest": one.rates[one.lowest],
        "rises": None if rises is None else one.rates[rises],
        "cut_after": one.cut_after,
        "advised": one.advised,
        "reason": one.reason,
    }


def draw_range(one: LrRange) -> str:
    """The text of an SVG file: loss against rate, on a logarithmic axis of rates."""
    start = math.floor(math.log10(one.rates[0]))
    ceiling = 2.0 * max(one.losses[: _HALF + 1])  # what diverges would leave no room for the rest

    def points(values: Sequence[float]) -> tuple[Point, ...]:
        pairs = zip(one.rates, values, strict=True)
        return tuple(
            Point(t=math.log10(rate) - start, value=min(value, ceiling)) for rate, value in pairs
        )

    smooth = points(one.smooth)
    curves = [
        Curve(name=f"mean of {2 * _HALF + 1} updates (thin: each)", points=smooth,
              others=(points(one.losses),)),
    ]  # fmt: skip
    if one.falls:
        named = ((one.steepest, "falls fastest"), (one.lowest, "least"))
        curves += [
            Curve(name=f"{words}: {one.rates[i]:.2g}", points=(smooth[i],), dots=(smooth[i],))
            for i, words in named
        ]
    question = one.question
    advised = "no rate is advised" if one.advised is None else f"advised: {one.advised:g}"
    return draw_chart(
        f"{question.ramp.spec}: loss against learning rate",
        f"{question.workers} workers, {question.protocol}, {one.samples:,} samples an update; "
        f"{advised}",
        [
            Diagram(
                label="training loss of an update",
                curves=tuple(curves),
                x_label="learning rate",
                log10_from=start,
                stop=math.log10(one.rates[-1]) - start,
            )
        ],
    )
