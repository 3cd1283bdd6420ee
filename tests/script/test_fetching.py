"""A loader's workers make the batches on every path, and live as long as the user asked.

Each sample says in which process it was made.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fetching
import forked
from paceline.data.loader import LeasedLoader
from paceline.events import Lease
from runs import assert_each_sample_once, nothing_left, run_script
from tiny import BATCH_SIZE, EPOCHS, NUM_SAMPLES

SCRIPT = Path(fetching.__file__)


def _run(case: str, folder: Path, **settings: Any) -> list[dict[str, Tensor]]:
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    if case != "accumulating":  # there the last mini-batches ride on a push that never comes
        assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    return [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


def _assert_given_once_an_epoch(results: list[dict[str, Tensor]]) -> None:
    for epoch in range(EPOCHS):
        rows = [row for result in results for row in result["rows"].tolist() if row[0] == epoch]
        assert Counter(index for _, index, _ in rows) == Counter(range(NUM_SAMPLES))


def _makers(result: dict[str, Tensor], epoch: int) -> set[int]:
    """The processes that made the samples of an epoch."""
    return {pid for number, _, pid in result["rows"].tolist() if number == epoch}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("two", {"path": "peers"}),
        ("one at a time", {"path": "peers"}),
        ("two", {"path": "peers", "protocol": "local-sgd:2"}),
        ("two", {"path": "store"}),
        ("two", {"workers": 1}),
    ],
    ids=str,
)
def test_loader_workers_make_every_batch(
    tmp_path: Path, case: str, settings: dict[str, Any]
) -> None:
    results = _run(case, tmp_path, **settings)
    _assert_given_once_an_epoch(results)
    num_loader_workers = 1 if case == "one at a time" else 2
    every = [_makers(result, epoch) for result in results for epoch in range(EPOCHS)]
    assert [len(makers) for makers in every] == [num_loader_workers] * len(every)
    assert len(set.union(*every)) == num_loader_workers * len(every), "made anew each epoch"
    assert not set.union(*every) & {int(result["own"]) for result in results}


ALONE = ("two", "accumulating")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of each case, from a script without a launcher."""
    folder = tmp_path_factory.mktemp("alone")
    with nothing_left():
        for case in ALONE:
            forked.run([SCRIPT, case, folder]).check_returncode()
    return folder


@pytest.mark.parametrize("case", ALONE)
def test_a_lone_script_has_loader_workers_too(alone: Path, case: str) -> None:
    result = torch.load(alone / f"{case}-0.pt")
    _assert_given_once_an_epoch([result])
    for epoch in range(EPOCHS):
        assert len(_makers(result, epoch)) == 2
        assert int(result["own"]) not in _makers(result, epoch)


@pytest.mark.parametrize("path", ["store", "peers"])
def test_persistent_workers_live_across_epochs(tmp_path: Path, path: str) -> None:
    results = _run("persistent", tmp_path, path=path)
    _assert_given_once_an_epoch(results)
    for result in results:
        assert _makers(result, 0) == _makers(result, 1)
        assert len(_makers(result, 0)) == 2


def test_an_empty_loader_continues_with_the_same_workers() -> None:
    """And gives each lease its own batch."""
    loader: Any = DataLoader(fetching.Signed(), BATCH_SIZE, num_workers=2)
    leased = LeasedLoader(loader, 0, torch.device("cpu"))
    leased.order.draw(0)
    leases = [Lease(n, 0, n * BATCH_SIZE, (n + 1) * BATCH_SIZE) for n in range(4)]
    makers = set()
    for part in (leases[:2], leases[2:]):
        leased.reserve(part)
        for lease in part:
            _, _, index, pid, _ = leased.fetch(lease)
            assert index.tolist() == list(range(lease.start, lease.stop))
            makers.update(pid.tolist())
    leased.end_epoch()
    assert len(makers) == 2
    assert os.getpid() not in makers


def test_peers_that_switch_to_the_store_get_each_sample_once(tmp_path: Path) -> None:
    """Accumulation makes them leave the rounds for which mini-batches were prefetched."""
    _assert_given_once_an_epoch(_run("accumulating", tmp_path, path="peers"))
