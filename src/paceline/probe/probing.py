"""All measurements of this machine, one after the other, stored for the parts that plan with them.

    compile the kernels -> memory -> arithmetic -> storage -> messages -> calls -> devices
                                                    |
                        the best of each -> the file of ceilings (machine/ceilings.py)

A measurement that fails is reported in a sentence, and the rest goes on: without a C++ compiler
there are still products of matrices, calls, processes and devices.
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
"""Load for each core from which a table says that other programs were running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """What to measure.

    Args:
        folder: on the disk to measure.
        peer: ``HOST`` or ``HOST:PORT``; empty: no other machine.
    """

    folder: Path
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Measured):
    """A machine's figures.

    Args:
        took_s: duration of the whole probe.
        load: load average of the machine before the probe.
        missing: what could not be measured and why, in sentences.
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
        """Whether other programs were running when it began."""
        return self.load > BUSY * self.cores


def probe_machine(question: ProbeQuestion, say: Callable[[str], None]) -> Probe:
    """Measure everything, in less than a minute.

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
        figures=tuple(sorted(figures, key=lambda figure: list(Group).index(figure.group))),
        curve=curve, missing=tuple(missing),
    )  # fmt: skip


def keep(probe: Probe) -> Path:
    """Write the best values to the file of ceilings. FileError: it cannot be written."""
    return write_machine({figure.key: figure.best for figure in probe.figures if figure.best})


def _by_kernels(
    kernels: Kernels,
    question: ProbeQuestion,
    processor: Processor,
    say: Callable[[str], None],
) -> tuple[list[Figure], tuple[LatencyOfSize, ...], list[str]]:
    cores, caches = processor.usable_cores, [
        cache for cache in processor.caches if not cache.kind.endswith("i")
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
    """Measure the first accelerator that torch can use, if there is one."""
    if not (may_have_accelerator() and torch.accelerator.is_available()):
        return []
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    say(f"device {device}")
    return [*device_figures(device), *matmul_figures(device)]
