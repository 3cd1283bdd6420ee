"""Figure 9: async with a step that depends on staleness, beside a fixed one."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from paceline.report.chart import Diagram, draw_chart

from ..tasks import grey
from ..training import Run, Setting, train
from .base import Claim, Drawing, Figure, Workshop, sentence
from .figure_08 import curves_of

ETA = 0.01
C = 0.005 * ETA
FIXED = Setting(
    num_workers=40, delay="exp:50ms", mini_batch_size=250, eta=ETA, penalty=0.05,
    num_evaluations=200,
)  # fmt: skip
SETTINGS = {"fixed step": FIXED, "eq. 13": replace(FIXED, staleness=f"distance:{C:g}")}
UPDATES = 2000
SPIKE = 0.1
"""ln(loss): a larger rise from one evaluation to the next is a spike, a loss up by a tenth."""


def draw(shop: Workshop) -> Drawing:
    """ln(loss) against updates, and against time."""
    images, updates = grey(), shop.effort.updates(UPDATES)
    runs: dict[str, tuple[Run, ...]] = {}
    for name, setting in SETTINGS.items():
        seed_runs = []
        for seed in range(shop.effort.num_seeds):
            shop.say(f"async, {name}, seed {seed}")
            seed_runs.append(train(setting, images, "async", updates, seed))
        runs[name] = tuple(seed_runs)
    label = "ln(loss), penalty included"
    diagrams = [
        Diagram(label=label, curves=curves_of(runs, by_updates=True), x_label="updates",
                height=230),
        Diagram(label=label, curves=curves_of(runs),
                x_label="virtual seconds (X ~ exp, mean 50 ms)", height=230),
    ]  # fmt: skip
    svg = draw_chart(
        "Figure 9: async, P = 40, a fixed step and eq. 13",
        f"{images.title}; thick: mean of the seeds, thin: each",
        diagrams,
    )
    return Drawing(
        svg=svg, claims=(_spikes(runs), _roughness(runs), _ends(runs)), data=images.title
    )


def _rises(run: Run) -> list[float]:
    """Return the rises of ln(loss) from one evaluation to the next."""
    values = [point.value for point in run.by_updates()]
    return [after - before for before, after in pairwise(values) if after > before]


def _spikes(runs: dict[str, tuple[Run, ...]]) -> Claim:
    counts = {
        name: fmean(sum(rise > SPIKE for rise in _rises(run)) for run in seed_runs)
        for name, seed_runs in runs.items()
    }
    ours = ", ".join(f"{name} {count:.0f}" for name, count in counts.items())
    return sentence(
        f"evaluations at which ln(loss) rose by more than {SPIKE:g}, mean of the seeds",
        "the fixed step spikes, the variable one is smooth", ours,
        counts["fixed step"] >= 5 and counts["eq. 13"] <= 0.1 * counts["fixed step"],
        is_comparable=False,
    )  # fmt: skip


def _roughness(runs: dict[str, tuple[Run, ...]]) -> Claim:
    largest = {
        name: median(max(_rises(run), default=0.0) for run in seed_runs)
        for name, seed_runs in runs.items()
    }
    ours = ", ".join(f"{name} {rise:.2f}" for name, rise in largest.items())
    return sentence(
        "the largest rise of ln(loss) between two evaluations, median of the seeds",
        "higher with the fixed step", ours, largest["eq. 13"] < 0.5 * largest["fixed step"],
        is_comparable=False,
    )  # fmt: skip


def _ends(runs: dict[str, tuple[Run, ...]]) -> Claim:
    ends = {name: fmean(run.final for run in seed_runs) for name, seed_runs in runs.items()}
    ours = ", ".join(f"{name} {end:.3f}" for name, end in ends.items())
    return sentence(
        "ln(loss) at the end", "lower with the variable step", ours,
        ends["eq. 13"] < ends["fixed step"], is_comparable=False,
    )  # fmt: skip


FIGURE = Figure(
    number="9",
    title="A step that looks at staleness",
    stated=(
        "Softmax regression 1024-10 on CIFAR-10 in grey, lambda = 0.05, m = 250, P = 40, "
        "X ~ exp(20), eta = 0.01 beside eq. 13 with eta_max = 0.01 and C = 0.005 eta_max, "
        "2,000 updates."
    ),
    chosen=(
        "The images are made up, because CIFAR-10 is not at hand: 10,000 of 32 x 32 grey pixels, "
        "smooth patterns of ten classes and as much of their own, as bright as photographs. So "
        "whether spikes come is compared, and no number is. exp(20) is read as a rate, 20 a "
        "second; another reading would only scale the time axis. Eq. 13 is printed with max; it "
        "must be min. The loss is evaluated every 10 updates."
    ),
    draw=draw,
)
