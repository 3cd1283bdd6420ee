"""Sums in memory that ranks map: by threads, whose ranks are seen to be early, late or refused."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engines.torchrun import symmetric_memory
from paceline.engines.torchrun.post import Hello
from paceline.engines.torchrun.symmetric_memory import SymmetricGroup, memory_domain
from paceline.launch.ranks import _shares_memory
from paceline.store.sums import CHUNK_BYTES
from ranks import run_by_mpirun
from threaded import in_threads

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


def in_groups(size: int, work: Callable[[SymmetricGroup], Any]) -> list[Any]:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    return in_threads(size, lambda ranks: work(SymmetricGroup(ranks.everyone, refuse)))


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Sums of whole numbers that every dtype holds exactly."""
    return ((torch.arange(count) * (rank + 1)) % 16).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_summed_once_in_all_memories(size: int, dtype: torch.dtype) -> None:
    many = 2 * CHUNK_BYTES * size // dtype.itemsize + 3
    counts = (0, 1, 7, 1001, many)

    def work(group: SymmetricGroup) -> list[Tensor]:
        memory = group.zeros(64 * len(counts) + sum(counts) * dtype.itemsize)
        parts, begin = [], 0
        for count in counts:
            parts.append(memory[begin : begin + count * dtype.itemsize].view(dtype))
            begin += -(-count * dtype.itemsize // 64) * 64
        for _ in range(2):  # the second sum of a place is cut already
            for part, count in zip(parts, counts, strict=True):
                part.copy_(numbers(group.rank, count, dtype))
            pending = [group.all_reduce(part) for part in parts]
            for one in reversed(pending):
                one.wait()
        return [part.clone() for part in parts]

    results = in_groups(size, work)
    for place, count in enumerate(counts):
        expected = sum(numbers(rank, count, dtype) for rank in range(size))
        for result in results:
            assert torch.equal(result[place], expected)


def test_a_late_rank_finds_its_sum_and_keeps_nobody_from_beginning() -> None:
    have_begun = threading.Event()

    def work(group: SymmetricGroup) -> float:
        memory = group.zeros(256).view(torch.float32)
        memory[:] = group.rank + 1.0
        if group.rank == 1:
            assert have_begun.wait(20)
            time.sleep(0.25)  # longer than one wait of the others
        first, second = group.all_reduce(memory[:16]), group.all_reduce(memory[16:32])
        if group.rank == 0:
            have_begun.set()
        second.wait()
        first.wait()
        return float(memory[:32].sum() + memory[32:].mean())

    assert in_groups(2, work) == [3.0 * 32 + 1.0, 3.0 * 32 + 2.0]


def test_other_operations_are_those_of_the_group_below() -> None:
    def work(group: SymmetricGroup) -> tuple[list[float], list[float], list[float]]:
        memory = group.zeros(64).view(torch.float32)
        memory[:] = group.rank
        outside, gathered = torch.full((3,), 2.0), torch.empty(2)
        group.all_reduce(outside).wait()
        group.all_reduce(memory, is_maximum=True).wait()
        group.all_gather(torch.tensor([float(group.rank)]), gathered).wait()
        swapped = torch.empty(2)
        group.all_to_all(torch.tensor([1.0, 2.0]) + 10 * group.rank, swapped).wait()
        assert swapped.tolist() == [1.0 + group.rank, 11.0 + group.rank]
        return outside.tolist(), memory.tolist()[:1], gathered.tolist()

    assert in_groups(2, work) == [([4.0] * 3, [1.0], [0.0, 1.0])] * 2


def test_no_descriptor_stays_open() -> None:
    own = Path("/proc/self/fd")

    def memories() -> int:
        return sum(
            "memfd:paceline" in os.readlink(one) for one in own.iterdir() if one.is_symlink()
        )

    before = memories()

    def work(group: SymmetricGroup) -> int:
        group.zeros(1000)[:] = 1
        return 0

    in_groups(3, work)
    assert memories() == before


@pytest.mark.parametrize("refused", ["a closed door", "another file"])
def test_all_send_messages_if_one_may_not_map_anothers_memory(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, calls, said = symmetric_memory._open, list[int](), list[str]()

    def open_once(pid: int, number: int, identity: list[int]) -> Any:
        calls.append(number)
        if len(calls) > 1:
            return real_open(pid, number, identity)
        if refused == "another file":
            return real_open(pid, number, [0, 0])
        raise PermissionError(13, refused)

    monkeypatch.setattr(symmetric_memory, "_open", open_once)

    def work(ranks: Any) -> list[float]:
        group = SymmetricGroup(ranks.everyone, said.append)
        memory = group.zeros(12).view(torch.float32)
        memory[:] = 1.0 + group.rank
        group.all_reduce(memory).wait()
        result: list[float] = memory.tolist()
        return result

    assert in_threads(2, work) == [[3.0] * 3] * 2
    own, other = sorted(said, key=lambda text: text.startswith("another"))
    reason = refused if refused == "a closed door" else "has another file there"
    assert "cannot map the memory of worker" in own
    assert reason in own
    assert other.startswith("another worker cannot map this one's: gradients are sent by torch")


def test_memory_is_shared_within_one_machine_container_and_user() -> None:
    assert str(os.getuid()) in memory_domain()

    def hello(host: str = "a", boot: str = "1", memory: str = "1 ns 0") -> Hello:
        return Hello(host, 1, "{}", (), "", boot, memory)

    assert _shares_memory([hello(), hello()])
    assert not _shares_memory([hello(), hello(host="b")])
    assert not _shares_memory([hello(), hello(boot="2")])
    assert not _shares_memory([hello(), hello(memory="1 other-ns 0")])
    assert not _shares_memory([hello(memory=""), hello(memory="")])


SCRIPT = """
import paceline, torch
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 40, generator=generator), torch.ones(96, 1))
loader = DataLoader(data, batch_size=16)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(3):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
pace.save()
"""


@pytest.mark.timeout(100)
def test_two_ranks_end_with_the_same_bits_by_memory_and_by_messages(tmp_path: Path) -> None:
    states, plans = [], []
    for collective in ("shared", "native"):
        folder = tmp_path / collective
        folder.mkdir()
        ended = run_by_mpirun(folder, 2, SCRIPT, PACELINE_COLLECTIVE=collective)
        assert ended.code == 0, ended.said
        states.append(ended.run.state)
        plans.append(ended.said)
    assert "between peers" in plans[0]
    assert "by torch.distributed" in plans[1]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
