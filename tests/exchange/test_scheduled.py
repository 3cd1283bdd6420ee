"""Schedules on tensors, between real processes: the results of torch's own all-reduce."""

import os
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from forked import Forked
from paceline.collectives import parse
from paceline.exchange.scheduled import ScheduledCollective

RANK = '''
import os, sys, torch, torch.distributed as dist
from paceline.collectives import parse
from paceline.collectives.choose import candidates
from paceline.collectives.rings import ParallelRings
from paceline.collectives.transfers import Operation, bounds, owner_of
from paceline.errors import ConfigError
from paceline.exchange.group import TorchGroup
from paceline.exchange.scheduled import ScheduledCollective, along

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)

def told(tensor):
    """Every rank's, for comparison bit by bit."""
    every = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(every, tensor.contiguous())
    return every

def mine(number, dtype):
    torch.manual_seed(100 * number + rank)
    return torch.randn(number).mul(1000).to(dtype)

members = [parse(text, size) for text in candidates(size, late=size - 1)]
members.append(ParallelRings([tuple(range(size)), tuple(reversed(range(size)))]))
num_checked = 0
for member in members:
    run = ScheduledCollective(member)
    for number in (0, 1, size, 1003):
        for dtype in (torch.float32, torch.bfloat16, torch.int64)[: 3 if number > size else 1]:
            expected, found = mine(number, dtype), mine(number, dtype)
            dist.all_reduce(expected)
            run.all_reduce(found)
            if dtype.is_floating_point:
                far = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
                torch.testing.assert_close(found, expected, rtol=far, atol=1000 * far)
            else:
                assert torch.equal(found, expected), (member, number)
            assert all(torch.equal(one, found) for one in told(found)), (member, number, dtype)
            expected, found = mine(number, dtype), mine(number, dtype)
            dist.all_reduce(expected, dist.ReduceOp.MAX)
            run.all_reduce(found, is_maximum=True)
            assert torch.equal(found, expected), (member, number, dtype)
            num_checked += 1
    square = torch.arange(12.0).view(3, 4).t()  # not contiguous
    run.all_reduce(square)
    assert torch.equal(square, size * torch.arange(12.0).view(3, 4).t()), member

for member in members:
    run = ScheduledCollective(member)
    for operation in member.operations:
        try:
            member.check(operation)
        except ConfigError:
            continue
        for root in range(size) if operation.has_root else (0,):
            found = mine(77, torch.int64)
            begun = told(found)
            run.run(found, operation, root=root)
            num_chunks = member.num_chunks(operation)
            for chunk, (begin, end) in enumerate(bounds(77, num_chunks)):
                owner = owner_of(chunk, num_chunks, size)
                value = begun[root if operation.value in ("broadcast", "scatter") else owner]
                value = sum(begun) if operation.is_reducing else value
                holder = {"reduce": root, "gather": root, "reduce-scatter": owner,
                          "scatter": owner, "all-to-all": chunk % size}.get(operation.value, rank)
                if holder == rank:
                    assert torch.equal(found[begin:end], value[begin:end]), (member, operation)
            num_checked += 1

try:
    ScheduledCollective(parse("ring", size + 1))
except ConfigError as error:
    assert str(error).endswith(f"the group has {size}; parse it with {size}"), error
else:
    raise AssertionError("a ring of more ranks than there are")
pair = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    part = torch.full((5,), float(rank + 1))
    ScheduledCollective(parse("ring", 2), TorchGroup(pair)).all_reduce(part)
    assert torch.equal(part, torch.full((5,), 1.0 + size)), part

members = TorchGroup()
for group in (members, along("ring", members), along("tree", members, is_apart=True)):
    assert (group.rank, group.size) == (rank, size)
    numbers = [torch.full((3,), float(rank)), torch.tensor(rank), torch.tensor([True, rank == 1])]
    for begun in [group.all_reduce(one, is_maximum=True) for one in numbers]:
        begun.wait()
    assert numbers[0].tolist() == [size - 1.0] * 3
    assert (int(numbers[1]), numbers[2].tolist()) == (size - 1, [True, True])
    ordered = [torch.full((1 << 16,), float(rank)), torch.ones(3), torch.tensor([1.0 + rank])]
    begun = [group.all_reduce(one, at_once=one is not ordered[0]) for one in ordered]
    [one.wait() for one in begun]
    assert [float(one[0].real) for one in ordered] == [
        size * (size - 1) / 2, size, size * (size + 1) / 2
    ], ordered
    turned = torch.tensor([1.0 + rank * 1j])
    group.all_reduce(turned).wait()
    assert turned.tolist() == [size + 1j * size * (size - 1) / 2]
    sent = torch.arange(2 * size, dtype=torch.uint8) + 10 * rank
    came = torch.empty(2 * size, dtype=torch.uint8)
    group.all_to_all(sent, came).wait()
    assert came.tolist() == [10 * n + 2 * rank + i for n in range(size) for i in (0, 1)], came
    every = torch.empty(2 * size * size, dtype=torch.uint8)
    group.all_gather(sent, every).wait()
    assert every.tolist() == [10 * n + i for n in range(size) for i in range(2 * size)]
    num_checked += 1
print("checked", num_checked, flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may hold tensors still, and abort a Python that ends under them
'''


DYING = """
import os, signal, sys, time, torch, torch.distributed as dist
from paceline.collectives import parse
from paceline.exchange.group import TorchGroup
from paceline.exchange.scheduled import ScheduledCollective

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
run = ScheduledCollective(parse("ring", size))
run.all_reduce(torch.ones(1000))
if rank == 1:
    passed, rounds = TorchGroup.swap, []
    def dies_in_its_third_round(self, sent, received):
        rounds.append(sent)
        if len(rounds) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return passed(self, sent, received)
    TorchGroup.swap = dies_in_its_third_round
begun_s = time.monotonic()
try:
    run.all_reduce(torch.ones(1000))
except RuntimeError:
    print("gone", time.monotonic() - begun_s)
    sys.exit(0)
"""


def run_ranks(folder: Path, text: str, num_ranks: int) -> list[tuple[int, str, str]]:
    """Run a script in these processes: exit code and output of each."""
    (folder / "rank.py").write_text(text)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [folder / "rank.py", folder]
    ranks = [
        Forked([*words, rank, num_ranks], env=env, stdout=PIPE, stderr=PIPE)
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.wait(), *words) for rank, words in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_every_schedule_matches_torchs_all_reduce(tmp_path: Path, num_ranks: int) -> None:
    """The values of ``all_reduce``, the same bits in all ranks; and every other operation."""
    ended = run_ranks(tmp_path, RANK, num_ranks)
    assert [code for code, _, _ in ended] == [0] * num_ranks, ended[0][2] + ended[-1][2]
    words, number = ended[0][1].split()
    assert words == "checked"
    assert int(number) > 6 * 10


def test_a_rank_death_is_reported_to_the_others(tmp_path: Path) -> None:
    """By an error and within seconds, also to those that never exchanged a message with it."""
    ended = run_ranks(tmp_path, DYING, 4)
    assert ended[1][0] == -9
    for code, out, err in (ended[0], ended[2], ended[3]):
        assert code == 0, err
        output, after_s = out.split()
        assert output == "gone"
        assert float(after_s) < 30.0


def test_a_collective_needs_an_existing_process_group() -> None:
    """None is made for it."""
    with pytest.raises((ValueError, RuntimeError), match="process group"):
        ScheduledCollective(parse("ring", 3))
