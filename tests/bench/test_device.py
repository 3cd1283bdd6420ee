"""What a bench runs on: threads, and memory that is free."""

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


def test_without_a_wish_a_bench_takes_what_torch_would() -> None:
    assert chosen_device("cpu") == "cpu"
    assert chosen_threads(None) == torch.get_num_threads()
    assert chosen_threads(3) == 3
    with pytest.raises(ConfigError, match="--threads must be >= 1, got 0"):
        chosen_threads(0)


def test_a_search_takes_a_share_of_what_control_groups_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda: 1000)
    assert free_bytes("cpu") == 800


def test_what_was_held_is_in_the_peak() -> None:
    reset_peak(CPU)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_bytes(CPU) > held.nbytes
