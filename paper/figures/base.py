"""The contract of a figure: what it draws, what the paper says, what we found, whether they agree.

    Figure.draw(Workshop) -> Drawn = a chart and its claims
    Claim                          = the paper's value or theory's, ours, the tolerance, the verdict

It must not know any figure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..tasks import Images

EQUAL = 0.02
"""Relative, for numbers that are computed."""


class Source(Enum):
    """Where a value that ours stands beside comes from."""

    PAPER = "paper"
    """It prints it: a number, a sentence, a curve of a plot."""
    THEORY = "theory"
    """Closed forms, integrals, and drawn order statistics: the paper does not print it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number, or one sentence, beside ours.

    Args:
        source: who says it; what is not the paper's is not counted as agreeing with it.
        is_comparable: False where ours was measured on other data than the paper's.
    """

    what: str
    source: Source
    theirs: str
    ours: str
    off: str
    tolerance: str
    agrees: bool
    is_comparable: bool = True

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if not self.is_comparable:
            return "other data"
        return "yes" if self.agrees else "**no**"


def number(
    what: str, theory: float, ours: float, *, error: float = math.nan, tolerance: float = EQUAL
) -> Claim:
    """A number that is to be equal to theory's but for a relative ``tolerance``.

    Args:
        error: standard error of ours; nan: not shown.
    """
    off = ours / theory - 1.0
    spread = "" if math.isnan(error) else f" ± {_digits(error, 2)}"
    return Claim(
        what=what, source=Source.THEORY, theirs=_digits(theory), ours=f"{_digits(ours)}{spread}",
        off=f"{100 * off:+.2f} %", tolerance=f"{100 * tolerance:g} %", agrees=abs(off) <= tolerance,
    )  # fmt: skip


def reading(
    what: str, paper: tuple[float, float], values: list[float], *, band: float, why: str,
    is_comparable: bool,
) -> Claim:  # fmt: skip
    """ln(loss) that is to lie in a range of the paper's plot, but for a band.

    Args:
        paper: least and most that the plot shows; equal: one value.
        band: how far beside it ours may lie, and ``why``: from the paper's own curves.
        values: of the seeds; their mean is compared, their least and most are shown.
    """
    low, high = paper
    ours = sum(values) / len(values)
    off = max(low - ours, ours - high, 0.0)
    return Claim(
        what=what, source=Source.PAPER,
        theirs=f"about {low:g}" if low == high else f"about {low:g} to {high:g}",
        ours=f"{ours:.3f} ({min(values):.3f} to {max(values):.3f})", off=f"{off:.3f}",
        tolerance=f"{band:g}: {why}", agrees=off <= band, is_comparable=is_comparable,
    )  # fmt: skip


def sentence(
    what: str, theirs: str, ours: str, agrees: bool, *, source: Source = Source.PAPER,
    is_comparable: bool = True,
) -> Claim:  # fmt: skip
    """Something that is so or is not so."""
    return Claim(
        what=what, source=source, theirs=theirs, ours=ours, off="", tolerance="", agrees=agrees,
        is_comparable=is_comparable,
    )  # fmt: skip


def _digits(value: float, count: int = 4) -> str:
    """So many digits that count, and all that stand before the point."""
    if value == 0.0:
        return "0"
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated: less for a test."""

    share: float = 1.0
    num_seeds: int = 3

    def updates(self, full: int, least: int = 60) -> int:
        """So many of ``full`` updates, at least ``least``."""
        return max(least, round(full * self.share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What a figure is given."""

    effort: Effort
    images: Callable[[], Images]
    """MNIST, or what there is in its place; found when it is first asked for."""
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure that was made."""

    svg: str
    """Empty for a table."""
    claims: tuple[Claim, ...]
    data: str = ""
    """The images that it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the paper.

    Args:
        number: the paper's; what ``--only`` takes.
        stated: the setting that the paper gives.
        chosen: what it does not state, what we took, and why; empty: it states all.
    """

    number: str
    title: str
    stated: str
    chosen: str
    draw: Callable[[Workshop], Drawn]
