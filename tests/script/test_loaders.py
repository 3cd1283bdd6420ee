"""The user's loader is leased batch by batch: every sample once, in the user's own batches.

Each case is one loop, run by Paceline and plainly; what each step was given is compared with what
the trace says was granted.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loops
from paceline.errors import ConfigError
from reference import differ
from runs import Run, assert_each_sample_once, leases_of, run_script
from tiny import EPOCHS, NUM_SAMPLES

CLOSE = 1e-6
BEGUN_ANEW = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    pace = paceline.connect()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        TensorDataset(torch.ones(64, 4)), batch_size=8, num_workers=1,
        multiprocessing_context="{method}",
    )
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(1):
        for (x,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
"""
ASSIGNED = """
import sys, torch, paceline
from torch.utils.data import DataLoader
from paceline.data.arrays import ArrayDataset, collate_batch

pace = paceline.connect()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = ArrayDataset(torch.ones(16, 4), torch.ones(16))
loader = DataLoader(data, batch_size=8, collate_fn=collate_batch)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    if epoch == 1 and sys.argv[1] == "collate":
        loader.collate_fn = lambda samples: [2 * one for one in collate_batch(samples)]
    elif epoch == 1:
        loader.batch_sampler.batch_size = 16
    for x, y in loader:
        assert x.unique().tolist() == [1.0 + epoch], x
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""
SCRIPT = Path(loops.__file__)
ANYWHERE = [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}]


def _run(case: str, folder: Path, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    folder.mkdir(exist_ok=True)
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    return run, [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


def _given(results: list[dict[str, Tensor]]) -> Counter[int]:
    """How often each sample was given to any worker."""
    return Counter(int(index) for result in results for index in result["given"])


def _model(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in result.items() if name not in ("given", "lengths")}


@pytest.mark.parametrize("protocol", ["full-sync", "async"])
def test_a_collate_function_set_between_epochs_is_used(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "train.py").write_text(ASSIGNED)
    run = run_script(tmp_path / "train.py", tmp_path, "collate", workers=2, protocol=protocol)
    assert run.used() == [Counter(range(16))] * 2


def test_a_batch_size_changed_after_prepare_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASSIGNED)
    with pytest.raises(ConfigError, match=r"another batch_size or drop_last after prepare"):
        run_script(tmp_path / "train.py", tmp_path, "size", workers=2, protocol="full-sync")


@pytest.mark.parametrize("where", [{"path": "store"}, {"path": "peers"}], ids=str)
@pytest.mark.parametrize("case", ["one loader worker", "two loader workers"])
def test_loader_workers_fetch_the_granted_batches(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    run, results = _run(case, tmp_path, **where)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert _given(results) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    plain = _model(loops.CASES["recording"](loops.Plain()))
    for result in results:
        assert differ(_model(result), plain) < CLOSE


@pytest.mark.parametrize("protocol", ["k-sync:1", "k-batch-async:3"])
@pytest.mark.parametrize("case", ["recording", "two loader workers"])
def test_each_step_gets_the_samples_of_its_lease(tmp_path: Path, case: str, protocol: str) -> None:
    """Also after cancellations, when a prefetched batch belongs to another worker."""
    run, results = _run(case, tmp_path, protocol=protocol, slow=("1=3x",), delay=("exp:2ms",))
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    granted = leases_of(run.every_order())
    for member, result in enumerate(results):
        leases = [granted[key][0] for key in sorted(granted) if key[0] == member]
        wanted = [index for lease in leases for index in range(lease.start, lease.stop)]
        assert result["given"].tolist() == wanted


@pytest.mark.parametrize("where", ANYWHERE, ids=str)
def test_a_custom_batch_sampler_makes_the_updates(tmp_path: Path, where: dict[str, str]) -> None:
    run, results = _run("own batches", tmp_path, **where)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    sizes = [push.num_samples for push in run.pushes]
    assert [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)] == [5, 10, 15, 20, 10] * EPOCHS
    plain = _model(loops.CASES["own batches"](loops.Plain()))
    for result in results:
        assert differ(_model(result), plain) < CLOSE


def test_a_weighted_sampler_is_drawn_once_an_epoch_and_alike_everywhere(tmp_path: Path) -> None:
    run, results = _run("weighted", tmp_path, engine="inline")
    assert_each_sample_once(run, 40, EPOCHS)
    assert sum(_given(results).values()) == 40 * EPOCHS
    assert max(_given(results).values()) > EPOCHS, "with replacement some come more often"
    again, same = _run("weighted", tmp_path / "again", engine="inline", workers=1)
    assert _given(same) == _given(results)
    assert again.summary.updates == run.summary.updates


def test_a_subset_sampler_gives_its_subset_once_an_epoch(tmp_path: Path) -> None:
    run, results = _run("subset", tmp_path, path="peers")
    assert_each_sample_once(run, 40, EPOCHS)
    assert _given(results) == dict.fromkeys(range(10, 50), EPOCHS)


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_a_dropped_remainder_is_never_leased(tmp_path: Path, where: dict[str, str]) -> None:
    run, results = _run("drop last", tmp_path, **where)
    assert_each_sample_once(run, 56, EPOCHS)
    assert _given(results) == dict.fromkeys(range(56), EPOCHS)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_loader_workers_may_use_any_start_method(tmp_path: Path, method: str) -> None:
    """Not only fork: they must know the process that they belong to."""
    (tmp_path / "train.py").write_text(BEGUN_ANEW.format(method=method))
    run = run_script(tmp_path / "train.py", tmp_path, workers=2)
    assert_each_sample_once(run, 64, 1)
