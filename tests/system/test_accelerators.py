"""Workers are counted by the devices they compute on."""

import pytest
import torch

from paceline.context import Context
from paceline.engines.base import MemberSpec
from paceline.engines.torchrun.life import context_of
from paceline.engines.torchrun.world import RankOfWorld
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.system import processors
from paceline.system.processors import count_accelerators, find_device


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> list[int]:
    """Let torch find this many accelerators of one kind; return the indices that are set."""
    result = None if kind is None else torch.device(kind)
    indices: list[int] = []
    monkeypatch.setattr(processors, "may_have_accelerator", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: result)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    return indices


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 1)])
def test_workers_use_the_devices_that_were_counted(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind, count)
    assert count_accelerators("auto") == count
    devices = {find_device("auto", seat) for seat in range(count)}
    assert len(devices) == count
    assert {device.type for device in devices} == {kind}


def test_auto_is_the_cpu_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, 0)
    assert count_accelerators("auto") == 0
    assert find_device("auto", 0) == torch.device("cpu")


def test_absent_device_kind_counts_zero_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "xpu", 2)
    assert count_accelerators("mps") == 0
    with pytest.raises(ConfigError, match="device 'mps' is not here"):
        find_device("mps", 0)


def test_workers_share_devices_if_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = pretend(monkeypatch, "xpu", 2)
    for seat in range(4):
        find_device("xpu", seat)
    assert indices == [0, 1, 0, 1]


def test_ranks_dealt_round_robin_get_a_device_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This machine has ranks 0 and 2 of four."""
    indices = pretend(monkeypatch, "xpu", 2)
    for seat, local_rank in ((0, 0), (2, 1)):
        exchange = SoloExchange()
        exchange.seat = seat
        rank = RankOfWorld(rank=seat, size=4, local_rank=local_rank, address="node1", port=1234)
        spec = MemberSpec(
            seat=seat, member=seat, num_seats=4, threads=1, log="", context=Context().write(),
            environment={},
        )  # fmt: skip
        assert Pace(exchange, context_of(spec, rank)).device.index == local_rank
    assert indices == [0, 1]


@pytest.mark.parametrize(("name", "found"), [("cuda:1", "cuda:1"), ("cuda:7", "")])
def test_device_index_out_of_range_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    chosen: list[int] = []
    for attribute, value in {
        "current_accelerator": lambda: torch.device("cuda"),
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device_index": chosen.append,
    }.items():
        monkeypatch.setattr(torch.accelerator, attribute, value)
    if found:
        assert find_device(name, 0) == torch.device(found)
        assert chosen == [1]
        return
    with pytest.raises(ConfigError, match="'cuda:7' is not here: this machine has 2, from cuda:0"):
        find_device(name, 0)
