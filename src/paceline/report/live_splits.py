"""Splits as measured and as predicted: a table and a picture.

This module must not know how anything was measured.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ..plan import format_bytes
from .chart import COLOURS, FAINT, LEFT, RIGHT, WIDTH, head, rule, text
from .text import or_dash, table, three_figures

_BAR, _ROW, _GAP, _VALUE = 9, 26, 58, 92
"""Pixels: height of a bar, of a split; gap between two groups; room for a value after its bar."""
_COUNTED = (
    "a step: from a worker's push to its next; none: one worker with the whole batch",
    "bytes: sent through sockets per update, by the worker that sends most; if the workers of "
    "one machine each hold a copy, gradients are in shared memory",
    "memory: the peak of a worker's process during its steps, less what it held before its model "
    "was made",
    "balance: mean CPU time of the workers / the largest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplit:
    """One split; None where a value was not measured or predicted.

    Args:
        steps_s: times from a worker's push to its next, of all workers and rounds.
        memory_bytes, sent_bytes: of the worker with the most, medians over rounds.
        balance: mean CPU time of the workers / the largest.
        why: why the split cannot be run or predicted, or empty.
    """

    split: str
    steps_s: tuple[float, ...]
    sent_bytes: float | None
    memory_bytes: float | None
    balance: float | None
    predicted_step_s: float | None
    predicted_sent_bytes: int | None
    predicted_memory_bytes: int | None
    predicted_balance: float | None
    why: str

    @property
    def step_s(self) -> float | None:
        """The median; None if the split was not run."""
        return statistics.median(self.steps_s) if self.steps_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplits:
    """All splits of a comparison.

    Args:
        about: what the prediction is based on.
        load: of the machine at the start, in computing processes.
        advised: the split that the prediction advises.
        fastest: the fastest measured split; empty: none ran.
        interrupted_in: the round and split at which the user stopped, or "".
    """

    task: str
    workers: int
    batch_size: int
    rounds: int
    updates: int
    load: float
    about: dict[str, str]
    rows: tuple[LiveSplit, ...]
    advised: str
    fastest: str
    interrupted_in: str = ""

    def to_json(self) -> dict[str, object]:
        """Return all fields as a JSON object."""
        return asdict(self)


# -- the table -------------------------------------------------------------------------------------


def render_live_splits(splits: LiveSplits) -> list[str]:
    """Return the settings, the table, its explanation and the verdict as lines of text."""
    header = ("split", "a step", "middle half", "predicted", "bytes sent", "predicted", "memory",
              "predicted", "balance", "predicted", "")  # fmt: skip
    width = max((len(label) for label in splits.about), default=0)
    return [
        *(f"{label:<{width}}  {words}" for label, words in splits.about.items()),
        "",
        f"{splits.task}: {splits.rounds} round{'s' * (splits.rounds != 1)} of {splits.updates} "
        f"updates in turn, {splits.batch_size} samples each; load at the start {splits.load:.1f}",
        "",
        *table(header, [_cells(row, splits) for row in splits.rows]),
        "",
        *(f"{row.split}: {row.why}" for row in splits.rows if row.why),
        *_COUNTED,
        *_verdict(splits),
    ]  # fmt: skip


def _cells(row: LiveSplit, splits: LiveSplits) -> tuple[str, ...]:
    marks = ["advised"] * (row.split == splits.advised)
    marks += ["fastest measured"] * (row.split == splits.fastest)
    if not row.steps_s:
        marks.append("not run")
    return (
        row.split, or_dash(row.step_s, three_figures), _middle_half(row.steps_s),
        or_dash(row.predicted_step_s, three_figures), or_dash(row.sent_bytes, _bytes),
        or_dash(row.predicted_sent_bytes, _bytes), or_dash(row.memory_bytes, _bytes),
        or_dash(row.predicted_memory_bytes, _bytes), or_dash(row.balance, _two),
        or_dash(row.predicted_balance, _two), ", ".join(marks),
    )  # fmt: skip


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _two(value: float) -> str:
    return f"{value:.2f}"


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _middle_half(values: Sequence[float]) -> str:
    quartiles = _quartiles(values)
    if quartiles is None:
        return "-"
    return f"{three_figures(quartiles[0])} to {three_figures(quartiles[1])}"


def _verdict(splits: LiveSplits) -> Iterator[str]:
    """Yield whether the advised split was the fastest, or by how much another was faster."""
    if splits.interrupted_in:
        yield f"interrupted in {splits.interrupted_in}"
    if not splits.fastest:
        return
    if splits.advised == splits.fastest:
        yield f"advised: {splits.advised}, which is the fastest measured"
        return
    steps_s = {row.split: row.step_s for row in splits.rows}
    best_s, advised_s = steps_s[splits.fastest], steps_s.get(splits.advised)
    if best_s is None or advised_s is None:
        yield f"advised: {splits.advised}, which was not run; fastest measured: {splits.fastest}"
        return
    yield (
        f"advised: {splits.advised}; fastest measured: {splits.fastest}, in "
        f"{best_s / advised_s:.0%} of its time"
    )


# -- the picture -----------------------------------------------------------------------------------


class _BarGroup(NamedTuple):
    """Bars of one quantity: measured and predicted, by split."""

    label: str
    measured: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    form: Callable[[float], str]
    spread: Mapping[str, tuple[float, float] | None]


def draw_live_splits(splits: LiveSplits) -> str:
    """Return an SVG file as text: per split, measured dark and predicted pale."""
    rows = {row.split: row for row in splits.rows}
    groups = [
        _BarGroup(
            "a step (line: the middle half)", {k: row.step_s for k, row in rows.items()},
            {k: row.predicted_step_s for k, row in rows.items()}, three_figures,
            {k: _quartiles(row.steps_s) for k, row in rows.items()},
        ),
        _BarGroup(
            "bytes an update, worker that sends most",
            {k: row.sent_bytes for k, row in rows.items()},
            {k: row.predicted_sent_bytes for k, row in rows.items()}, _bytes, {},
        ),
        _BarGroup(
            "memory, worker that holds most",
            {k: row.memory_bytes for k, row in rows.items()},
            {k: row.predicted_memory_bytes for k, row in rows.items()}, _bytes, {},
        ),
    ]  # fmt: skip
    height = 100 + len(groups) * (_ROW * len(rows) + _GAP)
    workers = f"{splits.workers} workers, batch {splits.batch_size}"
    parts = head(f"{splits.task}: splits measured and predicted, {workers}", height)
    parts.append(
        text(
            LEFT, 44, f"dark: measured; pale: predicted; advised: {splits.advised}; "
            f"fastest measured: {splits.fastest or 'none'}",
        )
    )  # fmt: skip
    top = 88.0
    for number, group in enumerate(groups):
        parts += _bars(group, list(rows), top, COLOURS[number])
        top += _ROW * len(rows) + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(group: _BarGroup, splits: Sequence[str], top: float, colour: str) -> Iterator[str]:
    values = [
        value
        for by_split in (group.measured, group.predicted)
        for value in by_split.values()
        if value
    ]
    values += [pair[1] for pair in group.spread.values() if pair is not None]
    scale = (WIDTH - LEFT - RIGHT - _VALUE) / max(values, default=1.0)
    yield text(LEFT, top - 12, group.label, weight="bold")
    yield rule(LEFT, top - 4, LEFT, top + _ROW * len(splits), FAINT)
    for number, name in enumerate(splits):
        y = top + _ROW * number
        yield text(LEFT - 8, y + 13, name, anchor="end")
        measured, predicted = group.measured[name], group.predicted[name]
        low, high = group.spread.get(name) or (0.0, 0.0)
        yield _bar(y, (measured or 0.0) * scale, colour, "1")
        yield _bar(y + _BAR + 1, (predicted or 0.0) * scale, colour, "0.4")
        behind = LEFT + max(measured or 0.0, high) * scale + 6
        words = "not run" if measured is None else group.form(measured)
        yield text(behind, y + _BAR, words, size=10)
        behind = LEFT + (predicted or 0.0) * scale + 6
        yield text(behind, y + 2 * _BAR + 1, or_dash(predicted, group.form), size=10)
        if high:
            at = y + _BAR / 2
            yield rule(LEFT + low * scale, at, LEFT + high * scale, at, COLOURS[2])


def _bar(y: float, length: float, colour: str, opacity: str) -> str:
    return (
        f'<rect x="{LEFT}" y="{y:.0f}" width="{length:.1f}" height="{_BAR}" fill="{colour}" '
        f'fill-opacity="{opacity}"/>'
    )
