"""What ``paceline env`` prints: the verdict first, then what the machine is.

A bug report needs all of it. This module must not know how facts are read.
"""

from collections.abc import Iterator

from ..plan import format_bytes
from .causes import Usability
from .hardware import Card
from .inventory import Inventory
from .nvidia import Gpu
from .processor import Processor

_WIDTH = 13


def render(machine: Inventory, verdict: Usability) -> list[str]:
    """Return the lines of the report."""
    return [
        *_verdict(machine, verdict),
        *(f"{name + ':':<{_WIDTH}}{text}" for name, text in _rows(machine) if text),
    ]


def _verdict(machine: Inventory, verdict: Usability) -> Iterator[str]:
    torch = machine.torch
    if verdict.cause is not None:
        yield f"no accelerator can be used: {verdict.cause.sentence}"
        yield f"    {verdict.cause.command}"
    elif verdict.is_usable:
        names = ", ".join(dict.fromkeys(torch.names)) or torch.kind
        yield f"torch computes on {torch.count} x {names} ({torch.kind})"
    else:
        yield "there is no accelerator: Paceline trains on the CPU"
    yield from verdict.notes
    yield ""


def _rows(machine: Inventory) -> Iterator[tuple[str, str]]:
    yield from _processor(machine.processor)
    for disk in machine.disks:
        where = f" ({disk.name}{f', {disk.model}' if disk.model else ''})" if disk.name else ""
        yield "disk", f"{disk.folder}: {disk.kind}{where}, {disk.file_system}"
    yield from _devices(machine)
    yield from _software(machine)


def _processor(cpu: Processor) -> Iterator[tuple[str, str]]:
    yield "processor", cpu.name
    yield "cores", _cores(cpu)
    caches = [
        f"{cache.kind} {cache.count} x {format_bytes(cache.num_bytes)}" for cache in cpu.caches
    ]
    yield "caches", ", ".join(caches)
    bits = f"{cpu.vector_bits} bits" if cpu.vector_bits else "width unknown"
    yield "vectors", ", ".join([bits, *cpu.matrices])
    yield "memory", _memory(cpu)
    for node in cpu.nodes if len(cpu.nodes) > 1 else ():
        size = format_bytes(node.memory_bytes) if node.memory_bytes else "no memory"
        distances = " ".join(map(str, node.distances))
        yield f"NUMA node {node.number}", f"cores {node.cores}, {size}, distances {distances}"


def _devices(machine: Inventory) -> Iterator[tuple[str, str]]:
    nodes = {card.slot: _near(card) for card in machine.cards}
    for gpu in machine.gpus:
        yield "device", _gpu(gpu) + nodes.pop(gpu.slot, "")
    for card in machine.cards:
        if card.slot in nodes:
            yield "card", _card(card) + _near(card)
    if machine.drivers.nvidia or machine.driver_cuda:
        version = machine.drivers.nvidia or "of an unknown version"
        yield "driver", f"NVIDIA {version}, for CUDA up to {machine.driver_cuda or 'unknown'}"


def _software(machine: Inventory) -> Iterator[tuple[str, str]]:
    libraries, drivers = machine.libraries, machine.drivers
    yield "torch", _torch(machine)
    below = (
        ("nvcc", libraries.nvcc), ("cuDNN", libraries.cudnn), ("NCCL", libraries.nccl),
        ("torch-xla", machine.torch.xla),
    )  # fmt: skip
    yield "libraries", ", ".join(f"{name} {version}" for name, version in below if version)
    packages = [f"{name} {version}" for name, version in libraries.packages.items()]
    yield "packages", ", ".join(package for package in packages if not package.startswith("torch "))
    yield "Python", f"{libraries.python}, {libraries.system}"
    if drivers.container or drivers.windows:
        yield "inside", drivers.container or f"WSL {drivers.windows}"
    yield "environment", " ".join(f"{name}={text}" for name, text in machine.variables.items())


def _cores(cpu: Processor) -> str:
    if cpu.cores is None:
        text = f"{cpu.threads} threads"
    else:
        each = cpu.threads // cpu.cores if cpu.cores else 1
        hyper = f"{each} hyper-threads each" if each > 1 else "no hyper-threads"
        text = f"{cpu.cores} in {cpu.sockets or 1} socket{'s' * ((cpu.sockets or 1) != 1)}, {hyper}"
    usable = f", {cpu.usable_cores} usable here" if cpu.usable_cores != cpu.threads else ""
    return text + usable + (f", governor {cpu.governor}" if cpu.governor else "")


def _memory(cpu: Processor) -> str:
    size = format_bytes(cpu.memory_bytes) if cpu.memory_bytes else "unknown size"
    if cpu.memory_modules is None:
        return f"{size}; channels unknown (they need root, and a virtual machine has none)"
    channels = f"{cpu.memory_channels} channels" if cpu.memory_channels else "unknown channels"
    return f"{size}, {cpu.memory_modules} modules in {channels}"


def _gpu(gpu: Gpu) -> str:
    links = (
        f", NVLink {gpu.nvlinks} x {gpu.nvlink_bytes_per_s / gpu.nvlinks / 1e9:.1f} GB/s"
        if gpu.nvlinks else ""
    )  # fmt: skip
    return (
        f"{gpu.index}: {gpu.name}, {format_bytes(gpu.total_bytes)} "
        f"({format_bytes(gpu.used_bytes)} in use), sm_{gpu.capability.replace('.', '')}, "
        + _link(gpu.generation, gpu.most_generation, gpu.lanes, gpu.most_lanes) + links
        + (", MIG" if gpu.is_mig else "")
    )  # fmt: skip


def _card(card: Card) -> str:
    return (
        f"{card.maker.value} {card.name or 'device'} at {card.slot or 'no bus'}, driver "
        f"{card.driver or 'none'}, "
        + _link(card.generation, card.most_generation, card.lanes, card.most_lanes)
    )  # fmt: skip


def _near(card: Card) -> str:
    return "" if card.numa_node is None else f", NUMA node {card.numa_node}"


def _link(generation: int | None, most: int | None, lanes: int | None, width: int | None) -> str:
    if generation is None and lanes is None:
        return "PCIe unknown"
    text = f"PCIe {generation or '?'} x{lanes or '?'}"
    if (most or 0) > (generation or 0) or (width or 0) > (lanes or 0):
        text += f" (of {most or '?'} x{width or '?'}; an idle device saves power)"
    return text


def _torch(machine: Inventory) -> str:
    torch = machine.torch
    if not torch.version:
        return "not installed"
    built = next(
        (f"for {name} {version}" for name, version in (
            ("CUDA", torch.cuda), ("ROCm", torch.hip), ("XPU", torch.xpu)
        ) if version), "for the CPU",
    )  # fmt: skip
    archs = f", kernels for {' '.join(torch.archs)}" if torch.archs else ""
    return f"{torch.version}, {built}{archs}"
