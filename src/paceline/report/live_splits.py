"""Splits that were run, beside what was predicted of them: what they came to, as a table, drawn.

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
"""Pixels: of a bar, of a split, between two groups, for a value behind its bar."""
_COUNTED = (
    "a step: from a worker's push to its next; none: one worker with the whole batch",
    "bytes: an update, through sockets, of the worker that sends most; where each worker holds a "
    "copy on one machine, gradients are in shared memory",
    "memory: the most that a worker's process held in its steps, beyond what it held before its "
    "model was made",
    "balance: the mean of the workers' CPU time over the most",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplit:
    """One row; null where nothing was measured, or predicted.

    Args:
        steps_s: from a worker's push to its next, of all workers and rounds.
        memory_bytes, sent_bytes: of the worker that has most, medians over rounds.
        balance: the mean of what workers compute over the most.
        why: why it cannot be run, or priced.
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
        """The middle one."""
        return statistics.median(self.steps_s) if self.steps_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSplits:
    """All rows.

    Args:
        about: what the prediction was made from.
        load: of the machine when it began, as processes that compute.
        advised: the split that is, of all.
        fastest: the split that was; empty: none ran.
        interrupted_in: the round and row that the user ended it in, or "".
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
        """As one JSON object."""
        return asdict(self)


# -- the table -------------------------------------------------------------------------------------


def render_live_splits(result: LiveSplits) -> list[str]:
    """What was measured, the table, and what its figures count."""
    header = ("split", "a step", "middle half", "predicted", "bytes sent", "predicted", "memory",
              "predicted", "balance", "predicted", "")  # fmt: skip
    width = max((len(label) for label in result.about), default=0)
    return [
        *(f"{label:<{width}}  {words}" for label, words in result.about.items()),
        "",
        f"{result.task}: {result.rounds} round{'s' * (result.rounds != 1)} of {result.updates} "
        f"updates in turn, {result.batch_size} samples each; load at the start {result.load:.1f}",
        "",
        *table(header, [_cells(row, result) for row in result.rows]),
        "",
        *(f"{row.split}: {row.why}" for row in result.rows if row.why),
        *_COUNTED,
        *_verdict(result),
    ]  # fmt: skip


def _cells(one: LiveSplit, result: LiveSplits) -> tuple[str, ...]:
    marks = ["advised"] * (one.split == result.advised)
    marks += ["fastest measured"] * (one.split == result.fastest)
    if not one.steps_s:
        marks.append("not run")
    return (
        one.split, or_dash(one.step_s, three_figures), _middle_half(one.steps_s),
        or_dash(one.predicted_step_s, three_figures), or_dash(one.sent_bytes, _bytes),
        or_dash(one.predicted_sent_bytes, _bytes), or_dash(one.memory_bytes, _bytes),
        or_dash(one.predicted_memory_bytes, _bytes), or_dash(one.balance, _two),
        or_dash(one.predicted_balance, _two), ", ".join(marks),
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
    result = _quartiles(values)
    return "-" if result is None else f"{three_figures(result[0])} to {three_figures(result[1])}"


def _verdict(result: LiveSplits) -> Iterator[str]:
    """Whether the advised one was the fastest, and by how much another was."""
    if result.interrupted_in:
        yield f"interrupted in {result.interrupted_in}"
    if not result.fastest:
        return
    if result.advised == result.fastest:
        yield f"advised: {result.advised}, which is the fastest measured"
        return
    steps_s = {row.split: row.step_s for row in result.rows}
    best_s, advised_s = steps_s[result.fastest], steps_s.get(result.advised)
    if best_s is None or advised_s is None:
        yield f"advised: {result.advised}, which was not run; fastest measured: {result.fastest}"
        return
    yield (
        f"advised: {result.advised}; fastest measured: {result.fastest}, in "
        f"{best_s / advised_s:.0%} of its time"
    )


# -- the picture -----------------------------------------------------------------------------------


class _BarGroup(NamedTuple):
    """Bars of one quantity: measured and predicted of each split."""

    label: str
    measured: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    form: Callable[[float], str]
    spread: Mapping[str, tuple[float, float] | None]


def draw_live_splits(result: LiveSplits) -> str:
    """The text of an SVG file: measured dark, predicted pale, of each split."""
    rows = {row.split: row for row in result.rows}
    groups = [
        _BarGroup(
            "a step (line: the middle half)", {k: one.step_s for k, one in rows.items()},
            {k: one.predicted_step_s for k, one in rows.items()}, three_figures,
            {k: _quartiles(one.steps_s) for k, one in rows.items()},
        ),
        _BarGroup(
            "bytes an update, of the worker that sends most",
            {k: one.sent_bytes for k, one in rows.items()},
            {k: one.predicted_sent_bytes for k, one in rows.items()}, _bytes, {},
        ),
        _BarGroup(
            "memory, of the worker that holds most",
            {k: one.memory_bytes for k, one in rows.items()},
            {k: one.predicted_memory_bytes for k, one in rows.items()}, _bytes, {},
        ),
    ]  # fmt: skip
    height = 100 + len(groups) * (_ROW * len(rows) + _GAP)
    workers = f"{result.workers} workers, batch {result.batch_size}"
    parts = head(f"{result.task}: splits measured and predicted, {workers}", height)
    parts.append(
        text(
            LEFT, 44, f"dark: measured; pale: predicted; advised: {result.advised}; "
            f"fastest measured: {result.fastest or 'none'}",
        )
    )  # fmt: skip
    top = 88.0
    for number, group in enumerate(groups):
        parts += _bars(group, list(rows), top, COLOURS[number])
        top += _ROW * len(rows) + _GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(group: _BarGroup, names: Sequence[str], top: float, colour: str) -> Iterator[str]:
    values = [row for rows in (group.measured, group.predicted) for row in rows.values() if row]
    values += [pair[1] for pair in group.spread.values() if pair is not None]
    scale = (WIDTH - LEFT - RIGHT - _VALUE) / max(values, default=1.0)
    yield text(LEFT, top - 12, group.label, weight="bold")
    yield rule(LEFT, top - 4, LEFT, top + _ROW * len(names), FAINT)
    for number, name in enumerate(names):
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
