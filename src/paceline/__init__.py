"""Paceline: PyTorch training over several workers, also when some of them are slow or die.

    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)

This is the public interface. A name is imported when it is first used, so ``import paceline`` loads
no torch and the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .bench.clock import Benchmark
    from .config import RunSettings
    from .data.order import epoch_order
    from .errors import (
        ConfigError,
        Interrupted,
        LinkError,
        PacelineError,
        ProtocolError,
        WorkerError,
    )
    from .kvstore.kvstore import KVStore
    from .launch.connecting import connect
    from .launch.launcher import train
    from .processes.freeing import free_memory
    from .replica.seeding import step_seed
    from .report.summary import Summary
    from .script.worker import Pace
    from .workloads.base import Splits, Task

_HOMES = {
    "Benchmark": "bench.clock",
    "ConfigError": "errors",
    "Interrupted": "errors",
    "KVStore": "kvstore.kvstore",
    "LinkError": "errors",
    "Pace": "script.worker",
    "PacelineError": "errors",
    "ProtocolError": "errors",
    "RunSettings": "config",
    "Splits": "workloads.base",
    "Summary": "report.summary",
    "Task": "workloads.base",
    "WorkerError": "errors",
    "connect": "launch.connecting",
    "epoch_order": "data.order",
    "free_memory": "processes.freeing",
    "step_seed": "replica.seeding",
    "train": "launch.launcher",
}

__all__ = [
    "Benchmark",
    "ConfigError",
    "Interrupted",
    "KVStore",
    "LinkError",
    "Pace",
    "PacelineError",
    "ProtocolError",
    "RunSettings",
    "Splits",
    "Summary",
    "Task",
    "WorkerError",
    "__version__",
    "connect",
    "epoch_order",
    "free_memory",
    "step_seed",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
