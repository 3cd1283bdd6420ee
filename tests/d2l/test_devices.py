"""Devices by number, and a batch over several."""

import pytest
import torch

from paceline.d2l.devices import (
    cpu,
    gpu,
    num_gpus,
    split_batch,
    synchronize,
    try_all_gpus,
    try_gpu,
)
from paceline.errors import ConfigError


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    device = torch.device(kind) if count else None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_cpu_stands_in_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", 0)
    assert (num_gpus(), try_gpu(), try_gpu(3)) == (0, cpu(), cpu())
    assert try_all_gpus() == [cpu()]
    assert gpu(1) == torch.device("cuda:1")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_are_found_by_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind, 2)
    assert try_all_gpus() == [torch.device(kind, 0), torch.device(kind, 1)]
    assert try_gpu(1) == torch.device(kind, 1)
    assert try_gpu(2) == try_gpu(-1) == cpu()


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_waiting_for_the_cpu_returns(device: torch.device | str | None) -> None:
    synchronize(device)


@pytest.mark.parametrize(("count", "sizes"), [(8, [4, 4]), (5, [3, 2]), (1, [1, 0])])
def test_parts_are_even_and_nothing_is_lost(count: int, sizes: list[int]) -> None:
    inputs, targets = torch.arange(count * 3).reshape(count, 3), torch.arange(count)
    input_parts, target_parts = split_batch(inputs, targets, ["cpu", cpu()])
    assert [len(part) for part in input_parts] == [len(part) for part in target_parts] == sizes
    assert torch.equal(torch.cat(input_parts), inputs)
    assert torch.equal(torch.cat(target_parts), targets)


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 inputs and 3 targets"):
        split_batch(torch.zeros(4, 1), torch.zeros(3), [cpu()])


def test_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one device"):
        split_batch(torch.zeros(4, 1), torch.zeros(4), [])
