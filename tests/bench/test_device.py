"""The device, threads and free memory of a bench."""

import pytest
import torch

from paceline.bench import device
from paceline.bench.device import (
    chosen_device,
    chosen_threads,
    free_bytes,
    peak_bytes,
    reset_peak,
)
from paceline.errors import ConfigError

CPU = torch.device("cpu")


def test_default_device_and_threads_are_those_of_torch() -> None:
    assert chosen_device("cpu") == "cpu"
    assert chosen_threads(None) == torch.get_num_threads()
    assert chosen_threads(3) == 3
    with pytest.raises(ConfigError, match="--threads must be >= 1, got 0"):
        chosen_threads(0)


def test_search_uses_a_share_of_the_memory_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 1000)
    assert free_bytes("cpu") == 800


def test_peak_includes_held_memory() -> None:
    reset_peak(CPU)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_bytes(CPU) > held.nbytes
