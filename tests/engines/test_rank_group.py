"""What ranks sum together, over real gloo: small sums of one machine go along a tree."""

from pathlib import Path
from subprocess import PIPE

import pytest

from forked import Forked
from ranks import free_port

RANK = """
import os, sys, torch
from paceline.engines.torchrun import group
from paceline.engines.torchrun.place import MeetingPlace
from paceline.engines.torchrun.world import RankOfWorld

rank, size, port, is_near = map(int, sys.argv[1:])
torch.set_num_threads(1)
me = RankOfWorld(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port)
ranks = group.RankGroup(MeetingPlace(me), me, lambda seat: None, is_near=bool(is_near))
by_gloo = []
own = type(ranks)._of

def noted(self, tensor):
    if sys._getframe(1).f_code.co_name == "all_reduce":
        by_gloo.append(tensor.nbytes)
    return own(self, tensor)

group.RankGroup._of = noted
small, large = torch.arange(1001.0) * (rank + 1), torch.ones(group._SMALL_BYTES // 4 + 1)
late, turned, whole = torch.ones(7), torch.full((2,), 1.0 + rank * 1j), torch.tensor([rank, 3])
begun = ranks.all_reduce(late)
ranks.all_reduce(small, at_once=True).wait()
ranks.all_reduce(large, at_once=True).wait()
ranks.all_reduce(turned, at_once=True).wait()
ranks.all_reduce(whole, is_maximum=True, at_once=True).wait()
begun.wait()
assert torch.equal(small, torch.arange(1001.0) * (size * (size + 1) // 2))
assert large.tolist() == [float(size)] * len(large)
assert late.tolist() == [float(size)] * 7
assert turned.tolist() == [size + 1j * size * (size - 1) / 2] * 2
assert whole.tolist() == [size - 1, 3]
print(by_gloo, flush=True)
assert ranks.leave()
os._exit(0)
"""


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_near", [True, False], ids=["one machine", "several"])
def test_a_small_sum_that_all_wait_for_goes_along_a_tree(
    tmp_path: Path, size: int, is_near: bool
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()
    ranks = [
        Forked([tmp_path / "rank.py", rank, size, port, int(is_near)], cwd=tmp_path,
               stdout=PIPE, stderr=PIPE)
        for rank in range(size)
    ]  # fmt: skip
    for one in ranks:
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        late, large = 28, (1 << 20) + 4
        expected = [late, large] if is_near else [late, 4004, large, 16, 16]
        assert out.strip() == str(expected)
