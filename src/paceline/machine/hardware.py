"""Accelerators on the buses of this machine, with or without a driver, and the drivers' files.

    /sys/bus/pci/devices      maker, class, link, NUMA node, bound driver
    /proc/modules, /lib/modules     kernel modules: loaded or installed
    /dev                      device files, and whether they can be opened
    nvidia-smi, ldconfig, dmesg     output of the driver

An integrated GPU does not count as an accelerator here: it shares the processor's memory. This
module must not know what is wrong.
"""

import re
from dataclasses import dataclass
from enum import Enum

from .nvidia import SUMMARY
from .source import CommandOutput, MachineSource

_PCI = "/sys/bus/pci/devices"
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""GT/s of a lane -> generation of PCIe."""
_CARD_BYTES = 4 << 30
"""A Radeon with at least this much memory counts as a card; an integrated one has less."""
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""Google's: v2 and v3, one without a public name, v4, v5p, v5e, v6e, 7x, as jax has them
(jax-ml/jax 167d72d, jax/_src/hardware_utils.py); its network cards have other numbers."""
_ARC = re.compile(r"0x(56|e2|0bd|4905)")
"""Intel's cards (pci.ids): Arc and Flex, Battlemage, Max, DG1; others are in a processor."""
_OTHERS = {
    ("0x1d95", ""): "Graphcore IPU", ("0x1da3", ""): "Habana Gaudi",
    ("0x1d0f", "0x7064"): "AWS Inferentia", ("0x1d0f", "0x7164"): "AWS Trainium",
    ("0x1d0f", "0x7264"): "AWS Inferentia2", ("0x1de0", ""): "Groq",
}  # fmt: skip
_MODULES = ("nvidia", "nvidia_uvm", "nouveau", "amdgpu", "i915", "xe")
_NODE = re.compile(r"nvidia\d+|nvidiactl|nvidia-uvm|nvmap|kfd|dxg|accel\d+|renderD\d+")
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
    "/usr/local/nvidia/lib64",
)  # fmt: skip
"""Where libcuda lies; ldconfig knows, and is not always on the path."""


class Maker(Enum):
    """Maker of an accelerator, by the software that reaches it."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    INTEL = "Intel"
    TPU = "TPU"
    APPLE = "Apple"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator as the bus shows it.

    Attributes:
        driver: the driver bound to it; empty: none.
        generation, most_generation, lanes, most_lanes: of its PCIe link, now and at most.
        numa_node: the nearest NUMA node; None: there is only one, or it is unknown.
    """

    maker: Maker
    slot: str
    name: str = ""
    driver: str = ""
    generation: int | None = None
    most_generation: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """Drivers and environment between a card and a program.

    Attributes:
        loaded: relevant kernel modules that are loaded.
        installed: those that could be loaded into this kernel.
        other_kernels: whether NVIDIA's module is installed for another kernel.
        nodes: files under /dev -> whether they can be opened.
        smi: the output of nvidia-smi; None: there is no such command.
        libcuda: whether programs find the driver's library.
        kernel_log: lines of NVIDIA's module in the kernel log, if readable.
        nvidia: the version of the loaded module.
        container: ``docker`` and the like; empty: none detected.
        windows: version of WSL; 0: none.
        system: distribution, such as ``ubuntu``.
    """

    loaded: frozenset[str]
    installed: frozenset[str]
    other_kernels: bool
    nodes: dict[str, bool]
    smi: CommandOutput | None
    libcuda: bool
    kernel_log: str
    nvidia: str
    container: str
    windows: int
    kernel: str
    system: str


def read_cards(source: MachineSource) -> list[Card]:
    """Return every accelerator on the PCI bus, or a Mac's own."""
    if source.platform == "darwin":
        output = source.run("sysctl", "-n", "machdep.cpu.brand_string")
        name = output.text.strip() if output is not None else ""
        is_apple = name.startswith(("Apple", "VirtualApple"))  # under Rosetta
        return [Card(maker=Maker.APPLE, slot="", name=name)] if is_apple else []
    cards = []
    for slot in source.names(_PCI):
        folder = f"{_PCI}/{slot}"
        maker_and_name = _maker(source, folder)
        if maker_and_name is not None:
            cards.append(_card(source, folder, slot, *maker_and_name))
    return cards


