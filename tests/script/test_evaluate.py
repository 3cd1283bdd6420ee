"""``pace.evaluate`` counts the loader's samples, whichever worker does; the model is unchanged."""

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


def totals_of(
    folder: Path, patch: pytest.MonkeyPatch, other: str, **options: Any
) -> list[list[Any]]:
    """The totals that each worker got, evaluation by evaluation."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    patch.chdir(folder)
    words = {"before": "", "after": "evaluate()", "left": AS_IT_WAS, "fn": "fn"}
    settings = {k: v for k, v in options.items() if k not in words}
    words = {k: options.get(k, v) for k, v in words.items()}
    (folder / "train.py").write_text(SCRIPT.format(other=other, **words))
    settings = {"workers": 2, "engine": "inline", **settings}
    run_script(folder / "train.py", folder, **settings)
    files = [folder / f"totals-{worker}" for worker in range(settings["workers"])]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


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
def test_evaluate_counts_every_sample_of_the_loader_once(
    which: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, wanted = SUBSETS[which]
    for totals in totals_of(tmp_path, monkeypatch, other, workers=workers, left=""):
        for evaluation in totals:
            assert [*evaluation["acc"], evaluation["batches"][0]] == wanted
        assert len(totals) == 2


def test_random_samples_do_not_depend_on_the_evaluating_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in processes, where chance decides which worker does what, and at another version."""
    loader = "DataLoader(Noisy(), batch_size=2)"
    first, second = totals_of(tmp_path, monkeypatch, loader)
    assert first == second
    assert first[0] != first[1]
    assert totals_of(tmp_path, monkeypatch, loader, engine="local") == [first, first]


def test_loader_workers_open_files_and_draw_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process it never is."""
    loader = "DataLoader(Opened(), batch_size=2, num_workers=2, worker_init_fn=open_it)"
    left = f"{AS_IT_WAS}; assert other.dataset.file is None"
    results = totals_of(tmp_path, monkeypatch, loader, engine="local", left=left)
    assert [result["acc"] for result in results[0]] == [[496, 32]] * 2
    assert totals_of(tmp_path, monkeypatch, loader, engine="local", left=left) == results
    assert results[0] == results[1]


def test_randomly_drawn_samples_are_the_same_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "DataLoader(data, 4, sampler=RandomSampler(data, num_samples=8))"
    first, second = totals_of(tmp_path, monkeypatch, other, engine="local")
    assert first == second
    assert first[0]["acc"][1] == 8


def test_workers_that_draw_different_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"workers evaluate different samples.*its own random"):
        totals_of(tmp_path, monkeypatch, "DataLoader(data, 4, sampler=Own())")


def test_a_distributed_sampler_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "DataLoader(data, 4, sampler=DistributedSampler(data, pace.num_workers, pace.worker))"
    with pytest.raises(ConfigError, match=r"DistributedSampler.*leave it out: Paceline shares"):
        totals_of(tmp_path, monkeypatch, other)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prepared_loader_is_evaluated_like_a_plain_one(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for totals in totals_of(
        tmp_path, monkeypatch, "loader", after="evaluate(loader)", workers=workers, left=""
    ):
        assert [evaluation["acc"] for evaluation in totals] == [[496, 32]] * 2


def test_inside_an_epoch_each_worker_counts_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation leaves the random state of the step unchanged."""
    before = "step = optimizer.step\ndef evaluated():\n    state = torch.get_rng_state()\n    "
    before += "evaluate()\n    assert torch.equal(torch.get_rng_state(), state)"
    script = SCRIPT.replace("zero_grad()\n", "zero_grad()\n            evaluated()\n")
    monkeypatch.setitem(globals(), "SCRIPT", script)
    other = "DataLoader(Noisy(), batch_size=10, shuffle=True, drop_last=True)"
    for totals in totals_of(tmp_path, monkeypatch, other, before=before, after=""):
        assert len(totals) == 8
        assert {evaluation["acc"][1] for evaluation in totals} == {30}


