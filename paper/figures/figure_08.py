"""Figure 8: loss against time of full-sync, K-batch-async and async on MNIST."""

from collections.abc import Sequence
from statistics import fmean

from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point

from ..training import Run, Setting, train
from .base import Claim, Drawing, Figure, Workshop, number, reading, sentence

SETTING = Setting(num_workers=8, delay="exp:1s", mini_batch_size=1, eta=0.01, penalty=0.01)
UPDATES = 500
THEORY_S = {"full-sync": 1358.9, "k-batch-async:4": 250.0, "async": 62.5}
"""Time of 500 updates: J H_P, J K/P and J/P."""
START, END = (0.84, 0.84), (-0.05, 0.0)
"""ln(loss), read off the plot."""
BAND, WHY = 0.025, "half of what lies between the ends of the paper's curves"
THREE_RUNS = 0.08
"""Relative: three standard errors of the mean of three sums of 500 exponential times are 0.077."""
ZOOMED_S = 260.0


def draw(shop: Workshop) -> Drawing:
    """Draw ln(loss) against time, the whole run and its beginning."""
    images, updates = shop.images(), shop.effort.updates(UPDATES)
    runs = {name: runs_of(SETTING, name, updates, shop) for name in THEORY_S}
    claims: list[Claim] = []
    for name, expected_s in THEORY_S.items():
        mean_s = sum(run.virtual_s for run in runs[name]) / len(runs[name])
        label = f"{name}: time of {updates} updates, mean of {len(runs[name])} runs"
        claims.append(number(label, expected_s * updates / UPDATES, mean_s, tolerance=THREE_RUNS))
    first = [run.by_updates()[0].value for run in runs["full-sync"]]
    is_comparable = images.is_the_papers
    claims.append(
        reading(
            "ln(loss) at the start", START, first, band=BAND, why=WHY, is_comparable=is_comparable
        )
    )
    for name, seed_runs in runs.items():
        finals = [run.final for run in seed_runs]
        label = f"{name}: ln(loss) at the end"
        claims.append(reading(label, END, finals, band=BAND, why=WHY, is_comparable=is_comparable))
    claims.append(_order(runs, is_comparable=is_comparable))
    curves = curves_of(runs)
    y_label = "ln(loss), penalty included"
    full_diagram = Diagram(
        label=y_label, curves=curves, x_label="virtual seconds (X ~ exp(1 s))", height=230
    )
    zoomed_diagram = Diagram(
        label=f"the same, the first {ZOOMED_S:g} s", curves=curves,
        x_label="virtual seconds (X ~ exp(1 s))", height=230, stop=ZOOMED_S,
    )  # fmt: skip
    title = f"Figure 8: loss against time, {updates} updates, P = 8"
    svg = draw_chart(
        title,
        f"softmax regression on {images.title}; thick: mean of the seeds, thin: each",
        [full_diagram, zoomed_diagram],
    )
    return Drawing(svg=svg, claims=tuple(claims), data=images.title)


def runs_of(setting: Setting, protocol: str, updates: int, shop: Workshop) -> tuple[Run, ...]:
    """Return one run per seed."""
    runs = []
    for seed in range(shop.effort.num_seeds):
        shop.say(f"{protocol}, seed {seed}")
        runs.append(train(setting, shop.images(), protocol, updates, seed))
    return tuple(runs)


def curves_of(runs: dict[str, tuple[Run, ...]], *, by_updates: bool = False) -> tuple[Curve, ...]:
    """Return the mean over the seeds of each protocol, and a thin line for each seed."""
    curves = []
    for name, seed_runs in runs.items():
        lines = [run.by_updates() if by_updates else run.by_time() for run in seed_runs]
        curves.append(Curve(name=name, points=_mean(lines), others=tuple(lines)))
    return tuple(curves)


def _mean(lines: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Return the evaluations, averaged over the same version."""
    return tuple(
        Point(t=fmean(point.t for point in points), value=fmean(point.value for point in points))
        for points in zip(*lines, strict=False)
    )


def _order(runs: dict[str, tuple[Run, ...]], *, is_comparable: bool) -> Claim:
    """Return the claim that asynchronous protocols are ahead for their whole run."""
    at_s = min(run.virtual_s for seed_runs in runs.values() for run in seed_runs)
    means = {
        name: sum(run.loss_at(at_s) for run in seed_runs) / len(seed_runs)
        for name, seed_runs in runs.items()
    }
    ranked = sorted(means, key=lambda name: means[name])
    ours = ", ".join(f"{name} {means[name]:.2f}" for name in ranked)
    return sentence(
        f"ln(loss) after {at_s:.0f} s, when the first async run ends",
        "async is ahead of K-batch-async, and that of full-sync", ours,
        ranked == ["async", "k-batch-async:4", "full-sync"], is_comparable=is_comparable,
    )  # fmt: skip


FIGURE = Figure(
    number="8",
    title="Loss against time of three protocols",
    stated=(
        "MNIST, softmax regression 784-10, lambda = 0.01, W ~ N(0, 0.01²), m = 1, eta = 0.01, "
        "X ~ exp(1), P = 8, K = 4."
    ),
    chosen=(
        "J = 500, from the time axis. Which samples the loss is of: the first 10,000 training "
        "images, because the theory bounds the training objective. Biases are 0 at the start and "
        "not penalised; pixels lie in [0, 1]. Seeds and repeats are not stated: three seeds. "
        "The end of a run is the mean of its last tenth."
    ),
    draw=draw,
)
