"""What the loop API supports is computed as by a plain loop: each case is one text, run both ways.

Inline through the store for every case; with real processes through the store and between peers
where the path matters.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forked
import loops
from reference import differ
from runs import Run, assert_each_sample_once, run_script
from tiny import BATCH_SIZE, EPOCHS, NUM_SAMPLES

CLOSE = 1e-6
SCRIPT = Path(loops.__file__)
SAME = [
    *loops.OPTIMIZERS,
    "epoch schedule",
    "version schedule",
    "plateau",
    "clipping",
    "scaler",
    "compiled",
]


def _run(case: str, folder: Path, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    """A run of one case, and each worker's result."""
    folder.mkdir(exist_ok=True)
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    paths = [folder / f"{case}-{worker}.pt" for worker in range(settings["workers"])]
    return run, [torch.load(path) for path in paths if path.exists()]


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-sync:4"])
def test_inline_workers_match_the_plain_loop(tmp_path: Path, case: str, protocol: str) -> None:
    """Also the optimizer's state, in every worker. k-batch-sync:4 makes four parts of a batch."""
    _, results = _run(case, tmp_path, engine="inline", protocol=protocol)
    plain = loops.CASES[case](loops.Plain())
    if case == "clipping":  # a worker sees one norm per own push, not per update
        plain.pop("norms")
    for result in results:
        result.pop("norms", None)
        assert differ(result, plain) < CLOSE


@pytest.mark.parametrize("case", [one for one in SAME if one not in ("sgd", "compiled")])
def test_peers_match_the_plain_loop(tmp_path: Path, case: str) -> None:
    """Three workers, so that shares end in the middle of tensors and on other lines."""
    run, results = _run(case, tmp_path, workers=3, path="peers")
    assert run.path == "peers"
    assert run.notes == []
    assert len(results) == 3
    plain = loops.CASES[case](loops.Plain())
    for result in results:
        assert differ(result, plain) < CLOSE


@pytest.mark.parametrize("case", ["adam", "clipping"])
def test_live_workers_match_the_plain_loop_through_the_store(tmp_path: Path, case: str) -> None:
    run, results = _run(case, tmp_path, path="store")
    assert run.path == "store"
    for result in results:
        assert differ(result, loops.CASES[case](loops.Plain())) < CLOSE


@pytest.mark.parametrize(
    "where", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}], ids=str
)
def test_accumulated_mini_batches_are_sent_with_the_next_push(
    tmp_path: Path, where: dict[str, str]
) -> None:
    """As in plain PyTorch, also across an epoch's end. Peers switch to the store for it."""
    run, results = _run("accumulating", tmp_path, **where)
    used = run.used()
    assert used[0] == Counter(range(NUM_SAMPLES))
    assert used[1] == Counter(range(NUM_SAMPLES - BATCH_SIZE))  # the rest rides on, to no epoch
    assert [push.num_samples for push in run.pushes if push.share] == [
        12,
        12,
        12,
        12,
        18,
        18,
        12,
        12,
    ]
    assert run.summary.dropped_samples == BATCH_SIZE
    for result in results:
        assert differ(result, loops.CASES["accumulating"](loops.Plain())) < CLOSE


@pytest.mark.parametrize(
    "where", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}], ids=str
)
def test_gradients_cleared_by_zero_grad_are_in_no_update(
    tmp_path: Path, where: dict[str, str]
) -> None:
    run, results = _run("dropping", tmp_path, **where)
    assert run.used() == [Counter(range(NUM_SAMPLES - BATCH_SIZE))] * EPOCHS
    assert run.summary.dropped_samples == EPOCHS * BATCH_SIZE
    for result in results:
        assert differ(result, loops.CASES["dropping"](loops.Plain())) < CLOSE


def test_a_compiled_model_is_called_off_between_passes_and_saved_unprefixed(
    tmp_path: Path,
) -> None:
    run, _ = _run("compiled backward", tmp_path, protocol="k-sync:1", slow=("1=4x",))
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert run.state.keys() == loops.make_model().state_dict().keys()


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_pace_sum_adds_all_workers_and_one_worker_is_main(
    tmp_path: Path, where: dict[str, str]
) -> None:
    _, results = _run("summing", tmp_path, **where)
    assert [result["sums"].tolist() for result in results] == [[3.0, 3.0]] * 2
    assert [float(result["is_main"]) for result in results] == [1.0, 0.0]


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_a_skipped_mini_batch_is_leased_again(tmp_path: Path, where: dict[str, str]) -> None:
    run, results = _run("skipping", tmp_path, **where)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert len(run.pushes) == 20
    assert differ(*results) == 0.0


def test_a_lone_worker_gets_a_skipped_mini_batch_again(tmp_path: Path) -> None:
    """By ``python train.py``, too: no launcher, no coordinator."""
    forked.run([SCRIPT, "skipping", tmp_path]).check_returncode()
    result = torch.load(tmp_path / "skipping-0.pt")
    run, (inline,) = _run("skipping", tmp_path / "inline", workers=1, engine="inline")
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(result, inline) < CLOSE
