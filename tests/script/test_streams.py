"""Loops over a stream: equal to plain PyTorch, each mini-batch once, whichever worker dies."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import streamed
from meanwhile import stopped_at
from paceline.context import Context
from paceline.errors import ConfigError, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.protocols import PROTOCOLS
from paceline.script.worker import Pace
from reference import differ
from runs import Run, run_script

CLOSE = 1e-6
LEFT = "peers go on through the store"
Say = Callable[[str], tuple[int, str, str]]
SCRIPT = Path(streamed.__file__)


def _run(folder: Path, options: dict[str, Any], **settings: Any) -> tuple[Run, dict[str, Tensor]]:
    """A run and its first worker's result; all workers have the same."""
    chosen = {"workers": 2, "protocol": "full-sync", "seed": 5, **settings}
    run = run_script(SCRIPT, folder, str(folder), json.dumps(options), **chosen)
    first, *others = [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]
    assert all(differ(first, other) < CLOSE for other in others)
    return run, first


def alone(**settings: Any) -> Pace:
    return Pace(SoloExchange(), Context(seed=5, **settings))


# -- equal to plain PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(num_workers: int) -> None:
    options = {"size": 22, "epochs": 2, "num_workers": num_workers}
    loader = streamed.loader_of(options)
    torch.manual_seed(9)
    model, optimizer = streamed.make()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            streamed.loss_of(model, batch).backward()
            optimizer.step()
    plain = streamed.gather(model)
    torch.manual_seed(9)
    assert differ(streamed.train(alone(), loader, options), plain) == 0.0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_full_sync_matches_plain_pytorch(tmp_path: Path, workers: int) -> None:
    """The last mini-batch has fewer samples, and the last update fewer mini-batches."""
    options = {"size": 45, "batch_size": 8, "epochs": 2}
    run, result = _run(tmp_path, options, workers=workers, engine="inline")
    assert differ(result, streamed.twin(5, 2, workers, 45, 8)) < CLOSE
    assert run.summary.samples == 90
    assert run.summary.dropped_samples == 0


def test_full_sync_of_processes_matches_plain_pytorch(tmp_path: Path) -> None:
    run, result = _run(tmp_path, {"size": 45, "batch_size": 8, "epochs": 2})
    assert differ(result, streamed.twin(5, 2, 2, 45, 8)) < CLOSE
    assert run.path == "peers"
    assert sum(note == LEFT for note in run.notes) == 2  # at the end of each pass
    assert not run.summary.could_try


def test_the_store_path_matches_plain_pytorch_on_request(tmp_path: Path) -> None:
    options = {"size": 45, "batch_size": 8, "epochs": 2}
    run, result = _run(tmp_path, options, path="store")
    assert differ(result, streamed.twin(5, 2, 2, 45, 8)) < CLOSE
    assert LEFT not in run.notes


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers_share_the_data_set(tmp_path: Path, num_workers: int) -> None:
    options = {"size": 24, "batch_size": 4, "num_workers": num_workers, "kind": "dict"}
    run, _ = _run(tmp_path, options, engine="inline")
    assert run.used() == [Counter(range(12))]
    assert run.summary.samples == 24


def test_an_incomplete_batch_is_dropped_as_the_loader_asks(tmp_path: Path) -> None:
    options = {"size": 23, "batch_size": 4, "drop_last": True}
    run, result = _run(tmp_path, options, engine="inline")
    assert run.used() == [Counter(range(10))]
    assert differ(result, streamed.twin(5, 1, 2, 20, 4)) < CLOSE


def test_an_update_count_ends_an_endless_stream(tmp_path: Path) -> None:
    run, _ = _run(tmp_path, {"size": -1, "updates": [7, 12]}, engine="inline")
    assert run.used() == [Counter(range(14)), Counter(range(10))]
    assert run.summary.updates == 12


def test_an_update_count_repeats_the_stream(tmp_path: Path) -> None:
    run, _ = _run(tmp_path, {"size": 12, "updates": [8]}, engine="inline")
    assert run.used() == [Counter(range(6)), Counter(range(6)), Counter(range(4))]


# -- each mini-batch once --------------------------------------------------------------------------

SPELLINGS = [
    "full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2",
    "stale-synchronous:1", "local-sgd:3", "adaptive", "adaptive-local:4",
    "post-local-sgd:3,4",
]  # fmt: skip


