"""The memory of a rank: as much as plain PyTorch with buckets, without another copy."""

from pathlib import Path

from ranks import run_by_mpirun

MOST = 4.6
"""Times the parameters: they, their momentum, their gradients and the sum over ranks are 4; what
else a process begins to use meanwhile is some megabytes. Of a page that two processes map, each has
half."""
SCRIPT = """
import ctypes
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline


def held_bytes():
    ctypes.CDLL(None).malloc_trim(0)
    return 1024 * int(open("/proc/self/smaps_rollup").read().split("Pss:")[1].split()[0])


pace = paceline.connect()
nn.Linear(8, 8)(torch.zeros(1, 8)).sum().backward()
before = held_bytes()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4)))
size = sum(one.nbytes for one in model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(16, 1500)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    if epoch == 0:
        print(f"holds {(held_bytes() - before) / size:.2f}", flush=True)
        pace.sum(1.0)  # both have said it: the first error ends the other one
        model[2].weight.data[700, 700] += 1.0
"""


def test_a_rank_holds_no_second_copy_and_detects_one_changed_weight(
    tmp_path: Path,
) -> None:
    ended = run_by_mpirun(tmp_path, 2, SCRIPT, PACELINE_CHECKPOINT_EVERY="never")
    held = [float(line.split()[1]) for line in ended.said.splitlines() if line[:5] == "holds"]
    assert len(held) == 2, ended.said
    assert max(held) <= MOST, ended.said
    assert ended.code != 0
    assert "parameter '2.weight' was changed after prepare()" in ended.said
