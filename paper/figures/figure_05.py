"""Figure 5: the speed-up of asynchronous over synchronous updates, against P."""

import math

from paceline.conditions.delays import parse_delay
from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point

from ..bounds import speed_up
from ..timing import update_time
from .base import Claim, Drawing, Figure, Workshop, number

MAX_WORKERS = 20
THEORY = {
    "exp(1)": ("exp:1s", 10_000, {5: 11.42, 10: 29.29, 20: 71.95}),
    "1 + exp(1)": ("1s+exp:1s", 5_000, {5: 8.21, 10: 19.64, 20: 45.98}),
    "Pareto(2, 1)": ("pareto:2,1s", 80_000, {5: 10.16, 10: 28.38, 20: 79.76}),
}
"""X, the updates for a sufficiently exact mean, and the speed-up at some P.

A worker makes a quarter as many steps under async. Pareto(2, 1) has no finite variance: it needs
many."""


def draw(shop: Workshop) -> Drawing:
    """Speed-up E[T_sync] / E[T_async] = P E[X_{P:P}] / E[X] for P = 1..20."""
    curves, claims = [], []
    for name, (delay, full, known) in THEORY.items():
        shop.say(f"speed-up, {name}")
        ratios = {
            num_workers: _speed_up(delay, num_workers, shop.effort.updates(full))
            for num_workers in range(1, MAX_WORKERS + 1)
        }
        closed = {p: speed_up(parse_delay(delay), p) for p in ratios}
        claims += [
            number(f"{name}, P = {p}", value, ratios[p][0], error=ratios[p][1])
            for p, value in known.items()
        ]
        claims.append(_furthest(name, ratios, closed))
        curves.append(
            Curve(
                name=name,
                points=tuple(Point(t=float(p), value=value) for p, value in closed.items()),
                dots=tuple(Point(t=float(p), value=value) for p, (value, _) in ratios.items()),
            )
        )
    diagram = Diagram(
        label="speed-up (updates of async in the time of one of full-sync)",
        curves=tuple(curves), x_label="workers P", from_zero=True,
    )  # fmt: skip
    title = "Figure 5: speed-up of asynchronous over synchronous SGD"
    subtitle = "lines: closed form; dots: simulated"
    return Drawing(svg=draw_chart(title, subtitle, [diagram]), claims=tuple(claims))


def _speed_up(delay: str, num_workers: int, updates: int) -> tuple[float, float]:
    """Return the simulated ratio, and its standard error."""
    synchronous = update_time("full-sync", num_workers, delay, updates)
    asynchronous = update_time("async", num_workers, delay, max(1, updates // 4) * num_workers)
    ratio = synchronous.seconds / asynchronous.seconds
    error = math.hypot(
        synchronous.error_s / synchronous.seconds, asynchronous.error_s / asynchronous.seconds
    )
    return ratio, ratio * error


def _furthest(name: str, ratios: dict[int, tuple[float, float]], closed: dict[int, float]) -> Claim:
    worst = max(ratios, key=lambda p: abs(ratios[p][0] / closed[p] - 1.0))
    value, error = ratios[worst]
    label = f"{name}, furthest of P = 1..{MAX_WORKERS} from the closed form: P = {worst}"
    return number(label, closed[worst], value, error=error)


FIGURE = Figure(
    number="5",
    title="Speed-up of asynchronous over synchronous SGD",
    stated="P = 1..20; X ~ exp(1), 1 + exp(1), Pareto(2, 1).",
    chosen="",
    draw=draw,
)
