"""Loops without a loader: numbers drawn once, alike in all workers, up to a version."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import numbered
from meanwhile import stopped_at
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from reference import differ
from runs import Run, run_script

CLOSE = 1e-6
Say = Callable[[str], tuple[int, str, str]]
SCRIPT = Path(numbered.__file__)


def _run(
    folder: Path, *updates: int, slow_s: float = 0.0, **settings: Any
) -> tuple[Run, list[dict[str, Tensor]]]:
    """A run, and each worker's result."""
    words = [str(folder), str(slow_s), *map(str, updates)]
    run = run_script(SCRIPT, folder, *words, **{"workers": 2, **settings})
    results = sorted(folder.glob("result-*.pt"))
    return run, [torch.load(path) for path in results]


def alone(seed: int = 5) -> Pace:
    return Pace(SoloExchange(), Context(seed=seed))


def spared(context: Context) -> Pace:
    """A pace with a prepared model and no loader."""
    pace = Pace(SoloExchange(), context)
    pace.prepare(*numbered.make())
    return pace


def test_a_lone_worker_matches_plain_pytorch_bit_for_bit() -> None:
    result = numbered.train(alone(), [7])
    assert differ(result, numbered.twin(5, 7, 1)) == 0.0


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "where", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}], ids=str
)
def test_full_sync_matches_plain_pytorch(
    tmp_path: Path, workers: int, where: dict[str, str]
) -> None:
    _, results = _run(tmp_path, 12, workers=workers, protocol="full-sync", seed=5, **where)
    assert len(results) == workers
    for result in results:
        assert differ(result, numbered.twin(5, 12, workers)) < CLOSE


def test_each_loop_over_a_loader_cuts_only_its_own_last_pass() -> None:
    pace, model = alone(), nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(10.0).reshape(10, 1)), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    seen = []
    for until in (5, 15, 15, 38):
        for (inputs,) in pace.updates(until, loader):
            with pace.step():
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
            seen.append(int(inputs))
    every = [*range(10)]
    assert seen == [*every[:5], *every, *every, *every, *every[:3]]


def test_repeated_calls_continue_the_count(tmp_path: Path) -> None:
    _, results = _run(tmp_path, 4, 4, 12, engine="inline", protocol="full-sync", seed=5)
    assert differ(results[0], numbered.twin(5, 12, 2)) < CLOSE


@pytest.mark.parametrize(
    ("protocol", "a_version"),
    [("full-sync", 3), ("k-sync:2", 2), ("k-batch-sync:2", 2), ("k-async:2", 2),
     ("k-batch-async:2", 2), ("async", 1), ("local-sgd:4", 12), ("stale-synchronous:1", 1)],
)  # fmt: skip
def test_every_protocol_uses_each_number_once(
    tmp_path: Path, protocol: str, a_version: int
) -> None:
    run, results = _run(tmp_path, 10, 15, engine="inline", workers=3, protocol=protocol)
    assert run.used() == [Counter(range(n * a_version)) for n in (10, 5)]
    assert run.summary.updates == 15
    assert all(differ(result, other) < CLOSE for result, other in pairwise(results))


@pytest.mark.parametrize("protocol", ["adaptive", "adaptive-local:4"])
def test_the_count_is_exact_where_an_updates_size_changes(tmp_path: Path, protocol: str) -> None:
    run, _ = _run(tmp_path, 10, 31, engine="inline", workers=3, protocol=protocol)
    assert run.summary.updates == 31
    assert all(set(used.values()) == {1} for used in run.used())


def test_skipped_updates_are_replaced_with_new_numbers() -> None:
    pace = alone()
    model, optimizer = pace.prepare(*numbered.make())
    drawn = []
    for number in pace.updates(6):
        drawn.append(number)
        with pace.step():
            if number % 3 != 1:
                numbered.loss_of(model).backward()
                optimizer.step()
    assert drawn == [*range(6), 6, 7, 8]
    assert pace.version == 6


