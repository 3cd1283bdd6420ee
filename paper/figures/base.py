"""The contract of a figure: a chart, the paper's numbers, ours, and whether they agree.

    Figure.draw(Workshop) -> Drawing = a chart and its claims
    Claim = the paper's value or theory's, ours, the tolerance, the verdict

It must not know any figure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..tasks import Images

EQUAL = 0.02
"""Relative tolerance for computed numbers."""


class Source(Enum):
    """The origin of a value that ours is compared with."""

    PAPER = "paper"
    """Printed in the paper: a number, a sentence, a curve of a plot."""
    THEORY = "theory"
    """Closed forms, integrals, and sampled order statistics, which the paper does not print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number, or one sentence, compared with ours.

    Args:
        source: its origin; only the paper's own values count as agreeing with the paper.
        is_comparable: False if ours was measured on other data than the paper's.
    """

    label: str
    source: Source
    reference: str
    ours: str
    deviation: str
    tolerance: str
    agrees: bool
    is_comparable: bool = True

    @property
    def verdict(self) -> str:
        """The verdict in one or two words, for the table."""
        if not self.is_comparable:
            return "other data"
        return "yes" if self.agrees else "**no**"


def number(
    label: str, theory: float, ours: float, *, error: float = math.nan, tolerance: float = EQUAL
) -> Claim:
    """Return the claim that a number equals theory's within a relative ``tolerance``.

    Args:
        error: standard error of ours; nan: not shown.
    """
    deviation = ours / theory - 1.0
    spread = "" if math.isnan(error) else f" ± {_digits(error, 2)}"
    return Claim(
        label=label, source=Source.THEORY, reference=_digits(theory),
        ours=f"{_digits(ours)}{spread}", deviation=f"{100 * deviation:+.2f} %",
        tolerance=f"{100 * tolerance:g} %", agrees=abs(deviation) <= tolerance,
    )  # fmt: skip


def reading(
    label: str, paper: tuple[float, float], values: list[float], *, band: float, why: str,
    is_comparable: bool,
) -> Claim:  # fmt: skip
    """Return the claim that ln(loss) lies in a range of the paper's plot, within a band.

    Args:
        paper: least and greatest value in the plot; equal: one value.
        band: the allowed distance of ours, and ``why``: from the paper's own curves.
        values: one per seed; their mean is compared, the least and the greatest are shown.
    """
    low, high = paper
    ours = sum(values) / len(values)
    deviation = max(low - ours, ours - high, 0.0)
    return Claim(
        label=label, source=Source.PAPER,
        reference=f"about {low:g}" if low == high else f"about {low:g} to {high:g}",
        ours=f"{ours:.3f} ({min(values):.3f} to {max(values):.3f})", deviation=f"{deviation:.3f}",
        tolerance=f"{band:g}: {why}", agrees=deviation <= band, is_comparable=is_comparable,
    )  # fmt: skip


def sentence(
    label: str, reference: str, ours: str, agrees: bool, *, source: Source = Source.PAPER,
    is_comparable: bool = True,
) -> Claim:  # fmt: skip
    """Return the claim of a sentence that is true or false."""
    return Claim(
        label=label, source=source, reference=reference, ours=ours, deviation="", tolerance="",
        agrees=agrees, is_comparable=is_comparable,
    )  # fmt: skip


def _digits(value: float, count: int = 4) -> str:
    """Return ``count`` significant digits, and all digits before the point."""
    if value == 0.0:
        return "0"
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The amount of simulation: less for a test."""

    share: float = 1.0
    num_seeds: int = 3

    def updates(self, full: int, minimum: int = 60) -> int:
        """Return the share of ``full`` updates, at least ``minimum``."""
        return max(minimum, round(full * self.share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The inputs of a figure."""

    effort: Effort
    images: Callable[[], Images]
    """MNIST, or its substitute; loaded at the first call."""
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The result of a figure."""

    svg: str
    """Empty for a table."""
    claims: tuple[Claim, ...]
    data: str = ""
    """The images on which it was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the paper.

    Args:
        number: the paper's, as ``--only`` takes it.
        stated: the setting that the paper gives.
        chosen: settings that it does not state, our choice, and why; empty: it states all.
    """

    number: str
    title: str
    stated: str
    chosen: str
    draw: Callable[[Workshop], Drawing]
