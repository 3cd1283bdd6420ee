"""Each worker keeps its part of every batch: an RNN's state is carried as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.context import Context
from paceline.core.batches import Batches
from paceline.errors import AllGone, ConfigError
from paceline.events import Lease
from paceline.exchange.solo import SoloExchange
from paceline.script.holding import Held, KeptPart
from paceline.script.prepared import sticky_notes
from paceline.script.worker import Pace
from reference import differ
from runs import Run, assert_each_sample_once, run_script
from scripts.layers import Columns, Words

CLOSE = 1e-6
SCRIPT = """
import sys, time
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, Subset
from scripts.layers import Columns, Words

pace = paceline.connect()
model = Words().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
data = Subset(Columns({columns}, 9), range({num}))
loader = DataLoader(data, batch_size={columns}, num_workers={loader_workers})
model, optimizer, loader = pace.prepare(model, optimizer, loader, sticky=True)
for epoch in pace.epochs(3):
    state = None
    for number, (words, following) in enumerate(loader):
        with pace.step() as step:
            optimizer.zero_grad()
            if state is not None:
                state = tuple(one[:, : len(words)].detach() for one in state)
            scores, state = model(words, state)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
            loss.backward()
            {inside}
            optimizer.step()
        with open(f"part-{{pace.worker}}.txt", "a") as file:
            print(epoch, number, words[:, 0].tolist(), file=file)
if pace.is_main:
    torch.save({{name: one.clone() for name, one in model.state_dict().items()}}, "found.pt")
"""


def run(folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> Run:
    """A run over 9 chunks in columns; ``num`` may shorten the last batch."""
    patch.chdir(folder)
    words = {"columns": 8, "num": 72, "loader_workers": 0, "inside": "pass"}
    words |= {name: options.pop(name) for name in [*options] if name in words}
    script = folder / "train.py"
    script.write_text(SCRIPT.format(**words))
    return run_script(script, folder, **{"workers": 2, "engine": "inline", **options})


def twin(num: int = 72, columns: int = 8) -> dict[str, Tensor]:
    """One process."""
    model, data = Words().double(), Columns(columns, 9)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(3):
        state: Any = None
        for first in range(0, num, columns):
            pairs = [data[index] for index in range(first, min(first + columns, num))]
            words, following = (torch.stack(chunk) for chunk in zip(*pairs, strict=True))
            optimizer.zero_grad()
            if state is not None:
                state = tuple(chunk[:, : len(words)].detach() for chunk in state)
            scores, state = model(words, state)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def parts(folder: Path, worker: int) -> list[str]:
    return (folder / f"part-{worker}.txt").read_text().splitlines()


@pytest.mark.parametrize("num", [72, 69, 65])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_full_sync_matches_plain_pytorch(
    workers: int, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last batch has 5 columns, or one."""
    result = run(tmp_path, monkeypatch, workers=workers, num=num)
    assert differ(torch.load(tmp_path / "found.pt"), twin(num)) < CLOSE
    assert_each_sample_once(result, num, 3)


@pytest.mark.parametrize("path", ["peers", "store"])
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_workers_in_processes_match_plain_pytorch(
    path: str, loader_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"engine": "local", "path": path, "loader_workers": loader_workers}
    result = run(tmp_path, monkeypatch, num=69, **settings)
    assert result.path == path
    assert differ(torch.load(tmp_path / "found.pt"), twin(69)) < CLOSE


@pytest.mark.parametrize("path", ["peers", "store"])
def test_a_local_sgd_worker_gets_its_part_of_every_batch_in_order(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path, monkeypatch, engine="local", path=path, protocol="local-sgd:4")
    assert_each_sample_once(result, 72, 3)
    data = Columns(8, 9)
    for worker in (0, 1):
        columns = range(4 * worker, 4 * worker + 4)
        assert parts(tmp_path, worker) == [
            f"{epoch} {chunk} {[int(data[8 * chunk + column][0][0]) for column in columns]}"
            for epoch in range(3)
            for chunk in range(9)
        ]


@pytest.mark.parametrize("protocol", ["k-sync:1", "k-batch-async:2", "async", "adaptive"])
def test_protocols_that_cannot_keep_parts_are_refused(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"prepare\(sticky=True\) under .*use --protocol full"):
        run(tmp_path, monkeypatch, protocol=protocol)
    assert not list(tmp_path.glob("part-*"))


def test_sticky_without_a_loader_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"sticky=True\) needs a loader"):
        Pace(SoloExchange(), Context()).prepare(model, optimizer, sticky=True)


def test_skipping_a_sticky_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"step.skip\(\) gives a mini-batch to another worker"):
        run(tmp_path, monkeypatch, inside="step.skip()")


@pytest.mark.parametrize("path", ["peers", "store"])
def test_a_death_ends_the_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker continues with the state of other columns."""
    with pytest.raises(AllGone, match="its part of every batch to no other worker"):
        run(tmp_path, monkeypatch, engine="local", path=path, inside="time.sleep(0.01)",
            fault=("kill worker 1 at update 5",))  # fmt: skip
    assert len(parts(tmp_path, 0)) < 9


def test_respawn_restarts_all_workers_with_fresh_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(
        tmp_path, monkeypatch, engine="local", respawn=True, checkpoint_every="3 updates",
        inside="time.sleep(0.01)", fault=("kill worker 1 at update 14",),
    )  # fmt: skip
    assert any("starts its part with a fresh state" in note for note in result.notes)
    assert result.summary.updates == 27


def test_a_worker_that_gets_another_part_raises() -> None:
    """It never takes another column's mini-batch for its own."""
    kept = KeptPart()
    kept.begin_pass(0, Batches(40, 8, 2, has_columns=True))
    kept.took(_held(0, 4))
    kept.took(_held(8, 12))
    with pytest.raises(ConfigError, match="had part 0 of batch 1, and now got part 1"):
        kept.took(_held(20, 24))
    kept.begin_pass(1, Batches(40, 8, 2, has_columns=True))
    kept.took(_held(0, 4))
    with pytest.raises(ConfigError, match="now got part 0 of batch 2"):
        kept.took(_held(16, 20))


def _held(start: int, stop: int) -> Held:
    return Held(Lease(start, 0, start, stop), stop - start)


def test_the_plan_explains_sticky_parts() -> None:
    [keeps] = sticky_notes(Context(parts=2, workers=2))
    assert keeps.startswith("each worker keeps its part of every batch")
    _, steps = sticky_notes(Context(parts=2, workers=2, is_difference=True, num_steps=4))
    assert "4 steps between two averages" in steps
    assert "a step has 1/2 of a batch" in steps