def test_a_death_neither_loses_nor_repeats_a_number(tmp_path: Path) -> None:
    run, _ = _run(
        tmp_path, 40, slow_s=0.01, protocol="full-sync", path="store", respawn=True, seed=5,
        fault=("kill worker 1 at update 9", "kill worker 0 at update 25"),
    )  # fmt: skip
    assert len(run.left) == 2
    assert run.used() == [Counter(range(80))]
    assert differ(torch.load(tmp_path / "result-0.pt"), numbered.twin(5, 40, 2)) < CLOSE


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_resumed_run_ends_as_one_that_never_stopped(say: Say, tmp_path: Path, path: str) -> None:
    words = f"launch --workers 2 --device cpu --seed 5 --run-dir {tmp_path / 'run'}"
    with stopped_at(tmp_path / "is-there"):
        code, _, err = say(f"{words} --path {path} {SCRIPT} {tmp_path} 0.02 5 60")
    assert code == 143, err
    code, _, err = say(f"launch --workers 2 --resume {tmp_path / 'run'} {SCRIPT} {tmp_path} 0 5 60")
    assert code == 0, err
    result = torch.load(tmp_path / "result-0.pt")
    assert differ(result, numbered.twin(5, 60, 2)) < CLOSE


def test_the_plan_explains_a_batch_and_the_end(say: Say, tmp_path: Path) -> None:
    words = f"launch --workers 2 --device cpu --run-dir {tmp_path / 'run'}"
    code, out, err = say(f"{words} {SCRIPT} {tmp_path} 0 3")
    assert code == 0, err
    assert "no loader: a batch is what a worker draws" in out
    assert "until the script ends" in out
    assert "updates           3, " in out


def test_random_draws_are_a_function_of_seed_and_number() -> None:
    def drawn(seed: int) -> list[tuple[float, float]]:
        pace, rows = alone(seed), []
        pace.prepare(*(parts := numbered.make()))
        for _ in pace.updates(3):
            with pace.step():
                rows.append((random.random(), float(torch.rand(1))))
                parts[0](torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                parts[1].step()
        return rows

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_turn_is_counted_once_where_each_step_is_a_version() -> None:
    pace = alone()
    first, second = numbered.make(), numbered.make()
    pace.prepare(*first, *second)
    seen = []
    for _ in pace.updates(4):
        seen.append((pace.turn, pace.version))
        with pace.step():
            for model, optimizer in (first, second):
                optimizer.zero_grad()
                numbered.loss_of(model).backward()
                optimizer.step()
    assert seen == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_a_pass_without_a_step_is_refused_and_not_repeated_forever() -> None:
    pace = alone()
    pace.prepare(*numbered.make())
    with pytest.raises(ConfigError, match="made no update"):
        for _ in pace.updates(4):
            pass


def test_unsupported_uses_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"comes after pace\.prepare"):
        alone().updates(4)
    pace = alone()
    pace.prepare(*numbered.make())
    with pytest.raises(ConfigError, match="--epochs 3: this script counts updates"):
        spared(Context(epochs=3)).updates(4)
    for odd in (-1, 2.5, "many", True):
        with pytest.raises(ConfigError, match="takes a number of updates"):
            pace.updates(odd)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="and prepare\\(\\) got none"):
        pace.epochs(3)
    with pytest.raises(ConfigError, match="was given a loader, and prepare"):
        pace.updates(4, DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2))  # type: ignore[arg-type]
    pace = alone()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2))
    with pytest.raises(ConfigError, match="for batch in pace"):
        pace.updates(4)
    with pytest.raises(ConfigError, match=r"pace\.version says how far training is"):
        _ = pace.turn


OUTSIDE = """
import torch, paceline

pace = paceline.connect()
model = torch.nn.Linear(3, 1)
model, optimizer = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for number in range(3):
    with pace.step():
        model(torch.ones(3)).sum().backward()
        optimizer.step()
"""


def test_a_step_outside_the_loop_is_refused_with_advice(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OUTSIDE)
    code, out, err = say(
        f"launch --workers 2 --device cpu --run-dir {tmp_path / 'run'} {tmp_path / 'train.py'}"
    )
    assert code != 0
    assert "for which prepare() got no loader (for number in pace.updates(n))" in out + err
    assert "Traceback" not in out + err


def test_a_script_that_ends_by_sys_exit_is_saved(say: Say, tmp_path: Path) -> None:
    text = SCRIPT.read_text() + "    sys.exit(0)\n"
    (tmp_path / "numbered.py").write_text(text)
    words = f"--run-dir {tmp_path / 'run'} {tmp_path / 'numbered.py'} {tmp_path} 0"
    code, _, err = say(f"launch --workers 2 --device cpu {words} 5")
    assert code == 0, err
    code, _, err = say(f"launch --workers 2 --resume {words.removeprefix('--run-dir ')} 9")
    assert code == 0, err
    assert differ(torch.load(tmp_path / "result-0.pt"), numbered.twin(0, 9, 2)) < CLOSE
