"""What nvidia-smi tells of devices, their links, and who computes on them.

Its words for what it cannot tell (``[N/A]``, ``[Not Supported]``, ``[Insufficient Permissions]``)
become None or 0; what else it says is kept, since that is where causes are named
(`causes_nvidia.py`). This module must not know which of them is one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from .source import MachineSource

T = TypeVar("T")

_FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "driver_version",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "pcie.link.width.max", "compute_mode", "mig.mode.current", "compute_cap", "pci.bus_id",
)  # fmt: skip
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
APPS = (
    "nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"
)  # fmt: skip
SUMMARY = ("nvidia-smi",)
NVLINK = ("nvidia-smi", "nvlink", "--status")
_LANES = re.compile(r"GPU (\d+):|Link \d+: ([\d.]+) GB/s")
_CUDA = re.compile(r"CUDA Version:\s*([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device.

    Attributes:
        utilization: share of the time in which a kernel ran, 0 to 1.
        minor: the number in /dev/nvidia<minor>; ``index`` where it is not known.
        generation, most_generation: of PCIe; an idle device lowers the first to save power.
        nvlinks, nvlink_bytes_per_s: its links to other devices, and what they carry one way in all.
        capability: as ``9.0``.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    utilization: float
    minor: int
    driver: str = ""
    generation: int | None = None
    most_generation: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    compute_mode: str = ""
    is_mig: bool = False
    capability: str = ""
    slot: str = ""
    nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0


def read_gpus(source: MachineSource) -> list[Gpu]:
    """Every device that the driver shows; none where it cannot be asked."""
    summary = source.run(*SUMMARY)
    if summary is None or not summary.is_good:  # who hangs once would hang again
        return []
    output = source.run(*QUERY)
    if output is None or not output.is_good:
        return []
    links = _nvlinks(source)
    rows = [[cell.strip() for cell in line.split(",")] for line in output.text.splitlines()]
    gpus = [_gpu(dict(zip(_FIELDS, row, strict=True)), source) for row in rows if _is_row(row)]
    return [_linked(gpu, links.get(gpu.index, [])) for gpu in gpus]


def read_apps(source: MachineSource) -> list[tuple[int, str, int]]:
    """(process, device's uuid, bytes) of who computes; numbers are those of the driver's host."""
    output = source.run(*APPS)
    if output is None or not output.is_good:
        return []
    found = []
    for line in output.text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            found.append((int(cells[0]), cells[1], _mebibytes(cells[2])))
    return found


def driver_cuda(source: MachineSource) -> str:
    """The newest CUDA that the driver can run, as ``12.8``; empty: it does not tell."""
    output = source.run(*SUMMARY)
    match = _CUDA.search(output.text) if output is not None else None
    return match[1] if match else ""


def _is_row(row: list[str]) -> bool:
    return len(row) == len(_FIELDS) and row[0].isdigit()


def _gpu(row: dict[str, str], source: MachineSource) -> Gpu:
    slot = row["pci.bus_id"].lower()[-12:]
    minors = re.search(
        r"Device Minor:\s*(\d+)", source.text(f"/proc/driver/nvidia/gpus/{slot}/information")
    )
    index = int(row["index"])
    return Gpu(
        index=index, uuid=row["uuid"], name=row["name"], slot=slot,
        total_bytes=_mebibytes(row["memory.total"]), used_bytes=_mebibytes(row["memory.used"]),
        utilization=(_number(row["utilization.gpu"], float) or 0.0) / 100,
        minor=int(minors[1]) if minors else index, driver=row["driver_version"],
        generation=_number(row["pcie.link.gen.current"], int),
        most_generation=_number(row["pcie.link.gen.max"], int),
        lanes=_number(row["pcie.link.width.current"], int),
        most_lanes=_number(row["pcie.link.width.max"], int),
        compute_mode=row["compute_mode"], is_mig=row["mig.mode.current"] == "Enabled",
        capability=row["compute_cap"],
    )  # fmt: skip


def _linked(gpu: Gpu, speeds: list[float]) -> Gpu:
    return replace(gpu, nvlinks=len(speeds), nvlink_bytes_per_s=sum(speeds) * 1e9)


def _nvlinks(source: MachineSource) -> dict[int, list[float]]:
    """Device -> GB/s of each of its links that is up."""
    output = source.run(*NVLINK)
    found: dict[int, list[float]] = {}
    here = -1
    for match in _LANES.finditer(output.text if output is not None and output.is_good else ""):
        if match[1] is not None:
            here = int(match[1])
        else:
            found.setdefault(here, []).append(float(match[2]))
    return found


def _mebibytes(cell: str) -> int:
    return int(_number(cell, float) or 0) << 20


def _number(cell: str, kind: Callable[[str], T]) -> T | None:
    try:
        return kind(cell)
    except ValueError:
        return None
