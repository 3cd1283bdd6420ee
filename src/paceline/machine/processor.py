"""The processor and its memory, as the kernel describes them.

    /proc/cpuinfo                    model name, vector and matrix instructions
    /sys/devices/system/cpu          cores, threads on each, caches
    /sys/devices/system/node         NUMA nodes and their distances
    /sys/devices/system/edac         memory controllers; else dmidecode, which needs root

An unknown value is None or empty, never guessed. This module must not know what it is good for.
"""

import contextlib
import re
from dataclasses import dataclass

from ..system.processors import num_cores
from .source import MachineSource

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_WIDTHS = (
    ("avx512f", 512), ("avx2", 256), ("avx", 256), ("sse2", 128), ("asimd", 128), ("neon", 128),
)  # fmt: skip
_MATRICES = (
    "amx_bf16", "amx_int8", "amx_fp16", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx512_vnni",
    "sme", "bf16", "i8mm",
)  # fmt: skip
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One kind of cache.

    Attributes:
        kind: ``L1d``, ``L1i``, ``L2``, ``L3``.
        num_bytes: of one of them.
        count: how many there are.
    """

    kind: str
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """Cores that share a memory, and how far each node's memory is (10: its own)."""

    number: int
    cores: str
    memory_bytes: int | None
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """All processors of a machine.

    Attributes:
        cores, threads, sockets: of the machine, if known; a core has one thread or several.
        usable_cores: those that affinity and control group allow this process.
        vector_bits: width of the widest registers.
        matrices: instructions for matrices and short number formats.
        memory_channels, memory_modules: None: unknown, or visible only to root.
    """

    name: str
    threads: int
    cores: int | None
    sockets: int | None
    usable_cores: int
    caches: tuple[Cache, ...]
    vector_bits: int | None
    matrices: tuple[str, ...]
    nodes: tuple[NumaNode, ...]
    memory_bytes: int | None
    memory_channels: int | None
    memory_modules: int | None
    governor: str


def read_processor(source: MachineSource) -> Processor:
    """Read the processor, as far as the system describes it."""
    info = source.text("/proc/cpuinfo")
    flags = {*_row(info, "flags").split(), *_row(info, "Features").split()}
    numbers = _span(source.text(f"{_CPU}/online")) or _counted(info)
    places = {
        (source.text(f"{_CPU}/cpu{number}/topology/physical_package_id"),
         source.text(f"{_CPU}/cpu{number}/topology/core_id"))
        for number in numbers
    }  # fmt: skip
    is_told = all(package and core for package, core in places) and bool(places)
    channels, modules = _memory_layout(source)
    return Processor(
        name=_row(info, "model name") or _row(info, "Model") or _row(info, "CPU implementer"),
        threads=len(numbers),
        cores=len(places) if is_told else None,
        sockets=len({package for package, _ in places}) if is_told else None,
        usable_cores=num_cores(source.root),
        caches=_caches(source, numbers), vector_bits=_vector_bits(source, flags),
        matrices=tuple(instruction for instruction in _MATRICES if instruction in flags),
        nodes=_nodes(source), memory_bytes=_kibibytes(source.text("/proc/meminfo"), "MemTotal"),
        memory_channels=channels, memory_modules=modules,
        governor=source.text(f"{_CPU}/cpu0/cpufreq/scaling_governor"),
    )  # fmt: skip


def _vector_bits(source: MachineSource, flags: set[str]) -> int | None:
    if "sve" in flags:
        length = source.text("/proc/sys/abi/sve_default_vector_length")
        if length.isdigit():
            return int(length) * 8
    return next((bits for flag, bits in _WIDTHS if flag in flags), None)


def _caches(source: MachineSource, numbers: list[int]) -> tuple[Cache, ...]:
    caches: dict[str, tuple[int, set[str]]] = {}
    for number in numbers:
        folder = f"{_CPU}/cpu{number}/cache"
        for index in source.names(folder):
            cache = f"{folder}/{index}"
            size = _bytes(source.text(f"{cache}/size"))
            if not index.startswith("index") or size is None:
                continue
            letter = {"Data": "d", "Instruction": "i"}.get(source.text(f"{cache}/type"), "")
            kind = f"L{source.text(f'{cache}/level')}{letter}"
            caches.setdefault(kind, (size, set()))[1].add(source.text(f"{cache}/shared_cpu_list"))
    return tuple(
        Cache(kind=kind, num_bytes=size, count=len(shared))
        for kind, (size, shared) in sorted(caches.items())
    )


def _nodes(source: MachineSource) -> tuple[NumaNode, ...]:
    names = [name for name in source.names(_NODE) if re.fullmatch(r"node\d+", name)]
    return tuple(
        NumaNode(
            number=int(name[4:]), cores=source.text(f"{_NODE}/{name}/cpulist"),
            memory_bytes=_kibibytes(
                source.text(f"{_NODE}/{name}/meminfo").replace(f"Node {name[4:]} ", ""), "MemTotal"
            ),
            distances=tuple(
                int(distance) for distance in source.text(f"{_NODE}/{name}/distance").split()
                if distance.isdigit()
            ),
        )
        for name in names
    )  # fmt: skip


def _memory_layout(source: MachineSource) -> tuple[int | None, int | None]:
    """Return the numbers of memory channels and modules in use."""
    folder = "/sys/devices/system/edac/mc"
    channels, modules = set(), 0
    for controller in source.names(folder):
        for module in source.names(f"{folder}/{controller}"):
            here = f"{folder}/{controller}/{module}"
            if re.fullmatch(r"(dimm|rank)\d+", module) and source.text(f"{here}/size") != "0":
                modules += 1
                where = re.search(r"channel (\d+)", source.text(f"{here}/dimm_location"))
                channels.add((controller, where[1] if where else module))
    if modules:
        return len(channels), modules
    return _memory_of_firmware(source)


def _memory_of_firmware(source: MachineSource) -> tuple[int | None, int | None]:
    output = source.run("dmidecode", "--type", "memory")
    if output is None or not output.is_good:
        return None, None
    channels, modules = set(), 0
    for device in output.text.split("Memory Device")[1:]:
        if not re.search(r"^\s*Size: \d+ [MG]B", device, re.MULTILINE):
            continue
        modules += 1
        bank = re.search(r"(?:CHANNEL|Channel)[ _-]?([A-Z0-9])", device)
        slot = re.search(r"^\s*Locator: .*?DIMM[ _]?([A-Z])\d", device, re.MULTILINE)
        package = re.search(r"\b(?:P|CPU|NODE) ?(\d)", device)
        if channel := bank or slot:
            channels.add((package[1] if package else "", channel[1]))
    return len(channels) or None, modules or None


def _row(text: str, name: str) -> str:
    """Return the value of the first row with this name."""
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _counted(info: str) -> list[int]:
    return [int(number) for number in re.findall(r"^processor\s*:\s*(\d+)", info, re.MULTILINE)]


def _span(text: str) -> list[int]:
    """Parse ``0-3,8`` into numbers."""
    numbers: list[int] = []
    with contextlib.suppress(ValueError):
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _bytes(text: str) -> int | None:
    """Parse a size such as ``1024K``."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _UNITS.get(match[2], 1) if match else None


def _kibibytes(text: str, name: str) -> int | None:
    words = _row(text, name).split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None