@pytest.mark.parametrize("protocol", SPELLINGS)
def test_every_protocol_uses_each_mini_batch_once(tmp_path: Path, protocol: str) -> None:
    run, _ = _run(
        tmp_path, {"size": 41, "batch_size": 6}, engine="inline", workers=3, protocol=protocol
    )
    used = run.used()[0]
    assert set(used.values()) == {1}
    assert sorted(used) == list(range(len(used)))
    assert run.summary.samples == 41
    assert run.summary.dropped_samples == 0
    assert {text.partition(":")[0] for text in SPELLINGS} == set(PROTOCOLS)


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:3", "post-local-sgd:3,4"])
def test_peers_use_each_mini_batch_once(tmp_path: Path, protocol: str) -> None:
    run, _ = _run(tmp_path, {"size": 120}, path="peers", protocol=protocol)
    assert run.used() == [Counter(range(60))]
    assert run.summary.samples == 120


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-async:2"])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_deaths_neither_lose_nor_repeat_a_mini_batch(
    tmp_path: Path, protocol: str, is_stateful: bool
) -> None:
    """Of the reading worker and of another."""
    options = {"size": 160, "step_s": 0.01, "is_stateful": is_stateful}
    run, result = _run(
        tmp_path, options, protocol=protocol, respawn=True,
        fault=("kill worker 0 at update 6", "kill worker 1 at update 20"),
    )  # fmt: skip
    assert len(run.left) == 2
    assert run.used() == [Counter(range(80))]
    if protocol == "full-sync":
        assert differ(result, streamed.twin(5, 1, 2, 160, 4)) < CLOSE


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_resumed_run_ends_as_one_that_never_stopped(
    say: Say, tmp_path: Path, is_stateful: bool
) -> None:
    options = {
        "size": 240, "is_stateful": is_stateful, "counts": True, "step_s": 0.03, "say_at": 24
    }  # fmt: skip
    words = "launch --workers 2 --device cpu"
    with stopped_at(tmp_path / "is-there"):
        where = f"--seed 5 --run-dir {tmp_path / 'run'}"
        code, _, err = say(f"{words} {where} {SCRIPT} {tmp_path} '{json.dumps(options)}'")
    assert code == 143, err
    saved = json.loads(max((tmp_path / "run" / "checkpoints").glob("*/run.json")).read_text())
    assert bool(saved["stream"]["state"]) == is_stateful
    (tmp_path / "read").unlink()
    options["step_s"] = 0.0
    code, _, err = say(
        f"{words} --resume {tmp_path / 'run'} {SCRIPT} {tmp_path} '{json.dumps(options)}'"
    )
    assert code == 0, err
    result = torch.load(tmp_path / "result-0.pt")
    assert differ(result, streamed.twin(5, 1, 2, 240, 4)) < CLOSE
    num_read = (tmp_path / "read").stat().st_size
    first = saved["stream"]["number"] if is_stateful else 0
    assert num_read == 240 - 2 * first


def test_a_run_cannot_be_resumed_with_another_mini_batch(say: Say, tmp_path: Path) -> None:
    options = json.dumps({"size": 80, "updates": [4], "batch_size": 8})
    words = "launch --device cpu"
    code, _, err = say(
        f"{words} --workers 2 --run-dir {tmp_path / 'run'} {SCRIPT} {tmp_path} '{options}'"
    )
    assert code == 0, err
    code, _, err = say(
        f"{words} --workers 4 --resume {tmp_path / 'run'} {SCRIPT} {tmp_path} '{options}'"
    )
    assert code != 0
    assert "cannot be resumed with another mini-batch: it has 4, this run 2" in err


def test_reading_ahead_is_bounded(tmp_path: Path) -> None:
    options = {"size": -1, "updates": [5], "counts": True, "batch_size": 4}
    _run(tmp_path, options, engine="inline")
    # Of 2 samples each: 10 that were used, 6 ahead and one in hand, and one that each member
    # asks for before it is granted.
    assert (tmp_path / "read").stat().st_size <= 2 * (10 + 6 + 1 + 2)


# -- what cannot be --------------------------------------------------------------------------------


