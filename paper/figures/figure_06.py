"""Figure 6: the expected time of 2,000 updates against K."""

from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point

from ..timing import Timed, update_time
from .base import Claim, Drawing, Figure, Workshop, number

WORKERS, UPDATES = 20, 2_000
DELAYS = {"Pareto(2, 1)": "pareto:2,1s", "1 + exp(1)": "1s+exp:1s"}
K_SYNC = {
    "Pareto(2, 1)": {1: 2051.0, 10: 2811.0, 20: 15953.0},
    "1 + exp(1)": {1: 2100.0, 10: 3338.0, 20: 9195.0},
}
AN_UPDATE_OF_K_BATCH_ASYNC = 200.0
"""Time of 2,000 updates is this times K."""
PROTOCOLS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
SIMULATED, OF_THE_SLOWEST, PUSHES = 3_000, 80_000, 60_000
"""Updates; those of K-sync with K = P, where the largest of 20 Pareto(2, 1) times has no variance;
pushes of K-batch-async, whose updates are short where K is small."""


def draw(shop: Workshop) -> Drawing:
    """2,000 E[T] for K = 1..20 and two distributions."""
    diagrams, claims = [], []
    for name, delay in DELAYS.items():
        sweeps = {protocol: _sweep(protocol, delay, name, shop) for protocol in PROTOCOLS}
        claims += _claims(name, sweeps)
        diagrams.append(
            Diagram(
                label=f"time of {UPDATES:,} updates (seconds, X ~ {name} s)",
                curves=tuple(_curve(protocol, times) for protocol, times in sweeps.items()),
                x_label="gradients an update K",
                from_zero=True,
                height=260,
            )
        )
    title = f"Figure 6: expected runtime of {UPDATES:,} updates, P = {WORKERS}"
    subtitle = "dots: simulated; lines: theory where it has an answer, else through the dots"
    return Drawing(svg=draw_chart(title, subtitle, diagrams), claims=tuple(claims))


def _sweep(protocol: str, delay: str, name: str, shop: Workshop) -> dict[int, Timed]:
    shop.say(f"{protocol}, {name}")
    times = {}
    for k in range(1, WORKERS + 1):
        full = PUSHES // k if protocol == "k-batch-async" else SIMULATED
        if (protocol, k) == ("k-sync", WORKERS):
            full = OF_THE_SLOWEST
        times[k] = update_time(f"{protocol}:{k}", WORKERS, delay, shop.effort.updates(full))
    return times


def _claims(name: str, sweeps: dict[str, dict[int, Timed]]) -> list[Claim]:
    claims = [
        _claim(f"K-sync, {name}, K = {k}", value, sweeps["k-sync"][k])
        for k, value in K_SYNC[name].items()
    ]
    claims += [
        _claim(
            f"K-batch-async, {name}, K = {k}",
            AN_UPDATE_OF_K_BATCH_ASYNC * k,
            sweeps["k-batch-async"][k],
        )
        for k in K_SYNC[name]
    ]
    return claims


def _claim(label: str, known_s: float, timed: Timed) -> Claim:
    return number(label, known_s, UPDATES * timed.seconds, error=UPDATES * timed.error_s)


def _curve(protocol: str, times: dict[int, Timed]) -> Curve:
    dots = tuple(Point(t=float(k), value=UPDATES * timed.seconds) for k, timed in times.items())
    line = tuple(
        Point(
            t=float(k),
            value=UPDATES * (timed.seconds if timed.theory_s is None else timed.theory_s),
        )
        for k, timed in times.items()
    )
    return Curve(name=protocol, points=line, dots=dots)


FIGURE = Figure(
    number="6",
    title="Expected runtime against K",
    stated="J = 2,000 updates, P = 20, K = 1..20; X ~ Pareto(2, 1) and 1 + exp(1).",
    chosen=(
        "The time shown is 2,000 times the mean of more updates than 2,000 (3,000 to 80,000), so "
        "that it is the expectation that the paper draws, and not one run of it."
    ),
    draw=draw,
)
