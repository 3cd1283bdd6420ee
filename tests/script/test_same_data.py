"""Workers whose data differ are refused by name, with what usually makes them differ."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from runs import Run, run_script

SCRIPT = """
import random, time
import numpy as np, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

class Described(Dataset):
    '''Numbers, texts and containers; with random numbers of its own where it has a generator.'''
    def __init__(self, data, generator=None):
        self.data, self.generator = data, generator
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        if self.generator is not None:
            sign = 1 if self.generator.random() < 0.5 else -1
            return self.data[index][0] * sign, index
        return {{"inputs": self.data[index][0], "name": f"{{self.data[index][1]}}.png"}}

torch.manual_seed(1)
data = TensorDataset(torch.randn(40, 4), torch.arange(40))
{before}
pace = paceline.connect()
{after}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, {options})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
state = torch.get_rng_state(), random.getstate()
for epoch in pace.epochs(1):
    for batch in loader:
        with pace.step():
            optimizer.zero_grad()
            inputs = batch["inputs"] if isinstance(batch, dict) else batch[0]
            model(inputs).square().mean().backward()
            optimizer.step()
"""


def run(folder: Path, before: str = "", after: str = "", options: str = "", **more: Any) -> Run:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(before=before, after=after, options=options))
    return run_script(script, folder, **{"workers": 2, "engine": "inline", **more})


DIFFERENT = {
    "split": "data = Subset(data, np.random.default_rng().permutation(40)[:30].tolist())",
    "shuffled": "data = TensorDataset(*(one[[*random.Random().sample(range(40), 40)]] "
    "for one in data.tensors))",
    "split with a generator": "data, _ = random_split(data, [30, 10], "
    "torch.Generator().manual_seed(time.time_ns()))",
    "in containers": "data = Described(Subset(data, random.Random().sample(range(40), 30)))",
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_workers_with_different_data_are_refused_by_sample(how: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers 0 and 1 have different data: sample ") as caught:
        run(tmp_path, before=DIFFERENT[how])
    for words in ("random_split", "before paceline.connect()", "manual_seed(0)", "sorted("):
        assert words in str(caught.value)


def test_different_data_are_refused_with_loader_workers_and_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have different data: sample "):
        run(tmp_path, before=DIFFERENT["split"], options="num_workers=1", engine="local")


def test_data_split_by_worker_are_refused(tmp_path: Path) -> None:
    after = "data = Subset(data, range(pace.worker, 40, pace.num_workers))"
    with pytest.raises(ConfigError, match="do not split the data by worker"):
        run(tmp_path, after=after)


def test_data_of_different_lengths_are_refused_by_length(tmp_path: Path) -> None:
    after = "data = Subset(data, range(40 - 8 * pace.worker))"
    with pytest.raises(ConfigError, match="workers 0 and 1 have different data: 40 and 32 samples"):
        run(tmp_path, after=after)


@pytest.mark.parametrize(
    "before",
    [
        "data, _ = random_split(data, [30, 10])",
        "data, _ = random_split(data, [30, 10], torch.Generator().manual_seed(3))",
        "data = Subset(data, random.sample(range(40), 30))",
        "data = Subset(data, np.random.permutation(40).tolist())",
        "data = Described(data)",
        "data = Described(data, np.random.default_rng())",
        "data = Described(data, random)",
    ],
)
def test_equal_data_are_accepted(before: str, tmp_path: Path) -> None:
    """Also data whose samples are random: they are not compared."""
    assert run(tmp_path, before=before).summary.updates in (4, 5)


def test_a_distributed_sampler_is_refused_by_name(tmp_path: Path) -> None:
    options = "sampler=DistributedSampler(data, pace.num_workers, pace.worker)"
    with pytest.raises(ConfigError, match=r"DistributedSampler.*leave it out: Paceline shares the"):
        run(tmp_path, options=options)
