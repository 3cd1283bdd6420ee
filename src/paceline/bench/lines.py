"""Tables and figures as plain text: what the benches print.

This module must not know what is measured.
"""

from collections.abc import Sequence

from .samples import Timing


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    whole = [header, *rows]
    widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


def duration(seconds: float | None) -> str:
    """Three figures with a unit: ``41.2 us``, ``1.53 ms``, ``12.8 s``; "-" for None."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if size * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if size < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.0f} ns"


def quartiles(timing: Timing | None) -> str:
    """Where the middle half lies: ``40.1 to 42.0 us``."""
    if timing is None:
        return "-"
    low, high = (duration(value) for value in timing.quartiles_s)
    (number, unit), (_, other) = low.split(), high.split()
    return f"{number} to {high}" if unit == other else f"{low} to {high}"


def size(num_bytes: int | None) -> str:
    """Bytes in the unit that people use: ``660 KiB``, ``2.1 MiB``; "-" for None."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if unit != "bytes" else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
