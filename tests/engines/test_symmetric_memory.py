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

from paceline.engines.torchrun.post import Hello
from paceline.engines.torchrun.symmetric_memory import SymmetricGroup
from paceline.exchange import mapped
from paceline.exchange.mapped import address_of
from paceline.launch.ranks import _why_unmapped
from paceline.store.memory import SharedMemory
from paceline.store.sums import CHUNK_BYTES
from ranks import run_by_mpirun
from threaded import in_threads

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


def in_groups(size: int, work: Callable[[SymmetricGroup], Any]) -> list[Any]:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    return in_threads(
        size, lambda ranks: work(SymmetricGroup(ranks.everyone, refuse, lambda: None))
    )


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
    real_open, calls, said = mapped.open_at, list[int](), list[str]()

    def open_once(pid: int, number: int, device: int, inode: int) -> int:
        calls.append(number)
        if len(calls) > 1:
            return real_open(pid, number, device, inode)
        if refused == "another file":
            return real_open(pid, number, device, 0)
        raise PermissionError(13, refused)

    monkeypatch.setattr(mapped, "open_at", open_once)

    def work(ranks: Any) -> list[float]:
        group = SymmetricGroup(ranks.everyone, said.append, lambda: None)
        memory = group.zeros(12).view(torch.float32)
        memory[:] = 1.0 + group.rank
        group.all_reduce(memory).wait()
        result: list[float] = memory.tolist()
        return result

    assert in_threads(2, work) == [[3.0] * 3] * 2
    (text,) = said
    assert "cannot map another worker's memory (" in text
    assert (refused if refused == "a closed door" else "has another file there") in text
    assert text.endswith("gradients are sent by torch.distributed, which takes longer")


def test_a_rank_that_waits_looks_whether_the_others_will_come() -> None:
    class Over(Exception):
        pass

    def check() -> None:
        raise Over

    def work(ranks: Any) -> bool:
        group = SymmetricGroup(ranks.everyone, lambda text: None, check)
        memory = group.zeros(64)
        if ranks.everyone.rank:
            return True
        with pytest.raises(Over):
            group.all_reduce(memory).wait()
        return True

    assert in_threads(2, work) == [True, True]


def hello(memory: SharedMemory | None, host: str = "a", **changed: int) -> Hello:
    place = (1, 1, 1, 1) if memory is None else address_of(memory)
    return Hello(
        host, os.getpid(), "{}", (), "", "boot", (*place[:3], changed.get("inode", place[3]))
    )


def test_ranks_share_memory_if_the_first_may_open_that_of_all_others() -> None:
    memory = SharedMemory.create(64)
    others = memory.fd
    before = len(os.listdir("/proc/self/fd"))
    assert _why_unmapped([hello(None), hello(memory)]) == ""
    assert _why_unmapped([hello(None), hello(memory, "b")]) == "they are on 2 machines"
    gone = _why_unmapped([hello(None), hello(memory), hello(None)])
    assert gone.startswith("worker 0 may not open that of worker 2 (")
    other = _why_unmapped([hello(None), hello(memory, inode=5)])
    assert "another file there" in other
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(others)


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
    assert "engine torchrun, in memory" in plans[0]
    assert "by torch.distributed" in plans[1]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


KILLED = """
import os, signal, sys, threading
from paceline.__main__ import main

if os.environ["RANK"] == "0":
    threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
sys.argv = ["paceline", "train", "quadratic", "--epochs", "1000000"]
main()
"""


@pytest.mark.timeout(100)
def test_a_task_ends_after_the_death_of_the_rank_that_all_met_at(tmp_path: Path) -> None:
    ended = run_by_mpirun(tmp_path, 2, KILLED, PACELINE_COLLECTIVE="shared")
    assert ended.code != 0
    assert "worker 0 ended, and 127.0.0.1:" in ended.said
    assert ended.took_s < 30
