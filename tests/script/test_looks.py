"""Passes over the prepared loader that train nothing, or that another thread makes."""

import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.trace.records import Rerouted
from runs import Run, run_script

SCRIPT = """
import queue, threading, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)

def train(batches):
    for inputs, targets in batches:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

"""
WAYS = [
    {"protocol": "full-sync", "path": "peers"},
    {"protocol": "full-sync", "engine": "inline"},
    {"protocol": "async", "path": "store"},
    {"protocol": "local-sgd:2", "path": "peers"},
]
EACH = pytest.mark.parametrize("way", WAYS, ids=str)


def run_of(rest: str, folder: Path, **settings: object) -> Run:
    (folder / "train.py").write_text(SCRIPT + rest)
    return run_script(folder / "train.py", folder, workers=2, **settings)


COUNTING = """
counts = torch.zeros(2)
for _, targets in BATCHES:
    counts += torch.bincount(targets, minlength=2)
for _ in pace.epochs(2):
    train(loader)
assert counts.sum() == 32
"""


@EACH
def test_a_pass_that_only_reads_is_refused(tmp_path: Path, way: dict[str, object]) -> None:
    says = r"a whole pass over the prepared loader made no step.* loader.plain"
    with pytest.raises(ConfigError, match=says):
        run_of(COUNTING.replace("BATCHES", "loader"), tmp_path, **way)


class Drawing(Dataset[float]):
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return random.random() + float(numpy.random.rand()) + float(torch.rand(()))


def test_repeating_an_earlier_pass_moves_no_generator() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)

    model = nn.Linear(1, 1)
    parts = model, SGD(model.parameters(), lr=0.1), DataLoader(Drawing(), shuffle=True)
    _, _, loader = Pace(SoloExchange(), Context()).prepare(*parts)
    seed()
    expected = drawn()
    seed()
    assert len(list(loader._look_again())) == 4
    assert drawn() == expected


@EACH
def test_the_plain_loader_has_all_samples(tmp_path: Path, way: dict[str, object]) -> None:
    run = run_of(COUNTING.replace("BATCHES", "loader.plain"), tmp_path, **way)
    assert run.num_epochs_ended() == 2


def test_a_lone_worker_may_read_all_samples_in_a_pass(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + COUNTING.replace("BATCHES", "loader"))
    run_script(tmp_path / "train.py", tmp_path, workers=1, protocol="full-sync")


FISHER = """
train(loader)
fisher = torch.zeros_like(model.weight)
for inputs, targets in loader:
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    fisher += model.weight.grad ** 2
train(loader)
"""


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=str)
def test_a_pass_whose_gradients_no_step_uses_is_refused(
    tmp_path: Path, way: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="a whole pass over the prepared loader made no step"):
        run_of(FISHER, tmp_path, **way)


OVER_EPOCHS = """
step = 0
for _ in range(5):
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        step += 1
        if step % 12 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("way", [WAYS[1], WAYS[2]], ids=str)
def test_gradients_accumulated_over_passes_are_allowed(
    tmp_path: Path, way: dict[str, object]
) -> None:
    """Without a block, and with passes in which no worker reaches a step."""
    assert run_of(OVER_EPOCHS, tmp_path, **way).summary.updates > 0


ONE_READS = """
train(loader)
if pace.is_main:
    for inputs, targets in loader:
        pass
else:
    train(loader)
train(loader)
"""


@pytest.mark.parametrize("way", [WAYS[1], WAYS[2]], ids=str)
def test_a_pass_that_only_one_worker_reads_is_noted(tmp_path: Path, way: dict[str, object]) -> None:
    try:
        run = run_of(ONE_READS, tmp_path, **way)
    except ConfigError as error:  # under async worker 0 may read all of it before the other begins
        if way["protocol"] != "async" or "prepared loader made no step" not in str(error):
            raise
        return
    assert any(note.startswith("worker 0 went through its part of a pass") for note in run.notes)


LOOKS = """
for epoch in EPOCHS:
    train(loader)
    if pace.is_main and epoch == 1:
        next(iter(loader))
"""


@pytest.mark.parametrize("epochs", ["range(5)", "pace.epochs(5)"])
@pytest.mark.parametrize("way", [*WAYS[:3]], ids=str)
def test_a_batch_taken_later_by_one_worker_is_refused(
    tmp_path: Path, way: dict[str, object], epochs: str
) -> None:
    words = r"worker 0 (took a batch of|begins a pass) .*next\(iter\(loader.plain"
    with pytest.raises(ConfigError, match=words):
        run_of(LOOKS.replace("EPOCHS", epochs), tmp_path, **way)


@pytest.mark.parametrize("way", [*WAYS[:3]], ids=str)
def test_a_batch_taken_later_by_all_workers_is_allowed(
    tmp_path: Path, way: dict[str, object]
) -> None:
    run = run_of(
        LOOKS.replace("EPOCHS", "range(3)").replace("pace.is_main and", ""), tmp_path, **way
    )
    assert run.num_epochs_ended() == 4


LEAVES_FIRST = """
steps = 0
while steps < 6:
    for inputs, targets in loader:
        if steps >= 6:
            break
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        steps += 1
for inputs, targets in loader:
    break
"""


@pytest.mark.parametrize("way", [*WAYS[:3]], ids=str)
def test_leaving_the_loop_when_done_is_allowed(tmp_path: Path, way: dict[str, object]) -> None:
    run_of(LEAVES_FIRST, tmp_path, **way)


def paths_of(run: Run) -> list[str]:
    return [record.path for record in run.records if isinstance(record, Rerouted)]


LOOKED_AT = """
next(iter(loader))
for _ in range(2):
    train(loader)
"""
LEFT_OUT = """
for epoch in range(4):
    for number, (inputs, targets) in enumerate(loader):
        if epoch == 0 and number == 2:
            continue
        train([(inputs, targets)])
"""
ACCUMULATED = """
for epoch in range(3):
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            nn.functional.cross_entropy(model(inputs), targets).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rest", "paths"),
    [
        (LOOKED_AT, ["peers", "store", "peers"]),
        (LEFT_OUT, ["peers", "store", "peers"]),
        (ACCUMULATED, ["peers", "store"]),
    ],
    ids=["looked at", "left out", "accumulated"],
)
def test_peers_return_from_the_store_when_nothing_needs_it(
    tmp_path: Path, rest: str, paths: list[str]
) -> None:
    assert paths_of(run_of(rest, tmp_path, protocol="full-sync", path="peers")) == paths


PREFETCHED = """
def fetched(batches):
    ready = queue.Queue(1)

    def fetch():
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fetch, daemon=True).start()
    return iter(ready.get, None)

for _ in range(3):
    train(fetched(loader))
"""


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=str)
def test_a_loader_iterated_by_a_foreign_thread_is_refused(
    tmp_path: Path, way: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="is iterated by another thread than the one"):
        run_of(PREFETCHED, tmp_path, **way)


ELSEWHERE = """
def work():
    for _ in range(2):
        train(loader)

worker = threading.Thread(target=work)
worker.start()
worker.join()

from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    for batch in loader:
        pool.submit(train, [batch]).result()
"""


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=str)
def test_a_loop_or_its_steps_may_run_in_another_thread(
    tmp_path: Path, way: dict[str, object]
) -> None:
    assert run_of(ELSEWHERE, tmp_path, **way).num_epochs_ended() == 3
