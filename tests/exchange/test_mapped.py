"""Messages and collectives in mapped memory: by threads, in any order, of any size."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import LinkError, ProtocolError
from paceline.exchange import mapped as module
from paceline.exchange.group import PeerGroup
from paceline.exchange.mapped import MappedGroup, mapped
from paceline.store.memory import SharedMemory
from threaded import in_threads

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


def nothing() -> None:
    """No other will be missed."""


def in_groups(
    size: int, work: Callable[[PeerGroup], Any], check: Callable[[], None] = nothing
) -> list[Any]:
    groups = list[PeerGroup]()

    def run(group: PeerGroup) -> Any:
        assert isinstance(group, MappedGroup)
        groups.append(group)  # others may still map its rooms when it is done
        return work(group)

    return in_threads(
        size, lambda ranks: run(mapped(ranks.part("mapped", range(size)), check)), is_near=False
    )


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(count) + rank) % 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_one_and_of_several_rounds(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOT_BYTES", 4096)
    monkeypatch.setattr(module, "_FIRST_CHANNEL", module._PAGE + 2 * 4096)
    counts = (0, 1, 9, 2000, 5001)

    def work(group: PeerGroup) -> list[tuple[Tensor, Tensor, Tensor]]:
        results = []
        for count in counts:
            out = torch.zeros(size * count, dtype=dtype)
            group.all_gather(numbers(group.rank, count, dtype), out).wait()
            rows = torch.cat([numbers(group.rank + to, count, dtype) for to in range(size)])
            received = torch.zeros_like(rows)
            group.all_to_all(rows, received).wait()
            total = numbers(group.rank, count, dtype)
            if dtype is not torch.bool:
                group.all_reduce(total).wait()
            results.append((out, received, total))
        return results

    for rank, results in enumerate(in_groups(size, work)):
        for count, (out, received, total) in zip(counts, results, strict=True):
            rows = [numbers(source, count, dtype) for source in range(size)]
            assert torch.equal(out, torch.cat(rows))
            sent = [numbers(source + rank, count, dtype) for source in range(size)]
            assert torch.equal(received, torch.cat(sent))
            if dtype is not torch.bool:
                assert torch.equal(total, torch.stack(rows).sum(0).to(dtype))


def test_a_member_may_gather_into_the_memory_of_what_it_gives() -> None:
    def work(group: PeerGroup) -> list[float]:
        out = torch.full((700_000,), -1.0)
        mine = out.view(2, -1)[group.rank]
        mine.fill_(group.rank + 1.0)
        group.all_gather(mine, out).wait()
        return [float(half.mean(dtype=torch.float64)) for half in out.view(2, -1)]

    assert in_groups(2, work) == [[1.0, 2.0]] * 2


def test_the_largest_of_each_number() -> None:
    def work(group: PeerGroup) -> list[int]:
        flags = torch.tensor([group.rank, 1 - group.rank, 0], dtype=torch.uint8)
        group.all_reduce(flags, is_maximum=True).wait()
        return list(flags.tolist())

    assert in_groups(2, work) == [[1, 1, 0]] * 2


def test_rounds_of_fast_and_slow_members_do_not_mix() -> None:
    def work(group: PeerGroup) -> list[list[int]]:
        rounds, out = [], torch.zeros(3, dtype=torch.int64)
        for number in range(300):
            if number % 3 == group.rank:  # each is late in turn
                threading.Event().wait(1e-4)
            group.all_gather(torch.tensor([10 * number + group.rank]), out).wait()
            rounds.append(out.tolist())
        return rounds

    expected = [[10 * number + rank for rank in range(3)] for number in range(300)]
    assert in_groups(3, work) == [expected] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_of_a_tag_arrive_in_order_and_tags_in_any(dtype: torch.dtype) -> None:
    shapes = [(), (3,), (0,), (2, 5), (700,)]

    def tensor_of(tag: int, number: int) -> Tensor:
        shape = shapes[number % len(shapes)]
        count = torch.Size(shape).numel()
        return numbers(tag + number, count, dtype).reshape(shape)

    def work(group: PeerGroup) -> list[Tensor]:
        peer = 1 - group.rank
        sent = [
            group.begin_send(tensor_of(tag, number), peer, tag)
            for number in range(10) for tag in (4, 7)
        ]  # fmt: skip
        received = []
        for tag in (7, 4):
            buffers = [torch.zeros_like(tensor_of(tag, number)) for number in range(10)]
            pending = [group.begin_receive(buffer, peer, tag) for buffer in buffers]
            for one in reversed(pending):
                one.wait()
            received += buffers
        for one in sent:
            one.wait()
        return received

    expected = [tensor_of(tag, number) for tag in (7, 4) for number in range(10)]
    for received in in_groups(2, work):
        for buffer, wanted in zip(received, expected, strict=True):
            assert torch.equal(buffer, wanted)


def test_more_messages_than_lines_before_any_is_received() -> None:
    """Both are at full lines at once: what nobody has asked for yet is set aside."""
    count = 3 * module._NUM_LINES

    def work(group: PeerGroup) -> list[int]:
        peer = 1 - group.rank
        for number in range(count):
            group.begin_send(torch.tensor([number]), peer, 2).wait()
        buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        for buffer in buffers:
            group.begin_receive(buffer, peer, 2).wait()
        return [int(buffer) for buffer in buffers]

    assert in_groups(2, work) == [list(range(count))] * 2


def test_three_members_with_full_lines_wait_for_each_other_in_a_ring() -> None:
    count = module._NUM_LINES + 44

    def work(group: PeerGroup) -> float:
        buffers = [torch.zeros(1) for _ in range(count)]
        last = torch.zeros(1)
        if group.rank == 0:
            for _ in range(count):
                group.begin_send(torch.ones(1), 1, 0)
            group.begin_send(torch.ones(1), 2, 0)
        elif group.rank == 1:
            group.begin_receive(last, 2, 0).wait()
            for buffer in buffers:
                group.begin_receive(buffer, 0, 0).wait()
        else:
            group.begin_receive(last, 0, 0).wait()
            group.begin_send(torch.ones(1), 1, 0)
        return float(sum(map(float, buffers)) + last)

    assert in_groups(3, work) == [0.0, count + 1.0, 1.0]


def test_full_lines_and_then_a_collective() -> None:
    count = module._NUM_LINES + 44

    def work(group: PeerGroup) -> float:
        total, buffers = torch.ones(1), [torch.zeros(1) for _ in range(count)]
        pending = [group.begin_receive(buffer, 0, 0) for buffer in buffers if group.rank]
        for _ in range(0 if group.rank else count):
            group.begin_send(torch.ones(1), 1, 0)
        group.all_reduce(total).wait()
        for one in pending:
            one.wait()
        return float(sum(map(float, buffers)) + total)

    assert in_groups(2, work) == [2.0, count + 2.0]


def test_both_wait_until_large_messages_are_sent_before_they_receive() -> None:
    """A message of any size is sent when it begins: here none needs the other's receive."""
    sizes = (10, 3_000_000, 7, 2_000_000)

    def work(group: PeerGroup) -> list[float]:
        peer, buffers = 1 - group.rank, [torch.zeros(size) for size in sizes]
        for size in sizes:
            group.begin_send(torch.full((size,), float(size + group.rank)), peer, 3).wait()
        for buffer in buffers:
            group.begin_receive(buffer, peer, 3).wait()
        return [float(buffer.mean(dtype=torch.float64)) for buffer in buffers]

    assert in_groups(2, work) == [[size + 1.0 for size in sizes], [float(size) for size in sizes]]


