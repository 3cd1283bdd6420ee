"""One batch, one block, one lease: loops that do not step once on every batch are plain PyTorch's.

A lone worker matches bit for bit, lockstep workers to the rounding of a mean; under other protocols
each sample is used as often as the script says, and every epoch ends.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import forked
import leasing
import loops
from paceline.errors import ConfigError
from paceline.protocols import parse
from paceline.run.describe import Description, _notes
from reference import differ
from runs import Run, assert_each_sample_once, run_script
from tiny import BATCH_SIZE, EPOCHS, NUM_SAMPLES

CLOSE = 1e-9
SCRIPT = Path(leasing.__file__)
PATHS = [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}]
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE


def _plain(case: str) -> dict[str, Tensor]:
    result = leasing.CASES[case](loops.Plain())
    result.pop("version", None)
    return result


def _run(case: str, folder: Path, **settings: object) -> tuple[Run, list[dict[str, Tensor]]]:
    run = run_script(SCRIPT, folder, case, str(folder), **{"workers": 2, **settings})
    results = [torch.load(folder / f"{case}-{seat}.pt") for seat in range(run.summary.workers)]
    for result in results:
        result.pop("version", None)
    return run, results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of each case, from a script without a launcher."""
    folder = tmp_path_factory.mktemp("alone")
    for case in leasing.CASES:
        forked.run([SCRIPT, case, folder]).check_returncode()
    return folder


@pytest.mark.parametrize("case", leasing.CASES)
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(alone: Path, case: str) -> None:
    result, plain = torch.load(alone / f"{case}-0.pt"), _plain(case)
    assert all(torch.equal(result[name], plain[name]) for name in plain)


@pytest.mark.parametrize("where", PATHS, ids=str)
@pytest.mark.parametrize("case", sorted(set(leasing.CASES) - {"weighing"}))
def test_lockstep_workers_match_plain_pytorch(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    _, results = _run(case, tmp_path, protocol="full-sync", **where)
    for result in results:
        assert differ(result, _plain(case)) < CLOSE


@pytest.mark.parametrize("where", PATHS, ids=str)
def test_a_step_has_the_weight_that_the_script_sets(tmp_path: Path, where: dict[str, str]) -> None:
    run, results = _run("weighing", tmp_path, protocol="full-sync", **where)
    assert any(push.share != push.num_samples for push in run.pushes)
    for result in results:
        assert differ(result, _plain("weighing")) < CLOSE


def test_an_update_without_samples_is_not_made(tmp_path: Path) -> None:
    run, _ = _run("filtering", tmp_path, protocol="full-sync", path="peers")
    num_used = sum(1 for number in range(NUM_BATCHES) if number % 3 == 0)
    assert run.summary.updates == EPOCHS * num_used
    assert run.summary.dropped_samples == EPOCHS * BATCH_SIZE * (NUM_BATCHES - num_used)
    assert run.num_epochs_ended() == EPOCHS


def test_batches_after_a_break_are_reported_as_unused(tmp_path: Path) -> None:
    run, _ = _run("breaking", tmp_path, protocol="full-sync", path="peers")
    assert run.summary.updates == EPOCHS * 3
    assert run.summary.dropped_samples == EPOCHS * BATCH_SIZE * (NUM_BATCHES - 3)
    assert run.num_epochs_ended() == EPOCHS


OTHERS = [
    {"protocol": "k-sync:1"},
    {"protocol": "k-batch-async:2"},
    {"protocol": "async", "engine": "inline"},
    {"protocol": "local-sgd:4"},
    {"protocol": "local-sgd:3", "path": "store"},
    {"protocol": "k-sync:1", "dropped": "skip"},
]


@pytest.mark.parametrize("how", OTHERS, ids=str)
@pytest.mark.parametrize(
    "case",
    ["filtering", "breaking", "nesting", "outside", "caught", "caught behind", "filtering later"],
)
def test_every_epoch_ends_and_no_sample_is_used_twice(
    tmp_path: Path, case: str, how: dict[str, str]
) -> None:
    run, results = _run(case, tmp_path, **how)
    assert run.num_epochs_ended() == EPOCHS
    assert all(max(epoch.values()) == 1 for epoch in run.used())
    used = sum(sum(epoch.values()) for epoch in run.used())
    assert used + run.summary.dropped_samples == EPOCHS * NUM_SAMPLES
    assert (
        differ(*({k: v for k, v in result.items() if k[0].isalpha()} for result in results)) == 0.0
    )


@pytest.mark.parametrize(
    ("case", "says"),
    [("zipped", "a second time beside"), ("unevenly", "a different number of times")],
)
def test_loops_that_would_differ_silently_are_refused(tmp_path: Path, case: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(case, tmp_path, protocol="full-sync", path="peers")


def test_a_batch_stepped_twice_is_used_once(tmp_path: Path) -> None:
    run, _ = _run("once twice", tmp_path, protocol="full-sync", path="peers")
    assert run.summary.dropped_samples == 0
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


@pytest.mark.parametrize("path", ["store", "peers"])
def test_accumulating_loops_count_local_steps(tmp_path: Path, path: str) -> None:
    """Two per push: five mini-batches per worker and epoch make two pushes, and one is left."""
    run, _ = _run("locally", tmp_path, protocol="local-sgd:2", path=path)
    assert run.summary.updates == EPOCHS
    assert run.summary.final_loss is not None


def test_local_steps_are_shared_evenly_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    run, _ = _run("nesting", tmp_path, protocol="local-sgd:4", path="peers")
    samples = [push.num_samples for push in run.pushes]
    assert samples == [24, 24, 6, 6] * EPOCHS


def test_the_plan_says_whether_a_loop_index_is_per_worker() -> None:
    """Under lockstep the index is the same for all."""
    description = Description(
        digest="", task="train", source="", program="script train.py", threads=1, device="cpu",
        num_parameters=1, update_bytes=4, arena_bytes=4, pinned_bytes=0, num_samples=8,
        batch_size=4, drop_last=False, has_own_batches=False, order="in order", lookahead=0,
        learning_rates=(), epochs=1, grain="", can_share=True, notes=(),
    )  # fmt: skip
    notes = " ".join(_notes(description, parse("async", 2)))
    assert "each worker's loop counts its own batches" in notes
    assert _notes(description, parse("full-sync", 2)) == ()


@pytest.mark.parametrize("protocol", ["k-sync:1", "k-batch-async:2", "async"])
def test_a_second_step_on_a_batch_is_refused_without_lockstep(
    tmp_path: Path, protocol: str
) -> None:
    with pytest.raises(ConfigError, match=r"twice for one mini-batch; .* only full-sync"):
        _run("stepping twice", tmp_path, protocol=protocol, engine="inline")
