"""Figure 11: K-sync on MNIST against updates, for three K: a larger K has a lower floor."""

from paceline.report.chart import Diagram, draw_chart

from ..training import Run, Setting
from .base import Claim, Drawing, Figure, Workshop, reading, sentence
from .figure_08 import curves_of, runs_of

SETTING = Setting(num_workers=8, delay="1s+exp:1s", mini_batch_size=1, eta=0.05, penalty=0.01)
UPDATES = 2_000
FLOORS = {"k-sync:2": -0.2, "k-sync:4": -0.33, "k-sync:8": -0.4}
"""ln(loss) at the end, read off the plot."""
BANDS = {"k-sync:2": 0.065, "k-sync:4": 0.035, "k-sync:8": 0.035}
WHY = "half the way to the nearest other K"
STATED = (
    "MNIST, softmax regression, lambda = 0.01, K-sync, P = 8, m = 1, eta = 0.05, K = 2, 4, 8, "
    "2,000 updates, X ~ m + exp(mu)."
)


def draw(shop: Workshop) -> Drawing:
    """ln(loss) against updates."""
    images = shop.images()
    runs = k_sync_runs(shop)
    claims: list[Claim] = []
    finals = {name: [run.final for run in seed_runs] for name, seed_runs in runs.items()}
    for name, floor in FLOORS.items():
        label = f"{name}: ln(loss) at the end"
        claims.append(
            reading(
                label, (floor, floor), finals[name], band=BANDS[name], why=WHY,
                is_comparable=images.is_the_papers,
            )
        )  # fmt: skip
    means = [sum(values) / len(values) for values in finals.values()]
    claims.append(
        sentence(
            "the floor", "lower with a larger K",
            " > ".join(f"{value:.3f}" for value in means),
            means == sorted(means, reverse=True), is_comparable=images.is_the_papers,
        )
    )  # fmt: skip
    diagram = Diagram(
        label="ln(loss), penalty included", curves=curves_of(runs, by_updates=True),
        x_label="updates",
    )  # fmt: skip
    title = "Figure 11: K-sync against updates, P = 8"
    svg = draw_chart(
        title,
        f"softmax regression on {images.title}; thick: mean of the seeds, thin: each",
        [diagram],
    )
    return Drawing(svg=svg, claims=tuple(claims), data=images.title)


def k_sync_runs(shop: Workshop) -> dict[str, tuple[Run, ...]]:
    """Return the runs of figures 11 and 12."""
    updates = shop.effort.updates(UPDATES)
    return {name: runs_of(SETTING, name, updates, shop) for name in FLOORS}


FIGURE = Figure(
    number="11",
    title="K-sync against updates",
    stated=STATED,
    chosen=(
        "mu is not stated and does not matter here. The loss is of the first 10,000 training "
        "images, three seeds, and the end is the mean of the last tenth, as in figure 8."
    ),
    draw=draw,
)
