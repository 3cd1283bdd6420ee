"""``pace.evaluate`` counts what the loader gives, whoever counts; the model is as it was."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)  # fmt: skip

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from runs import run_script

SCRIPT = """
import json, random
import numpy as np, torch, paceline
from torch import nn
from torch.utils.data import *
from torch.utils.data.distributed import DistributedSampler

class Noisy(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.rand(4) + random.random() + np.random.random(), index

class Opened(Dataset):
    file = None
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return self.file * torch.rand(4) + random.random(), index

def open_it(worker):
    torch.utils.data.get_worker_info().dataset.file = 1.0

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))

class Own:
    def __init__(self):
        self.order = random.Random()
    def __iter__(self):
        return iter(self.order.sample(range(32), 8))
    def __len__(self):
        return 8

torch.manual_seed(1)
data = TensorDataset(torch.randn(32, 4), torch.arange(32))
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pace = paceline.connect()
loader = DataLoader(data, batch_size=8)
other = {other}

def fn(batch):
    numbers = batch[1].tolist()
    return {{"acc": (sum(numbers), len(numbers)), "batches": (1, 1),
             "inputs": (batch[0].double().sum(), 1)}}

def evaluate(of=None):
    with open(f"totals-{{pace.worker}}", "a") as file:
        print(json.dumps(pace.evaluate({fn}, other if of is None else of)), file=file)

{before}
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for inputs, numbers in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    state = torch.get_rng_state(), random.getstate()
    {after}
    {left}
"""
AS_IT_WAS = "assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]"


def told(folder: Path, patch: pytest.MonkeyPatch, other: str, **options: Any) -> list[list[Any]]:
    """The totals that each worker was told, evaluation by evaluation."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    patch.chdir(folder)
    words = {"before": "", "after": "evaluate()", "left": AS_IT_WAS, "fn": "fn"}
    settings = {k: v for k, v in options.items() if k not in words}
    words = {k: options.get(k, v) for k, v in words.items()}
    (folder / "train.py").write_text(SCRIPT.format(other=other, **words))
    settings = {"workers": 2, "engine": "inline", **settings}
    run_script(folder / "train.py", folder, **settings)
    files = [folder / f"totals-{worker}" for worker in range(settings["workers"])]
    return [[json.loads(line) for line in one.read_text().splitlines()] for one in files]


