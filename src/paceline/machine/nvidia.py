"""Devices, their links and the processes on them, from nvidia-smi.

Its words for missing values (``[N/A]``, ``[Not Supported]``, ``[Insufficient Permissions]``) become
None or 0; its other text is kept, since it names causes (`causes_nvidia.py`). This module must not
know which text is a cause.
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
        minor: the number in /dev/nvidia<minor>; ``index`` if unknown.
        generation, most_generation: of PCIe; an idle device lowers the first to save power.
        nvlinks, nvlink_bytes_per_s: its links to other devices, and their total rate one way.
        capability: such as ``9.0``.
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
    """Return every device that the driver shows; none if the driver does not answer."""
    summary = source.run(*SUMMARY)
    if summary is None or not summary.is_good:  # a driver that hangs once would hang again
        return []
    output = source.run(*QUERY)
    if output is None or not output.is_good:
        return []
    links = _nvlinks(source)
    rows = [[cell.strip() for cell in line.split(",")] for line in output.text.splitlines()]
    gpus = [_gpu(dict(zip(_FIELDS, row, strict=True)), source) for row in rows if _is_row(row)]
    return [_linked(gpu, links.get(gpu.index, [])) for gpu in gpus]


def read_apps(source: MachineSource) -> list[tuple[int, str, int]]:
    """Return (process, device UUID, bytes) of each process; numbers are those of the host."""
    output = source.run(*APPS)
    if output is None or not output.is_good:
        return []
    apps = []
    for line in output.text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdigit():
            apps.append((int(cells[0]), cells[1], _mebibytes(cells[2])))
    return apps


def driver_cuda(source: MachineSource) -> str:
    """Return the newest CUDA that the driver can run, such as ``12.8``; empty: unknown."""
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
    """Return device -> GB/s of each of its active links."""
    output = source.run(*NVLINK)
    links: dict[int, list[float]] = {}
    index = -1
    for match in _LANES.finditer(output.text if output is not None and output.is_good else ""):
        if match[1] is not None:
            index = int(match[1])
        else:
            links.setdefault(index, []).append(float(match[2]))
    return links


def _mebibytes(cell: str) -> int:
    return int(_number(cell, float) or 0) << 20


def _number(cell: str, kind: Callable[[str], T]) -> T | None:
    try:
        return kind(cell)
    except ValueError:
        return None
