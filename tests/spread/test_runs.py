"""Runs of ranks with a split model equal one worker, and resume from its files.

Each set of ranks takes seconds, so each test checks much. Details are tested in threads
(test_spread_model.py).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.state import load_tensors
from ranks import Ended, free_port, run_alone
from runs import Run, run_script
from split_script import SPLIT_SCRIPT

CLOSE = 1e-9


def by_ranks(folder: Path, size: int, **settings: str) -> Ended:
    """Run the script in this number of processes, as mpirun starts them."""
    folder.mkdir(exist_ok=True)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {**settings, **meet, "OMPI_COMM_WORLD_SIZE": str(size)}
    ranks = [
        {**world, "OMPI_COMM_WORLD_RANK": str(rank), "RANK": str(rank)} for rank in range(size)
    ]
    ended = run_alone(folder, ranks, SPLIT_SCRIPT)
    return Ended(
        folder=folder,
        code=max(abs(one.code) for one in ended),
        said="".join(one.said for one in ended),
        took_s=max(one.took_s for one in ended),
    )


def by_one(folder: Path, **settings: object) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SPLIT_SCRIPT)
    return run_script(folder / "train.py", folder, workers=1, engine="inline", **settings)


def assert_same(run: Run, other: Run) -> None:
    state, expected = run.state, other.state
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(state[name], tensor, rtol=CLOSE, atol=CLOSE), name


@pytest.mark.timeout(150)
def test_killed_split_run_names_one_cause_and_anyone_can_resume_it(tmp_path: Path) -> None:
    expected = by_one(tmp_path / "one")
    folder = tmp_path / "split"
    died = by_ranks(
        folder, 2, PACELINE_SPLIT="network:2", PACELINE_CHECKPOINT_EVERY="4 updates", MODE="kill 1"
    )
    assert died.code != 0
    assert "split            network:2: " in died.said
    causes = [line for line in died.errors if "worker 1 ended" in line]
    assert len(causes) == 1, died.said
    assert died.took_s < 60
    shutil.copytree(folder, tmp_path / "alone")
    some = by_ranks(
        folder, 2, ASKED="shard:2", PACELINE_RESUME=str(folder / "run"), PACELINE_UPDATES="10"
    )
    assert some.code == 0, some.said
    assert "split            shard:2: gradients and optimizer state of " in some.said
    went_on = by_ranks(
        folder, 2, PACELINE_SPLIT="shard", PACELINE_RESUME=str(folder / "run"), MODE="surface"
    )
    assert went_on.code == 0, went_on.said
    assert_same(went_on.run, expected)
    for words in (
        "split            shard:3: ",
        "changed: split: data, now shard",
        " is in pieces on all workers, since the model is split",
        "deepcopy is refused: ",
        "load is refused: model.load_state_dict() after prepare()",
        "epoch 1 version 12 acc",
        "at the end (5, 3)",
    ):
        assert words in went_on.said, went_on.said
    assert " of 19 rate" in went_on.said
    alone = by_one(tmp_path / "alone", resume=str(tmp_path / "alone" / "run"))
    assert_same(alone, expected)


@pytest.mark.timeout(150)
def test_two_parts_in_two_copies_equal_one_worker(tmp_path: Path) -> None:
    expected = by_one(tmp_path / "one")
    split = by_ranks(tmp_path / "split", 4, ASKED="2x2", MODE="surface")
    assert split.code == 0, split.said
    assert_same(split.run, expected)
    assert "parameters 111" in split.said
    assert "clip is refused: parameter" in split.said
    assert split.said.count("difference 0.0") == 2, split.said
    assert "at the end (5, 3)" in split.said
    assert split.said.count("states 7 [3, 4]") == 2, split.said


LARGE_SCRIPT = """
import os
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline


def held(name):
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) for one in rows if one.startswith(name))


pace = paceline.connect()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(8)))  # 9 MB each
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = TensorDataset(torch.randn(48, 1500), torch.randint(0, 1500, (48,)))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
most = []
for epoch in pace.epochs(1):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        most.append(held("VmHWM"))
        if len(most) == 2:
            Path("/proc/self/clear_refs").write_text("5")
            most.append(held("VmHWM"))
rank = os.environ["RANK"]
print(f"rank {rank} took {most[-1] - most[3]} KiB more, {held('RssFile')}", flush=True)
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="proc(5)")
def test_checkpoint_needs_no_memory_for_the_whole_model(tmp_path: Path) -> None:
    """144 MB of parameters and momentum, 9 MB per tensor, saved after the fourth update."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "train.py").write_text(LARGE_SCRIPT)
    command = [
        sys.executable, "-m", "paceline", "launch", "--workers", "2", "--split", "shard",
        "--checkpoint-every", "4 updates", "--run-dir", str(folder / "run"), "train.py",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    taken = CheckpointFolder(folder / "run" / "checkpoints").newest()
    assert load_tensors(taken.path / "model.safetensors")["3.weight"].shape == (1500, 1500)
    state = load_tensors(taken.path / "optimizer.safetensors")
    assert state["3.momentum_buffer"].abs().sum() > 0
    results = [int(one) for one in re.findall(r"rank \d took (-?\d+) KiB more", ended.stdout)]
    assert len(results) == 2
    assert max(results) < 48 << 10, ended.stdout