def test_the_plan_explains_a_stream(say: Say, tmp_path: Path) -> None:
    code, out, err = say(
        f"launch --workers 2 --device cpu --dry-run {SCRIPT} {tmp_path} '{json.dumps({'size': 8})}'"
    )
    assert code == 0, err
    assert "4 samples an update = 2 x 2 (K x m)" in out
    assert "between peers" in out
    assert "at most 6 mini-batches are read ahead; those in use are kept" in out
    assert "it goes on by reading it again" in out
    assert "pace.updates(n, loader)" in out


def test_an_unreadable_sample_ends_the_run_and_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        _run(tmp_path, {"size": 40, "fails_at": 9}, engine="inline")
    message = str(caught.value)
    assert "the stream cannot be read any further: ValueError: sample 9 is broken, at" in message
    assert "streamed.py:" in message
    assert "in __iter__" in message


def test_an_empty_stream_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="the stream of pass 1 has no mini-batches"):
        _run(tmp_path, {"size": 0}, engine="inline")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loader_workers": 2}, "--loader-workers 2: the number of readers of a stream"),
        ({"fast": "auto"}, "--fast auto takes a batch to measure with"),
        ({"parts": 3}, "batch of 4 samples cannot be shared by 3 mini-batches"),
    ],
)
def test_unsupported_stream_settings_are_refused_in_one_sentence(settings: Any, words: str) -> None:
    loader = DataLoader(streamed.Stream(8), batch_size=4)
    with pytest.raises(ConfigError, match=words):
        alone(**settings).prepare(*streamed.make(), loader)


def test_a_stream_of_several_optimizers_refuses_loader_workers() -> None:
    loader = DataLoader(streamed.Stream(8), batch_size=4)
    objects = [*streamed.make(), *streamed.make()]
    with pytest.raises(ConfigError, match="--loader-workers 2: the number of readers of a stream"):
        alone(loader_workers=2).prepare(*objects, loader)


def test_a_prepared_stream_has_its_loaders_length() -> None:
    loader = DataLoader(streamed.Stream(8), batch_size=4)
    _, _, prepared = alone().prepare(*streamed.make(), loader)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(prepared)
    assert prepared.batch_size == 4


KILLED = """
import os, signal, sys, torch, paceline
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Stream(IterableDataset):
    def __iter__(self):
        for number in range(100):
            if number == 9 and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.ones(3)

pace = paceline.connect()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Stream(), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for batch in loader:
        with pace.step():
            model(batch).sum().backward()
            optimizer.step()
"""


def test_a_killed_loader_worker_ends_the_run_with_one_sentence(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    words = f"launch --workers 2 --device cpu --run-dir {tmp_path / 'run'}"
    code, out, err = say(f"{words} {tmp_path / 'train.py'}")
    assert code != 0
    assert "DataLoader worker" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_may_make_the_batches_itself(tmp_path: Path, workers: int) -> None:
    options = {"size": 10, "batch_size": None, "batch": "per-worker"}
    run, _ = _run(tmp_path, options, workers=workers, engine="inline")
    assert run.used() == [Counter(range(10))]


WHOLE = """
import torch, paceline
from torch.utils.data import DataLoader, IterableDataset

class Batches(IterableDataset):
    def __iter__(self):
        return iter([torch.full((num,), float(num)) for num in (4, 32, 6, 2)])

pace = paceline.connect()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Batches(), batch_size=None)
model, optimizer, loader = pace.prepare(model, optimizer, loader, batch="per-worker")
for epoch in pace.epochs(1):
    for batch in loader:
        with pace.step():
            model(batch[:, None]).mean().backward()
            optimizer.step()
"""


def test_a_batch_made_by_the_data_set_is_weighted_by_its_rows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WHOLE)
    run = run_script(tmp_path / "train.py", tmp_path, workers=2, engine="inline")
    assert sorted(push.weight for push in run.pushes) == [2, 4, 6, 32]


def test_a_stalled_reader_is_replaced(tmp_path: Path) -> None:
    """Stopped, not killed: another worker reads the rest."""
    options = {"size": 120, "step_s": 0.01}
    run, result = _run(
        tmp_path,
        options,
        respawn=True,
        stall_after=1.0,
        fault=("stop worker 0 at update 8 for 4s",),
    )
    assert run.used() == [Counter(range(60))]
    assert differ(result, streamed.twin(5, 1, 2, 120, 4)) < CLOSE
