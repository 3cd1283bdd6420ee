"""Figure 10: the four variants with K < P beside each other, with one K."""

from paceline import theory
from paceline.conditions.delays import parse_delay
from paceline.report.chart import Diagram, draw_chart

from ..training import Run
from .base import Claim, Drawing, Figure, Source, Workshop, number, sentence
from .figure_08 import SETTING, THREE_RUNS, UPDATES, curves_of, runs_of

K = 4
PROTOCOLS = tuple(f"{name}:{K}" for name in ("k-sync", "k-batch-sync", "k-async", "k-batch-async"))
SAME = 0.03
"""ln(loss): two protocols without staleness differ only by the noise of their samples."""


def draw(shop: Workshop) -> Drawing:
    """ln(loss) against time and against updates."""
    images, updates = shop.images(), shop.effort.updates(UPDATES)
    runs = {name: runs_of(SETTING, name, updates, shop) for name in PROTOCOLS}
    claims = [_time(name, seed_runs, updates) for name, seed_runs in runs.items()]
    claims += [_same_error(runs), _batches_are_faster(runs)]
    label = "ln(loss), penalty included"
    diagrams = [
        Diagram(
            label=label,
            curves=curves_of(runs),
            x_label="virtual seconds (X ~ exp(1 s))",
            height=230,
        ),
        Diagram(
            label=label, curves=curves_of(runs, by_updates=True), x_label="updates", height=230
        ),
    ]
    title = f"Figure 10: the variants with K = {K}, P = 8"
    svg = draw_chart(
        title,
        f"softmax regression on {images.title}; thick: mean of the seeds, thin: each",
        diagrams,
    )
    return Drawing(svg=svg, claims=tuple(claims), data=images.title)


def _time(name: str, seed_runs: tuple[Run, ...], updates: int) -> Claim:
    delay = parse_delay(SETTING.delay)
    expected_s = theory.update_s(name.partition(":")[0], delay, SETTING.num_workers, K)
    assert expected_s is not None
    mean_s = sum(run.virtual_s for run in seed_runs) / len(seed_runs)
    label = f"{name}: time of {updates} updates, mean of {len(seed_runs)} runs"
    return number(label, updates * expected_s, mean_s, tolerance=THREE_RUNS)


def _mean_final(seed_runs: tuple[Run, ...]) -> float:
    return sum(run.final for run in seed_runs) / len(seed_runs)


def _same_error(runs: dict[str, tuple[Run, ...]]) -> Claim:
    k_sync, k_batch_sync = (_mean_final(runs[f"{name}:{K}"]) for name in ("k-sync", "k-batch-sync"))
    return sentence(
        f"ln(loss) at the end: K-sync and K-batch-sync, within {SAME:g}",
        "one error bound for both", f"{k_sync:.3f} and {k_batch_sync:.3f}",
        abs(k_sync - k_batch_sync) <= SAME,
        source=Source.THEORY,
    )  # fmt: skip


def _batches_are_faster(runs: dict[str, tuple[Run, ...]]) -> Claim:
    times_s = {name: sum(run.virtual_s for run in seed_runs) for name, seed_runs in runs.items()}
    agrees = all(
        times_s[f"k-batch-{kind}:{K}"] < times_s[f"k-{kind}:{K}"] for kind in ("sync", "async")
    )
    ours = ", ".join(f"{name} {whole_s / len(runs[name]):.0f}" for name, whole_s in times_s.items())
    return sentence(
        "time of all updates", "each batch variant takes less time than its other", ours, agrees,
        source=Source.THEORY,
    )  # fmt: skip


FIGURE = Figure(
    number="10",
    title="K-sync, K-batch-sync, K-async and K-batch-async with one K",
    stated="Neither K nor P; and our notes on the paper hold no value read off this plot.",
    chosen=(
        "The setting of figure 8 with its P = 8 and K = 4, so that the curves can be laid beside "
        "that figure's. So nothing here is a comparison with the paper's plot: the times are "
        "compared with its theorems, and the errors with what its bounds have in common."
    ),
    draw=draw,
)