def _maker(source: MachineSource, folder: str) -> tuple[Maker, str] | None:
    vendor, device = source.text(f"{folder}/vendor"), source.text(f"{folder}/device")
    family = source.text(f"{folder}/class")[:6]
    is_screen, is_engine = family.startswith("0x03"), family == "0x1200"
    if vendor == "0x10de" and (is_screen or is_engine):
        return Maker.NVIDIA, ""
    if vendor == "0x1002" and (family == "0x0380" or is_engine or _is_card(source, folder)):
        return Maker.AMD, ""
    if vendor == "0x8086" and (is_screen or is_engine) and _ARC.match(device):
        return Maker.INTEL, ""
    if vendor == "0x1ae0" and device in _TPUS:
        return Maker.TPU, ""
    for (maker, model), name in _OTHERS.items():
        if vendor == maker and model in ("", device):
            return Maker.OTHER, name
    return None


def _is_card(source: MachineSource, here: str) -> bool:
    memory = source.text(f"{here}/mem_info_vram_total")
    return memory.isdigit() and int(memory) >= _CARD_BYTES


def _card(source: MachineSource, here: str, slot: str, maker: Maker, name: str) -> Card:
    node = source.text(f"{here}/numa_node")
    return Card(
        maker=maker, slot=slot, name=name or source.text(f"{here}/product_name"),
        driver=source.link(f"{here}/driver"),
        generation=_generation(source.text(f"{here}/current_link_speed")),
        most_generation=_generation(source.text(f"{here}/max_link_speed")),
        lanes=_lanes(source.text(f"{here}/current_link_width")),
        most_lanes=_lanes(source.text(f"{here}/max_link_width")),
        numa_node=int(node) if node.isdigit() else None,
    )  # fmt: skip


def _generation(speed: str) -> int | None:
    """``16.0 GT/s PCIe``."""
    return _GENERATIONS.get(speed.partition(" ")[0])


def _lanes(width: str) -> int | None:
    return int(width) if width.isdigit() and width != "0" else None


def read_drivers(source: MachineSource) -> Drivers:
    """Read the state of the drivers."""
    words = source.text("/proc/version").split()  # Linux version NUMBER ...
    kernel = words[2] if len(words) > 2 else ""
    loaded = {line.split()[0] for line in source.text("/proc/modules").splitlines()}
    version = re.search(r"(?:Kernel Module\D*?|NVRM version:.*?)\s(\d+\.\d[\d.]*)", source.text(
        "/proc/driver/nvidia/version"
    ))  # fmt: skip
    libraries = source.run("ldconfig", "-p")
    log = source.run("dmesg")
    return Drivers(
        loaded=frozenset(loaded & {*_MODULES}),
        installed=frozenset(module for module in _MODULES if _is_installed(source, kernel, module)),
        other_kernels=any(
            _is_installed(source, version, "nvidia")
            for version in source.names("/lib/modules") if version != kernel
        ) or bool(source.names("/var/lib/dkms/nvidia")),
        nodes=_nodes(source), smi=source.run(*SUMMARY),
        libcuda=_has_libcuda(source, libraries.text if libraries is not None else ""),
        kernel_log="\n".join(
            line for line in (log.text if log is not None else "").splitlines()
            if "NVRM" in line or "nvidia" in line.lower()
        ),
        nvidia=version[1] if version else "",
        container=_container(source), windows=_windows(source, kernel), kernel=kernel,
        system=_system(source),
    )  # fmt: skip


def _is_installed(source: MachineSource, kernel: str, module: str) -> bool:
    text = source.text(f"/lib/modules/{kernel}/modules.dep")
    return re.search(rf"/{module.replace('_', '[-_]')}\.ko", text) is not None


def _nodes(source: MachineSource) -> dict[str, bool]:
    names = [
        f"/dev/{folder}{name}"
        for folder in ("", "dri/", "accel/")
        for name in source.names(f"/dev/{folder}")
        if _NODE.fullmatch(name)
    ]
    return {name: source.may_open(name) for name in names}


def _has_libcuda(source: MachineSource, libraries: str) -> bool:
    folders = [*source.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/wsl/lib"]
    candidates = [folder for folder in (*folders, *_LIBRARIES) if folder and "stubs" not in folder]
    return "libcuda.so.1" in libraries or any(
        source.exists(f"{folder}/libcuda.so.1") for folder in candidates
    )


def _container(source: MachineSource) -> str:
    if source.exists("/.dockerenv"):
        return "docker"
    if source.exists("/run/.containerenv"):
        return "podman"
    if source.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    return "singularity" if source.environ.get("SINGULARITY_NAME") else ""


def _windows(source: MachineSource, kernel: str) -> int:
    if "microsoft" not in kernel.lower():
        return 0
    return 2 if "WSL2" in kernel or source.exists("/dev/dxg") else 1


def _system(source: MachineSource) -> str:
    match = re.search(r'^ID="?([a-z]+)', source.text("/etc/os-release"), re.MULTILINE)
    return match[1] if match else ""
