"""Memory this process no longer needs is freed; referenced objects stay."""

import gc
import sys
import weakref

import numpy as np
import pytest

import paceline
from paceline.processes.freeing import Freed, free_memory


class Model:
    """The memory of a training."""

    def __init__(self) -> None:
        self.weights = np.ones(1 << 22)


def train(models: list[weakref.ref[Model]]) -> None:
    model = Model()
    models.append(weakref.ref(model))
    raise RuntimeError("out of memory")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_held_by_the_last_error_is_freed() -> None:
    """As in a notebook: sys.last_value keeps the frames of the failed cell alive."""
    models: list[weakref.ref[Model]] = []
    try:
        train(models)
    except RuntimeError as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
    gc.collect()
    assert models[0]() is not None
    freed = free_memory()
    assert models[0]() is None
    assert not hasattr(sys, "last_value")
    assert freed.memory_bytes > 30e6


def test_cycle_is_collected_and_named_objects_stay() -> None:
    gc.collect()
    kept, dropped = Model(), Model()
    dropped.self = dropped  # type: ignore[attr-defined]
    of_kept, of_dropped = weakref.ref(kept), weakref.ref(dropped)
    del dropped
    assert free_memory().num_objects >= 1
    assert of_dropped() is None
    assert of_kept() is kept


def test_free_memory_is_public_and_reports_what_it_freed() -> None:
    assert paceline.free_memory is free_memory
    assert str(Freed(1 << 20, 0, 12)) == "1.0 MiB of memory, 0 B of devices, 12 objects"


class Device:
    """A stand-in for ``torch.cuda`` with 100 bytes reserved until its cache is emptied."""

    def __init__(self) -> None:
        self.reserved = 100
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, _: int) -> int:
        return self.reserved

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def ipc_collect(self) -> None:
        self.calls.append("ipc_collect")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.reserved = 0


def test_device_is_synchronized_and_its_cache_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    backends = type("Backends", (), {"mps": device})
    torch = type("Torch", (), {"cuda": device, "backends": backends, "_C": None})
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert free_memory().device_bytes == 200
    assert device.calls == ["synchronize", "empty_cache", "ipc_collect"]