SUBSETS = {
    "a subset sampler": ("DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(8)))",
                         [28, 8, 2]),
    "a batch sampler": ("DataLoader(data, batch_sampler=[[0, 1, 2], [9], [30, 31]])", [73, 6, 3]),
    "drop_last": ("DataLoader(data, batch_size=10, drop_last=True)", [435, 30, 3]),
    "a last batch that is short": ("DataLoader(data, batch_size=10)", [496, 32, 4]),
    "no batches": ("DataLoader([(torch.ones(4), torch.tensor([3])) for _ in range(5)], "
                   "batch_size=None)", [15, 5, 5]),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("which", SUBSETS)
def test_it_counts_what_the_loader_gives(
    which: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, wanted = SUBSETS[which]
    for totals in told(tmp_path, monkeypatch, other, workers=workers, left=""):
        for one in totals:
            assert [*one["acc"], one["batches"][0]] == wanted
        assert len(totals) == 2


def test_random_samples_are_the_same_whoever_evaluates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes too, where it is chance who does what; and again at another version."""
    loader = "DataLoader(Noisy(), batch_size=2)"
    one, other = told(tmp_path, monkeypatch, loader)
    assert one == other
    assert one[0] != one[1]
    assert told(tmp_path, monkeypatch, loader, engine="local") == [one, one]


def test_what_the_loaders_own_workers_open_is_open_and_drawn_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process it never is."""
    loader = "DataLoader(Opened(), batch_size=2, num_workers=2, worker_init_fn=open_it)"
    left = f"{AS_IT_WAS}; assert other.dataset.file is None"
    found = told(tmp_path, monkeypatch, loader, engine="local", left=left)
    assert [one["acc"] for one in found[0]] == [[496, 32]] * 2
    assert told(tmp_path, monkeypatch, loader, engine="local", left=left) == found
    assert found[0] == found[1]


def test_samples_drawn_at_random_are_the_same_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "DataLoader(data, 4, sampler=RandomSampler(data, num_samples=8))"
    one, two = told(tmp_path, monkeypatch, other, engine="local")
    assert one == two
    assert one[0]["acc"][1] == 8


def test_workers_that_draw_other_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"workers evaluate different samples.*its own random"):
        told(tmp_path, monkeypatch, "DataLoader(data, 4, sampler=Own())")


def test_a_sampler_that_shares_samples_out_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "DataLoader(data, 4, sampler=DistributedSampler(data, pace.num_workers, pace.worker))"
    with pytest.raises(ConfigError, match=r"DistributedSampler.*leave it out: Paceline shares"):
        told(tmp_path, monkeypatch, other)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prepared_loader_is_evaluated_as_the_plain_one(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for totals in told(
        tmp_path, monkeypatch, "loader", after="evaluate(loader)", workers=workers, left=""
    ):
        assert [one["acc"] for one in totals] == [[496, 32]] * 2


def test_inside_an_epoch_each_worker_counts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random state of the step is as if nobody had evaluated."""
    before = "step = optimizer.step\ndef evaluated():\n    state = torch.get_rng_state()\n    "
    before += "evaluate()\n    assert torch.equal(torch.get_rng_state(), state)"
    script = SCRIPT.replace("zero_grad()\n", "zero_grad()\n            evaluated()\n")
    monkeypatch.setitem(globals(), "SCRIPT", script)
    other = "DataLoader(Noisy(), batch_size=10, shuffle=True, drop_last=True)"
    for totals in told(tmp_path, monkeypatch, other, before=before, after=""):
        assert len(totals) == 8
        assert {one["acc"][1] for one in totals} == {30}


def test_a_stream_is_for_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "DataLoader(Stream(), batch_size=2)"
    fn = 'lambda batch: {"acc": (batch.sum(), len(batch))}'
    (totals,) = told(tmp_path, monkeypatch, other, fn=fn, workers=1, left="")
    assert totals == [{"acc": [10, 5]}] * 2
    with pytest.raises(ConfigError, match=r"Stream is an iterable data set.*one worker"):
        told(tmp_path, monkeypatch, other, fn=fn)


def test_before_prepare_one_worker_evaluates_and_several_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SUBSETS["drop_last"][0]
    (totals,) = told(tmp_path, monkeypatch, other, before="evaluate()", workers=1, left="")
    assert [one["acc"] for one in totals] == [[435, 30]] * 3
    with pytest.raises(ConfigError, match=r"pace.evaluate\(\) was called before pace.prepare\(\)"):
        told(tmp_path, monkeypatch, other, before="evaluate()")


MERGING = """
class Merging(nn.Linear):
    merged = False

    def __init__(self):
        super().__init__(4, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            change = (self.up @ self.down).detach()
            self.weight.data += -change if mode else change
            self.merged = not mode
        return self

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.merged else outputs + inputs @ (self.up @ self.down).T

model = nn.Sequential(Merging(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_that_merges_for_evaluation_trains_on_behind_it(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it rounds on the way there and back is no change of the script's."""
    behind = "assert model[0].training and not model[0].merged"
    fn = "lambda batch: fn(batch) if model[0].merged else None"
    told(tmp_path, monkeypatch, "loader", before=MERGING, fn=fn, left=behind, workers=workers)


# -- one worker under plain python ---------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def data() -> "TensorDataset":
    return TensorDataset(torch.arange(32.0).view(32, 1), torch.arange(32))


def lone() -> tuple[Pace, nn.Sequential]:
    pace = Pace(SoloExchange(), Context(device="cpu"))
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace.prepare(model, optimizer, DataLoader(data(), batch_size=8))
    return pace, model


def count(batch: Any) -> dict[str, tuple[Any, Any]]:
    return {"sum": (batch[1].sum(), len(batch[1]))}


@pytest.mark.parametrize("is_frozen", [True, False])
def test_each_module_is_in_the_mode_that_it_was_in(is_frozen: bool) -> None:
    pace, model = lone()
    model.train()
    model[1].train(not is_frozen)
    modes: list[bool] = []
    pace.evaluate(lambda batch: (modes.append(model[1].training), count(batch))[1],
                  DataLoader(data(), batch_size=16))  # fmt: skip
    assert modes == [False, False]
    assert [one.training for one in model.modules()] == [True, True, not is_frozen, True]


def test_a_lone_worker_sees_the_batches_of_the_plain_loader_to_the_last_draw() -> None:
    pace, _ = lone()
    loader = DataLoader(data(), batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 2, True))
    torch.manual_seed(4)
    wanted, drawn = [one[1].tolist() for one in loader], torch.rand(())
    torch.manual_seed(4)
    seen: list[list[int]] = []
    pace.evaluate(lambda batch: (seen.append(batch[1].tolist()), count(batch))[1], loader)
    assert seen == wanted
    assert torch.equal(torch.rand(()), drawn)


def test_a_lone_worker_needs_no_model_and_takes_a_stream() -> None:
    pace = Pace(SoloExchange(), Context(device="cpu"))
    assert pace.evaluate(count, DataLoader(data(), batch_size=5)) == {"sum": (496.0, 32.0)}
    totals = pace.evaluate(lambda batch: {"n": (len(batch), 1)}, DataLoader(Stream(), batch_size=2))
    assert totals == {"n": (5.0, 3.0)}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.ones(3), r"a Tensor of shape \(3,\).*return \{\"loss\""),
        (0.5, r"a float.*return \{\"loss\""),
        (None, "a NoneType"),
        ({"loss": 0.25}, r"'loss': a float.*looks like a mean.*\* len\(targets\)"),
        ({"loss": torch.tensor(0.25)}, r"'loss': a Tensor of shape \(\).*looks like a mean"),
        ({"loss": torch.ones(2)}, r"'loss': a Tensor of shape \(2,\)"),
        ({"loss": (1.0,)}, "'loss': a tuple of 1"),
        ({"loss": (torch.ones(4), 4)}, r"sum of 'loss' is a Tensor of shape \(4,\).*\.sum\(\)"),
        ({"loss": (1.0, "4")}, "number of samples of 'loss' is a str"),
        ({"loss": (1.0, -1)}, "number of samples of 'loss' is -1"),
        ({"loss": (1.0, torch.tensor(7e4).half())}, "number of samples of 'loss' is inf"),
        ({3: (1.0, 1)}, "names must be strings, got 3"),
    ],
    ids=str,
)
def test_what_is_no_sum_and_number_is_answered_with_what_to_write(
    returned: Any, words: str
) -> None:
    pace, _ = lone()
    with pytest.raises(ConfigError, match=words):
        pace.evaluate(lambda batch: returned, DataLoader(data(), batch_size=16))


@pytest.mark.parametrize(
    "loader",
    [DataLoader(TensorDataset(torch.zeros(0, 1)), batch_size=4),
     DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=4, drop_last=True)],
    ids=["no samples", "no whole batch"],
)  # fmt: skip
def test_a_loader_that_gives_nothing_is_refused(loader: Any) -> None:
    pace, _ = lone()
    with pytest.raises(ConfigError, match="the loader to evaluate on gives no batch"):
        pace.evaluate(count, loader)


def test_what_is_no_loader_is_refused_by_its_type() -> None:
    pace, _ = lone()
    with pytest.raises(ConfigError, match="needs a DataLoader, got list"):
        pace.evaluate(count, [1, 2])  # type: ignore[arg-type]
