"""The table of a verification: a row per case, the causes of a difference, and its text.

This module must not know how a case is run, nor how a cause is found.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..report.text import table
from .cases import CLOSE, Compared, Dtype, VerifyCase

ALLOWED: dict[Dtype, float] = {"float64": 1e-12, "float32": CLOSE}
"""Largest absolute difference of a parameter after the updates of a row."""
_OF_ROUNDING = 10.0
"""Allowed multiple of the difference that the last bit of each weight makes, if larger."""

CauseKind = Literal["layer", "random", "mean of means", "sum", "other mean", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One case and its result."""

    case: VerifyCase
    found: Compared

    @property
    def allowed(self) -> float:
        """Largest difference that counts as equal."""
        return max(ALLOWED[self.case.dtype], _OF_ROUNDING * self.found.rounding)

    @property
    def is_equal(self) -> bool:
        return self.found.difference <= self.allowed

    def to_json(self) -> dict[str, object]:
        """An element of ``rows``."""
        difference = self.found.difference
        return {
            "workers": self.case.workers,
            "dtype": self.case.dtype,
            "batches": list(self.found.sizes),
            "parts": _parts(self),
            "set_aside": list(self.case.frozen),
            "largest_difference": difference if math.isfinite(difference) else None,
            "where": self.found.name,
            "allowed": self.allowed,
            "rounding": self.found.rounding,
            "is_equal": self.is_equal,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason why several workers compute something else than one.

    Args:
        what: the layer, parameter or mistake, by name.
        why: in words.
        fix: what to write instead.
    """

    kind: CauseKind
    what: str
    why: str
    fix: str

    def to_json(self) -> dict[str, object]:
        """An element of ``causes``."""
        return {"kind": self.kind, "what": self.what, "why": self.why, "fix": self.fix}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of ``paceline verify``.

    Attributes:
        rows: one per case.
        causes: of the first row that is not equal.
        aside: that row again, with the layers among the causes set aside; None: there are none.
        notes: what could not be computed, and why; and whether the batches are not the rows'.
    """

    subject: str
    rows: tuple[VerifyRow, ...]
    causes: tuple[Cause, ...]
    aside: VerifyRow | None
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return bool(self.rows) and all(row.is_equal for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """The result of ``paceline verify --json``."""
        return {
            "subject": self.subject,
            "is_equal": self.is_equal,
            "rows": [row.to_json() for row in self.rows],
            "causes": [one.to_json() for one in self.causes],
            "set_aside": None if self.aside is None else self.aside.to_json(),
            "notes": list(self.notes),
        }


def render_verified(one: Verified) -> list[str]:
    """The table, the verdict, and each cause with its fix."""
    head = ("workers", "format", "batches", "parts of the first", "largest difference", "verdict")
    rows = [_cells(row) for row in one.rows]
    if one.aside is not None:
        rows.append(_cells(one.aside))
    lines = [*table(head, rows), ""]
    counts = ", ".join(dict.fromkeys(str(row.case.workers) for row in one.rows))
    formats = " and ".join(
        f"{dtype} to {ALLOWED[dtype]:g}"
        for dtype in dict.fromkeys(row.case.dtype for row in one.rows)
    )
    if one.is_equal:
        compute = "worker computes" if counts == "1" else "workers compute"
        lines.append(f"equal: {counts} {compute} what one does ({formats})")
    else:
        number = sum(not row.is_equal for row in one.rows)
        lines.append(f"different: {number} of {len(one.rows)} rows")
    alike: dict[tuple[str, str], list[str]] = {}
    for cause in one.causes:
        alike.setdefault((cause.why, cause.fix), []).append(cause.what)
    for (why, fix), names in alike.items():
        lines += [f"{_some(names)}: {why}", f"  fix: {fix}"]
    if one.aside is not None and one.aside.is_equal:
        lines.append("without what is set aside several workers compute what one does")
    return [*lines, *(f"note: {note}" for note in one.notes)]


def _cells(row: VerifyRow) -> tuple[str, ...]:
    aside = f", without {_some(row.case.frozen, 2)}" if row.case.frozen else ""
    where = "" if row.is_equal else f" at {row.found.name}"
    if row.is_equal and row.found.rounding:
        where = f", the last bit of the weights makes {row.found.rounding:.1e}"
    return (
        f"{row.case.workers}",
        row.case.dtype,
        ", ".join(map(str, row.found.sizes)),
        _parts(row),
        f"{row.found.difference:.1e}",
        ("equal" if row.is_equal else f"different{where}") + aside,
    )


def _some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _parts(row: VerifyRow) -> str:
    """``7 + 6``; of many: ``3 x 7 + 2 x 6``."""
    counts = Counter(sorted(row.found.shared.samples, reverse=True))
    return " + ".join(
        f"{size}" if count == 1 else f"{count} x {size}" for size, count in counts.items()
    )
