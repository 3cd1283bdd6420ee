"""A measured figure of the machine, and the textbook's value for it.

The textbook's values are those of the lesson on hardware (D2L, "Dive into Deep Learning", 13.4,
Zhang et al.) as two notes on it give them: their table of latencies, and the figures in their text.
They contradict each other in places; a range covers both.
"""

import statistics
from dataclasses import dataclass
from enum import Enum

from ..bench.samples import Measured
from ..report.text import three_figures


class Unit(Enum):
    """The unit of a figure; its name in the file of ceilings ends with this value."""

    SECONDS = "s"
    BYTES = "bytes_per_s"
    OPERATIONS = "op_per_s"
    COUNT = "per_s"

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self is not Unit.SECONDS

    def render(self, value: float) -> str:
        """Format with three digits: ``1.02 ns``, ``21.3 GB/s``, ``140 GFLOP/s``, ``88,100 /s``."""
        if self is Unit.SECONDS:
            return f"{value * 1e9:.3g} ns" if value < 1e-6 else three_figures(value)
        if self is Unit.COUNT:
            return f"{float(f'{value:.3g}'):,.0f} /s"
        word = "B/s" if self is Unit.BYTES else "op/s"
        for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
            if value >= factor:
                return f"{value / factor:.3g} {prefix}{word}"
        return f"{value:.3g} {word}"


class Group(Enum):
    """Figures that are measured and shown together."""

    MEMORY = "caches and memory"
    RATES = "arithmetic"
    STORAGE = "storage"
    MESSAGES = "between cores and machines"
    SOFTWARE = "processes and calls"
    DEVICE = "device"


TEXTBOOK: dict[str, tuple[float, float]] = {
    "l1_latency_s": (1.5e-9, 1.5e-9),
    "l2_latency_s": (5e-9, 5e-9),
    "l3_latency_s": (16e-9, 40e-9),
    "memory_latency_s": (46e-9, 120e-9),
    "memory_walk_latency_s": (46e-9, 120e-9),
    "memory_burst_latency_s": (0.2e-9, 0.2e-9),
    "memory_banks_latency_s": (25e-9, 25e-9),  # a memory of four banks: 100 ns / 4
    "memory_read_bytes_per_s": (40e9, 100e9),  # two to four channels
    "memory_copy_bytes_per_s": (40e9, 100e9),
    "memory_triad_bytes_per_s": (40e9, 100e9),
    "disk_read_latency_s": (120e-6, 120e-6),
    "disk_reads_per_s": (100e3, 500e3),
    "peer_bytes_per_s": (0.125e9, 12.5e9),  # Ethernet of 1 to 100 Gbit/s
    "to_device_pinned_bytes_per_s": (12.5e9, 32e9),  # 1 MB in 80 us; PCIe 4.0
    "from_device_pinned_bytes_per_s": (12.5e9, 32e9),
    "between_devices_bytes_per_s": (33e9, 100e9),  # 1 MB in 30 us over NVLink; NVLink
}
"""Name of a figure -> lowest and highest value, in the figure's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(Measured):
    """One quantity, measured several times.

    Args:
        key: its name in the file of ceilings.
        what: description for people.
        samples: in the unit; empty: it was not measured.
        how: conditions of the measurement.
        why_not: why it was not measured.
    """

    key: str
    what: str
    group: Group
    unit: Unit
    samples: tuple[float, ...] = ()
    how: str = ""
    why_not: str = ""

    @property
    def best(self) -> float | None:
        """The best sample: other programs can only make it worse."""
        if not self.samples:
            return None
        return max(self.samples) if self.unit.is_rate else min(self.samples)

    @property
    def median(self) -> float | None:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def textbook(self) -> tuple[float, float] | None:
        """The textbook's range; None: it has none."""
        return TEXTBOOK.get(self.key)

    def to_json(self) -> dict[str, object]:
        """Its fields (docs/json.md)."""
        textbook = self.textbook
        return {
            "key": self.key, "what": self.what, "group": self.group.value, "unit": self.unit.value,
            "best": self.best, "median": self.median, "count": len(self.samples),
            "textbook": None if textbook is None else list(textbook),
            "how": self.how, "why_not": self.why_not,
        }  # fmt: skip
