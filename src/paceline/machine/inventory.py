"""Everything known about a machine as one value, and its JSON. This module must not know causes."""

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .hardware import Card, Drivers, Maker, read_cards, read_drivers
from .libraries import Libraries, Torch, read_libraries, read_torch
from .nvidia import Gpu, driver_cuda, read_gpus
from .processor import Processor, read_processor
from .source import MachineSource
from .storage import Disk, folders_of_interest, read_disk

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION",
    "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "PJRT_DEVICE", "LD_LIBRARY_PATH",
    "CUDA_LAUNCH_BLOCKING", "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS",
)  # fmt: skip
"""Environment variables that change which devices a program finds or how it uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One machine.

    Attributes:
        gpus: devices that NVIDIA's driver shows; ``cards`` are those on the bus.
        driver_cuda: the newest CUDA that NVIDIA's driver can run.
        variables: the environment variables that matter and are set.
        translated: whether an Apple runs an Intel build of Python through Rosetta.
    """

    processor: Processor
    disks: tuple[Disk, ...]
    cards: tuple[Card, ...]
    gpus: tuple[Gpu, ...]
    drivers: Drivers
    driver_cuda: str
    torch: Torch
    libraries: Libraries
    variables: dict[str, str]
    platform: str
    translated: bool = False

    def has(self, maker: Maker) -> bool:
        """Whether the bus, the driver's files or the driver show an accelerator of this maker."""
        nodes = self.drivers.nodes
        if maker is Maker.NVIDIA and (self.gpus or any(_is_nvidia(node) for node in nodes)):
            return True
        if maker is Maker.NVIDIA and self.drivers.windows == 2 and "/dev/dxg" in nodes:
            return self.drivers.libcuda or self.drivers.smi is not None
        if maker is Maker.TPU and any(map(is_tpu_node, nodes)):
            return True
        return any(card.maker is maker for card in self.cards)

    @property
    def has_accelerator(self) -> bool:
        """Whether there is an accelerator that torch could use."""
        return any(self.has(maker) for maker in Maker if maker is not Maker.OTHER)

    def to_json(self) -> dict[str, object]:
        """Its fields (docs/json.md)."""
        fields = {name: _plain(value) for name, value in dataclasses.asdict(self).items()}
        smi = self.drivers.smi
        fields["drivers"]["smi"] = smi.text if smi is not None else None
        return fields


def read_inventory(source: MachineSource) -> Inventory:
    """Read everything in a second; if there may be an accelerator, ask torch, a few more."""
    cards = tuple(read_cards(source))
    drivers = read_drivers(source)
    may_be = (
        bool(cards or drivers.nodes.keys() - {"/dev/dri/renderD128"})
        or (drivers.smi is not None and drivers.smi.is_good)
        or source.platform == "darwin"
    )
    return Inventory(
        processor=read_processor(source),
        disks=tuple(read_disk(source, folder) for folder in folders_of_interest()),
        cards=cards, gpus=tuple(read_gpus(source)), drivers=drivers,
        driver_cuda=driver_cuda(source), torch=read_torch(source, ask=may_be),
        libraries=read_libraries(source), platform=source.platform,
        variables={
            name: source.environ[name] for name in _VARIABLES if name in source.environ
        },
        translated=_is_translated(source),
    )  # fmt: skip


def _is_translated(source: MachineSource) -> bool:
    if source.platform != "darwin":
        return False
    output = source.run("sysctl", "-n", "sysctl.proc_translated")
    return output is not None and output.text.strip() == "1"


def is_tpu_node(node: str) -> bool:
    """Whether this is a TPU's file; those of other accelerators lie in a folder, /dev/accel."""
    return re.fullmatch(r"/dev/accel\d+", node) is not None


def _is_nvidia(node: str) -> bool:
    return node.startswith("/dev/nvidia") and node[-1].isdigit()


def _plain(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