def test_a_stream_is_evaluated_by_a_lone_worker_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "DataLoader(Stream(), batch_size=2)"
    fn = 'lambda batch: {"acc": (batch.sum(), len(batch))}'
    (totals,) = totals_of(tmp_path, monkeypatch, other, fn=fn, workers=1, left="")
    assert totals == [{"acc": [10, 5]}] * 2
    with pytest.raises(ConfigError, match=r"Stream is an iterable data set.*one worker"):
        totals_of(tmp_path, monkeypatch, other, fn=fn)


def test_before_prepare_only_a_lone_worker_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SUBSETS["drop_last"][0]
    (totals,) = totals_of(tmp_path, monkeypatch, other, before="evaluate()", workers=1, left="")
    assert [evaluation["acc"] for evaluation in totals] == [[435, 30]] * 3
    with pytest.raises(ConfigError, match=r"pace.evaluate\(\) was called before pace.prepare\(\)"):
        totals_of(tmp_path, monkeypatch, other, before="evaluate()")


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
def test_a_layer_that_merges_for_evaluation_still_trains_afterwards(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What merging rounds is not taken for a change by the script."""
    behind = "assert model[0].training and not model[0].merged"
    fn = "lambda batch: fn(batch) if model[0].merged else None"
    totals_of(tmp_path, monkeypatch, "loader", before=MERGING, fn=fn, left=behind, workers=workers)


# -- one worker under plain python ---------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def data() -> "TensorDataset":
    return TensorDataset(torch.arange(32.0).view(32, 1), torch.arange(32))


def lone_pace() -> tuple[Pace, nn.Sequential]:
    pace = Pace(SoloExchange(), Context(device="cpu"))
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace.prepare(model, optimizer, DataLoader(data(), batch_size=8))
    return pace, model


def count(batch: Any) -> dict[str, tuple[Any, Any]]:
    return {"sum": (batch[1].sum(), len(batch[1]))}


@pytest.mark.parametrize("is_frozen", [True, False])
def test_evaluation_restores_the_mode_of_each_module(is_frozen: bool) -> None:
    pace, model = lone_pace()
    model.train()
    model[1].train(not is_frozen)
    modes: list[bool] = []
    pace.evaluate(lambda batch: (modes.append(model[1].training), count(batch))[1],
                  DataLoader(data(), batch_size=16))  # fmt: skip
    assert modes == [False, False]
    assert [module.training for module in model.modules()] == [True, True, not is_frozen, True]


def test_a_lone_worker_evaluates_the_plain_loaders_batches_and_draws() -> None:
    pace, _ = lone_pace()
    loader = DataLoader(data(), batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 2, True))
    torch.manual_seed(4)
    wanted, drawn = [one[1].tolist() for one in loader], torch.rand(())
    torch.manual_seed(4)
    seen: list[list[int]] = []
    pace.evaluate(lambda batch: (seen.append(batch[1].tolist()), count(batch))[1], loader)
    assert seen == wanted
    assert torch.equal(torch.rand(()), drawn)


def test_a_lone_worker_needs_no_model_and_accepts_a_stream() -> None:
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
def test_a_result_that_is_not_sum_and_count_is_refused_with_advice(
    returned: Any, words: str
) -> None:
    pace, _ = lone_pace()
    with pytest.raises(ConfigError, match=words):
        pace.evaluate(lambda batch: returned, DataLoader(data(), batch_size=16))


@pytest.mark.parametrize(
    "loader",
    [DataLoader(TensorDataset(torch.zeros(0, 1)), batch_size=4),
     DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=4, drop_last=True)],
    ids=["no samples", "no whole batch"],
)  # fmt: skip
def test_an_empty_loader_is_refused(loader: Any) -> None:
    pace, _ = lone_pace()
    with pytest.raises(ConfigError, match="the loader to evaluate on gives no batch"):
        pace.evaluate(count, loader)


def test_an_object_that_is_not_a_loader_is_refused_by_type() -> None:
    pace, _ = lone_pace()
    with pytest.raises(ConfigError, match="needs a DataLoader, got list"):
        pace.evaluate(count, [1, 2])  # type: ignore[arg-type]
