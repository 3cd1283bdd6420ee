"""The results of `paceline probe` for this machine, as typed figures for planning.

    paceline probe --- write_machine ---> the file of ceilings ---> read_machine
                                          (system/ceilings.py,       plan, doctor, bench,
                                          section "machine")         partition, collectives

A figure's name ends with its unit: ``l1_latency_s``, ``memory_copy_bytes_per_s``,
``matmul_fp32_op_per_s``, ``loopback_latency_s`` (docs/machine.md lists them). The values are the
best measured, and hold for the number of cores at that time. A figure that was not measured is
None; the caller then measures it or leaves it out. This module must not know how anything is
measured.
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
    """The best measured value of each kind.

    Attributes:
        figures: name -> value, in the unit that the name ends with.
        day: date of the measurement.
        cores: number of usable cores at that time.
        why_not: why there are no figures.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    day: str = ""
    cores: int = 0
    why_not: str = ""

    def get(self, name: str) -> float | None:
        """Return a figure, > 0; None: it was not measured."""
        return self.figures.get(name)

    def matmul_op_per_s(self, device: str, number_format: str) -> float | None:
        """Return the rate of matrix products by device type ("cpu") and format ("fp32")."""
        return self.get(f"{'' if device == 'cpu' else 'device_'}matmul_{number_format}_op_per_s")

    @property
    def source(self) -> str:
        """The source, for a sentence: ``paceline probe, 2026-11-25``."""
        return f"{COMMAND}, {self.day}"


def read_machine() -> MachineCeilings:
    """Read this machine's figures; none if it was not probed, or with another number of cores."""
    section, why_not = read_ceilings(SECTION)
    if section is None:
        return MachineCeilings(why_not=why_not or f"this machine was not probed: run {COMMAND}")
    damaged = f"{ceilings_path()} holds no figures that can be read: run {COMMAND}"
    if not isinstance(section, dict) or not isinstance(section.get("figures"), dict):
        return MachineCeilings(why_not=damaged)
    if section.get("cores") != num_cores():
        return MachineCeilings(
            why_not=f"it was probed with {section.get('cores')} cores, and there are now "
            f"{num_cores()}: run {COMMAND}"
        )
    figures = {
        str(name): float(value) for name, value in section["figures"].items() if _is_figure(value)
    }
    return MachineCeilings(figures=figures, day=str(section.get("day", "")), cores=num_cores())


def read_matmul(device: str, number_format: str, threads: int) -> tuple[float, str]:
    """Return the rate of matrix products and its source; 0: unknown for this number of threads.

    Args:
        device: "cpu", or the name of another one; number_format: "fp32" ...
    """
    known = read_machine() if device != "cpu" or threads == num_cores() else MachineCeilings()
    most = known.matmul_op_per_s(device, number_format)
    return (0.0, "") if most is None else (most, known.source)


def write_machine(figures: Mapping[str, float]) -> Path:
    """Store these figures; others that were measured with the same number of cores stay.

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