def test_messages_and_large_collectives_do_not_mix() -> None:
    def work(group: PeerGroup) -> list[float]:
        buffer, out = torch.zeros(8192), torch.zeros(700_000)
        pending = group.begin_receive(buffer, 1 - group.rank, 1)
        group.begin_send(torch.full((8192,), 7.0), 1 - group.rank, 1)
        group.all_gather(torch.full((350_000,), 10.0 + group.rank), out).wait()
        pending.wait()
        return [float(buffer.mean()), float(out[:350_000].mean()), float(out[350_000:].mean())]

    assert in_groups(2, work) == [[7.0, 10.0, 11.0]] * 2


def test_rooms_are_used_again() -> None:
    def work(group: PeerGroup) -> tuple[int, int]:
        assert isinstance(group, MappedGroup)
        peer, buffer = 1 - group.rank, torch.zeros(5000)
        for _ in range(30):
            group.begin_send(torch.ones(5000), peer, 0).wait()
            group.begin_receive(buffer, peer, 0).wait()
        return len(group._own_rooms.tensors), group._own_rooms._end

    most = 4 * 32768  # a message is a block of 32 KiB, and few are on their way at a time
    assert all(rooms == 1 and end <= most for rooms, end in in_groups(2, work))


def test_descriptors_are_closed_with_the_group() -> None:
    own = Path("/proc/self/fd")

    def memories() -> int:
        return sum(
            "memfd:paceline" in os.readlink(one) for one in own.iterdir() if one.is_symlink()
        )

    def work(group: PeerGroup) -> None:
        pending = group.begin_receive(buffer := torch.zeros(1000), 1 - group.rank, 0)
        group.begin_send(torch.ones(1000), 1 - group.rank, 0)
        pending.wait()
        assert buffer.sum() == 1000

    gc.collect()  # groups of earlier tests
    before = memories()
    in_groups(2, work)
    gc.collect()
    assert memories() == before


def test_tensors_that_require_gradients_are_received_and_summed() -> None:
    def work(group: PeerGroup) -> list[float]:
        buffer = torch.zeros(2, requires_grad=True)
        pending = group.begin_receive(buffer, 1 - group.rank, 0)
        group.begin_send(torch.ones(2, requires_grad=True), 1 - group.rank, 0)
        pending.wait()
        group.all_reduce(buffer).wait()
        return list(buffer.tolist())

    assert in_groups(2, work) == [[2.0, 2.0]] * 2


