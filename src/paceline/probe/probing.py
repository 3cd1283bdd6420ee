"""All that is measured of this machine, one after the other, and kept for whoever plans with it.

    compile the kernels -> memory -> arithmetic -> storage -> messages -> calls -> devices
                                                    |
                        the best of each -> the file of ceilings (machine/ceilings.py)

What cannot be measured is said in a sentence, and the rest goes on: without a C++ compiler there
are products of matrices, calls, processes and devices.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..bench.samples import Measured
from ..errors import ConfigError, FileError
from ..machine.ceilings import write_machine
from ..machine.processor import Processor, read_processor
from ..machine.source import MachineSource
from ..system.processors import may_have_accelerator
from .devices import device_figures
from .figures import Figure, Group
from .kernels import Kernels, compiled
from .memory import LatencyOfSize, latency_curve, memory_figures
from .messages import core_figures, loopback_figures, peer_figures, software_figures
from .rates import matmul_figures, vector_figures
from .storage import storage_figures

BUSY = 0.5
"""Load before, for each core, from which on a table says that others computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """What is to be measured.

    Args:
        folder: on the disk that is measured.
        peer: ``HOST`` or ``HOST:PORT``; empty: no other machine.
    """

    folder: Path
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Measured):
    """A machine's figures.

    Args:
        took_s: of the whole.
        load: of the machine before, as processes that compute.
        missing: what could not be measured, and why, in sentences.
    """

    processor: str
    cores: int
    took_s: float
    load: float
    figures: tuple[Figure, ...]
    curve: tuple[LatencyOfSize, ...]
    missing: tuple[str, ...]

    @property
    def is_disturbed(self) -> bool:
        """Whether others computed here when it began."""
        return self.load > BUSY * self.cores


def probe_machine(question: ProbeQuestion, say: Callable[[str], None]) -> Probe:
    """Measure everything; takes less than a minute.

    Raises:
        LinkError: the peer cannot be reached.
    """
    load, start_s = os.getloadavg()[0], time.perf_counter()
    processor = read_processor(MachineSource())
    figures: list[Figure] = []
    missing: list[str] = []
    curve: tuple[LatencyOfSize, ...] = ()
    try:
        with compiled() as kernels:
            figures, curve, missing = _by_kernels(kernels, question, processor, say)
    except ConfigError as error:
        missing.append(f"caches, memory, vector units, disk, cores and sockets: {error}")
        if question.peer:
            figures += peer_figures(None, question.peer)
    say("products of matrices, processes, calls")
    figures += [*matmul_figures(torch.device("cpu")), *software_figures()]
    figures += _on_device(say)
    return Probe(
        processor=processor.name, cores=processor.usable_cores, load=load,
        took_s=time.perf_counter() - start_s,
        figures=tuple(sorted(figures, key=lambda one: list(Group).index(one.group))),
        curve=curve, missing=tuple(missing),
    )  # fmt: skip


def keep(probe: Probe) -> Path:
    """Into the file of ceilings. FileError: it cannot be written."""
    return write_machine({one.key: one.best for one in probe.figures if one.best})


def _by_kernels(
    kernels: Kernels,
    question: ProbeQuestion,
    processor: Processor,
    say: Callable[[str], None],
) -> tuple[list[Figure], tuple[LatencyOfSize, ...], list[str]]:
    cores, caches = processor.usable_cores, [
        one for one in processor.caches if not one.kind.endswith("i")
    ]  # fmt: skip
    curve: tuple[LatencyOfSize, ...] = ()
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "caches and memory": lambda: memory_figures(kernels, caches, cores),
        "vector units": lambda: vector_figures(kernels, cores),
        f"the disk of {question.folder}": lambda: storage_figures(kernels, question.folder),
        "cores": lambda: core_figures(kernels),
        "loopback": lambda: loopback_figures(kernels),
    }
    if question.peer:
        parts[question.peer] = lambda: peer_figures(kernels, question.peer)
    figures, missing = list[Figure](), list[str]()
    for name, measure in parts.items():
        say(name)
        try:
            figures += measure()
        except (MemoryError, FileError) as error:
            missing.append(f"{name}: {error}")
    try:
        curve = latency_curve(kernels, caches)
    except MemoryError as error:
        missing.append(f"latency by size: {error}")
    return figures, curve, missing


def _on_device(say: Callable[[str], None]) -> list[Figure]:
    """Of the first accelerator, where torch computes on one."""
    if not (may_have_accelerator() and torch.accelerator.is_available()):
        return []
    found = torch.accelerator.current_accelerator()
    assert found is not None
    device = torch.device(found.type, 0)
    say(f"device {device}")
    return [*device_figures(device), *matmul_figures(device)]
