"""Every worker draws the order of an epoch: where they differ, the run is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from runs import Run, run_script

NUM_SAMPLES = 40

SCRIPT = """
import os, random, sys
import numpy as np, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Own:
    def __init__(self):
        self.generator_ = {generator}
    def __iter__(self):
        order = list(range(40))
        self.generator_.shuffle(order)
        return iter(order)
    def __len__(self):
        return 40

class OwnBatches(Own):
    def __iter__(self):
        order = list(super().__iter__())
        return iter([order[:10], order[10:25], order[25:]])
    def __len__(self):
        return 3

class Fewer(Own):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 40 - self.epoch
    def __iter__(self):
        return iter(range(len(self)))

class ByAddress(Own):
    def __iter__(self):
        names = {{object(): number for number in range(40)}}
        return iter([names[one] for one in set(names)])

torch.manual_seed(1)
pace = paceline.connect()
data = TensorDataset(torch.randn(40, 4), torch.arange(40))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, {sampler})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for inputs, numbers in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            with open(f"used-{{epoch}}", "a") as file:
                file.write("".join(f"{{int(one)}} " for one in numbers))
    {between}
"""


def run(folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> Run:
    patch.chdir(folder)
    words = {"generator": "random", "sampler": "batch_size=8, sampler=Own()", "between": "pass"}
    settings = {"workers": 2, **{k: v for k, v in options.items() if k not in words}}
    script = folder / "train.py"
    script.write_text(SCRIPT.format(**{k: options.get(k, v) for k, v in words.items()}))
    return run_script(script, folder, **settings)


def used(folder: Path, epoch: int) -> Counter[int]:
    return Counter(map(int, (folder / f"used-{epoch}").read_text().split()))


@pytest.mark.parametrize(
    "options",
    [
        {"generator": "random.Random()", "engine": "inline"},
        {"generator": "random.Random()", "path": "peers"},
        {"generator": "np.random.default_rng()", "path": "store"},
        {"generator": "random.Random()", "sampler": "batch_sampler=OwnBatches()"},
        {"sampler": "batch_size=8, sampler=ByAddress()", "engine": "inline", "protocol": "async"},
    ],
    ids=str,
)
def test_workers_that_draw_different_orders_are_refused_before_a_step(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="workers 0 and 1 drew different orders") as refusal:
        run(tmp_path, monkeypatch, **options)
    for words in ("epoch 1", "used twice", "random.Random()", "set_epoch(epoch)"):
        assert words in str(refusal.value)
    assert not (tmp_path / "used-0").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"generator": "random"},
        {"generator": "np.random"},
        {"generator": "random.Random(3)"},
        {"generator": "np.random.default_rng(3)", "sampler": "batch_sampler=OwnBatches()"},
    ],
    ids=str,
)
def test_equally_drawn_orders_use_each_sample_once(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, engine="inline", **options)
    assert used(tmp_path, 0) == used(tmp_path, 1) == Counter(range(NUM_SAMPLES))


def test_data_shuffled_between_epochs_are_shuffled_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps leave each worker's generators in different states."""
    between = (
        "order = list(range(40)); random.shuffle(order);"
        "data.tensors = tuple(one[order] for one in data.tensors)"
    )
    run(tmp_path, monkeypatch, engine="inline", protocol="async", between=between)
    assert used(tmp_path, 1) == Counter(range(NUM_SAMPLES))


def test_epochs_with_different_numbers_of_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the second epoch would leave samples out or ask for missing ones."""
    sampler = "batch_size=8, sampler=Fewer()"
    with pytest.raises(ConfigError, match="Fewer gave 39 samples for epoch 2, and 40 before"):
        run(tmp_path, monkeypatch, engine="inline", sampler=sampler)


def test_an_epoch_without_a_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = "torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 64, True)"
    with pytest.raises(ConfigError, match="0 samples cannot be shared by 2 mini-batches"):
        run(tmp_path, monkeypatch, engine="inline", sampler=f"batch_sampler={samplers}")


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_newcomer_with_another_order_is_dismissed(
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its sampler's own generator is at the first epoch, the others' at the second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        SCRIPT.format(
            generator="random.Random(3)", sampler="batch_size=4, sampler=Own()", between="pass"
        ).replace("epochs(2)", "epochs(3)")
    )
    done = run_script(
        tmp_path / "train.py", tmp_path, workers=2, path=path, respawn=True, delay=("60ms",),
        fault=("kill worker 1 at update 14",),
    )  # fmt: skip
    assert "worker 1 came back and drew another order of the samples" in capfd.readouterr().err
    assert done.num_epochs_ended() == 3
    assert used(tmp_path, 2) == Counter(range(NUM_SAMPLES))


LEFT_EARLY = """
import torch, paceline
pace = paceline.connect()
torch.manual_seed(0)
data = torch.randn(8, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, numbers = pace.prepare(model, optimizer, range(0, 8, 2))
for epoch in pace.epochs(2):
    for repeat in range(3):
        for start in numbers:
            with pace.step():
                optimizer.zero_grad()
                model(data[start : start + 2] + epoch).square().mean().backward()
                optimizer.step()
        if repeat == (epoch + pace.worker) % 2:
            break
"""


@pytest.mark.parametrize("protocol", ["full-sync", "async"])
def test_pass_in_another_epoch_than_others_is_refused(tmp_path: Path, protocol: str) -> None:
    """Each makes three passes in two epochs, so only the epoch of a pass tells them apart."""
    (tmp_path / "train.py").write_text(LEFT_EARLY)
    words = r"worker 0 begins a pass over the loader in epoch 2 .* and worker 1 in epoch 1"
    with pytest.raises(ConfigError, match=words):
        run_script(tmp_path / "train.py", tmp_path, workers=2, protocol=protocol, engine="inline")