def test_what_was_sent_is_counted() -> None:
    def work(group: PeerGroup) -> None:
        pending = group.begin_receive(buffer := torch.zeros(1000), 1 - group.rank, 0)
        group.begin_send(torch.ones(1000), 1 - group.rank, 0).wait()
        pending.wait()
        group.all_gather(buffer[:2].clone(), torch.zeros(4)).wait()

    before = MappedGroup.sent_bytes
    in_groups(2, work)
    assert MappedGroup.sent_bytes - before == 2 * (4000 + 8)  # as 8 bytes go to the other


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_count_what_the_price_of_a_split_counts(size: int) -> None:
    num_bytes = 12_000_000

    def work(group: PeerGroup) -> list[int]:
        whole = torch.zeros(num_bytes // 4)
        operations = (
            lambda: group.all_reduce(whole),
            lambda: group.all_gather(whole.view(size, -1)[group.rank], whole),
            lambda: group.all_to_all(whole, torch.zeros_like(whole)),
        )
        counts = []
        for operation in operations:
            meet(group)
            before = MappedGroup.sent_bytes
            meet(group)
            operation().wait()
            meet(group)
            counts.append(MappedGroup.sent_bytes - before)
        return counts

    def meet(group: PeerGroup) -> None:
        barrier.wait()

    barrier = threading.Barrier(size)
    share = (size - 1) * num_bytes  # of all threads together
    assert in_groups(size, work)[0] == [2 * share, share, share]


def test_a_member_that_exchanges_something_else_is_an_error() -> None:
    def work(group: PeerGroup) -> str:
        try:
            group.all_reduce(torch.ones(3 + group.rank)).wait()
        except ProtocolError as error:
            return str(error)
        return ""

    assert in_groups(2, work)[0] == "member 1 exchanges 16 bytes where member 0 exchanges 12"


@pytest.mark.parametrize("is_maximum", [False, True])
def test_large_sums_are_in_the_order_of_members_and_the_same_bits_in_all(is_maximum: bool) -> None:
    count = 700_001

    def addend(rank: int) -> Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(rank))

    def work(group: PeerGroup) -> Tensor:
        total = addend(group.rank)
        group.all_reduce(total, is_maximum=is_maximum).wait()
        return total

    first, *others = in_groups(3, work)
    rows = torch.stack([addend(rank) for rank in range(3)])
    expected = rows.amax(0) if is_maximum else rows[0] + rows[1] + rows[2]
    assert torch.equal(first, expected)
    assert all(torch.equal(first, other) for other in others)


def test_a_message_of_another_size_is_an_error() -> None:
    def work(group: PeerGroup) -> str:
        group.begin_send(torch.ones(3), 1 - group.rank, 5).wait()
        try:
            group.begin_receive(torch.zeros(4), 1 - group.rank, 5).wait()
        except ProtocolError as error:
            return str(error)
        return ""

    texts = in_groups(2, work)
    assert texts[0] == "member 1 sent 12 bytes where 16 are expected (tag 5)"


def test_who_waits_looks_whether_others_will_come() -> None:
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise LinkError("the run has ended")

    def work(group: PeerGroup) -> str:
        if group.rank == 1:
            is_over.set()
            return ""
        waits = (
            lambda: group.all_gather(torch.ones(1), torch.zeros(2)),
            lambda: group.begin_receive(torch.zeros(1), 1, 0).wait(),
        )
        for wait in waits:
            with pytest.raises(LinkError, match="the run has ended"):
                wait()
        return "seen"

    assert in_groups(2, work, check)[0] == "seen"


def test_where_one_may_not_map_all_stay_with_the_group_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_open, calls = module.open_at, list[int]()

    def open_once(*address: int) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise PermissionError(1, "not permitted")
        return real_open(*address)

    monkeypatch.setattr(module, "open_at", open_once)

    def work(group: PeerGroup) -> bool:
        out = torch.zeros(2)
        group.all_gather(torch.tensor([float(group.rank)]), out).wait()
        assert out.tolist() == [0.0, 1.0]
        return isinstance(group, MappedGroup)

    results = in_threads(
        2, lambda ranks: work(mapped(ranks.part("mapped", range(2)), nothing)), is_near=False
    )
    assert results == [False, False]


def test_a_machine_with_too_little_memory_for_a_message_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(group: PeerGroup) -> str:
        monkeypatch.setattr(module.SharedMemory, "create", refuse)
        try:
            group.begin_send(torch.ones(3_000_000), 1 - group.rank, 0)
        except LinkError as error:
            return str(error)
        return ""

    def refuse(num_bytes: int) -> SharedMemory:
        raise LinkError(f"shared memory: {num_bytes} bytes are needed")

    assert in_groups(2, work) == ["shared memory: 16777216 bytes are needed"] * 2
