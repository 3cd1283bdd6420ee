"""What `paceline probe` has measured of this machine, for whoever plans with it: typed figures.

    paceline probe --- write_machine ---> the file of ceilings ---> read_machine
                                          (system/ceilings.py,       plan, doctor, bench,
                                          section "machine")         partition, collectives

Figures have the names that the probe gives them, whose last word is the unit: ``l1_latency_s``,
``memory_copy_bytes_per_s``, ``matmul_fp32_op_per_s``, ``loopback_latency_s`` (docs/machine.md lists
them). They are the best that was seen, and hold for as many cores as there were. Whoever asks for
one gets None where nobody has measured it, and measures itself, or leaves the sentence out. This
module must not know how anything is measured.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..system.ceilings import ceilings_path, read_ceilings, write_ceilings
from ..system.processors import num_cores

SECTION = "machine"
COMMAND = "paceline probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCeilings:
    """The best of each kind that was seen here.

    Attributes:
        figures: name -> value, in the unit that the name ends with.
        day: when they were measured.
        cores: that could be used then.
        why_not: why there are none, in words.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    day: str = ""
    cores: int = 0
    why_not: str = ""

    def get(self, name: str) -> float | None:
        """A figure, > 0; None: nobody has measured it."""
        return self.figures.get(name)

    def matmul_op_per_s(self, device: str, number_format: str) -> float | None:
        """What products of matrices reach on a device (a type, such as "cpu"), in "fp32" ..."""
        return self.get(f"{'' if device == 'cpu' else 'device_'}matmul_{number_format}_op_per_s")

    @property
    def source(self) -> str:
        """Where they are from, for a sentence: ``paceline probe, 2026-11-25``."""
        return f"{COMMAND}, {self.day}"


def read_machine() -> MachineCeilings:
    """What is known here; without figures where nothing is, or it was measured on other cores."""
    section, why_not = read_ceilings(SECTION)
    if section is None:
        return MachineCeilings(why_not=why_not or f"nobody has measured this machine: {COMMAND}")
    damaged = f"{ceilings_path()} holds no figures that can be read: {COMMAND}"
    if not isinstance(section, dict) or not isinstance(section.get("figures"), dict):
        return MachineCeilings(why_not=damaged)
    if section.get("cores") != num_cores():
        return MachineCeilings(
            why_not=f"it was measured on {section.get('cores')} cores, and here are {num_cores()}: "
            f"{COMMAND}"
        )
    figures = {
        str(name): float(value) for name, value in section["figures"].items() if _is_figure(value)
    }
    return MachineCeilings(figures=figures, day=str(section.get("day", "")), cores=num_cores())


def read_matmul(device: str, number_format: str, threads: int) -> tuple[float, str]:
    """What products of matrices reach here, and its source; 0: it is not known for so few threads.

    Args:
        device: "cpu", or the name of another one; number_format: "fp32" ...
    """
    known = read_machine() if device != "cpu" or threads == num_cores() else MachineCeilings()
    most = known.matmul_op_per_s(device, number_format)
    return (0.0, "") if most is None else (most, known.source)


def write_machine(figures: Mapping[str, float]) -> Path:
    """Keep these; figures of other names that were measured on as many cores stay.

    Raises:
        FileError: the file cannot be written.
    """
    whole = {**read_machine().figures, **figures}
    own = {"cores": num_cores(), "day": time.strftime("%Y-%m-%d"), "figures": whole}
    return write_ceilings(SECTION, own)


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0
