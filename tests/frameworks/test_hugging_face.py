"""The Trainer subclass trains as the transformers Trainer alone and under its own DDP."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from runs import Run, assert_each_sample_once, run_script

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent
SCRIPT = HERE / "hugging.py"
ROOT = HERE.parents[1]
NUM_SAMPLES, BATCH, EPOCHS = 48, 8, 3
PRELOAD = ("transformers.trainer",)
"""Importing it takes longer than any training here."""


def left_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("worker-*.pt"))]


def by_python(
    folder: Path, *words: str, kind: str, batch: int, norm: float = 0.3
) -> list[dict[str, Any]]:
    folder.mkdir()
    done = forked.run([*words, SCRIPT, folder, kind, batch, norm], cwd=folder, preload=PRELOAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return left_in(folder)


def by_launch(folder: Path, protocol: str, workers: int) -> tuple[Run, list[dict[str, Any]]]:
    folder.mkdir()
    words = (str(folder), "paceline", str(BATCH))
    # As `paceline launch` does for a script that imports transformers.
    run = run_script(
        SCRIPT, folder, *words, has_ranks=False, workers=workers, protocol=protocol,
        preload=PRELOAD,
    )  # fmt: skip
    return run, left_in(folder)


@pytest.mark.timeout(300)
def test_full_sync_equals_one_process_and_ddp(tmp_path: Path) -> None:
    """float64 sums in another order: 1e-12 for values of about 1."""
    (plain,) = by_python(tmp_path / "plain", kind="plain", batch=BATCH)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ddp = by_python(tmp_path / "ddp", *torchrun, kind="plain", batch=BATCH // 2)
    (alone,) = by_python(tmp_path / "alone", kind="paceline", batch=BATCH)
    _, ours = by_launch(tmp_path / "ours", "full-sync", 2)
    assert [one["processes"] for one in (plain, *ddp, *ours)] == [1, 2, 2, 1, 1]
    for one in (*ddp, alone, *ours):
        assert one["steps"] == plain["steps"] == EPOCHS * NUM_SAMPLES // BATCH
        assert one["rate"] == pytest.approx(plain["rate"], abs=1e-12)
        for name, value in plain["state"].items():
            torch.testing.assert_close(one["state"][name], value, rtol=0, atol=1e-12)


@pytest.mark.timeout(300)
def test_zero_norm_disables_clipping(tmp_path: Path) -> None:
    """transformers says: "Set to 0 to disable"."""
    (plain,) = by_python(tmp_path / "plain", kind="plain", batch=BATCH, norm=0.0)
    (alone,) = by_python(tmp_path / "alone", kind="paceline", batch=BATCH, norm=0.0)
    for name, value in plain["state"].items():
        torch.testing.assert_close(alone["state"][name], value, rtol=0, atol=1e-12)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("protocol", "workers"), [("k-batch-async:2", 2), ("async", 4)])
def test_each_sample_counts_once_per_epoch(protocol: str, workers: int, tmp_path: Path) -> None:
    run, results = by_launch(tmp_path / "run", protocol, workers)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert run.summary.updates == EPOCHS * NUM_SAMPLES // BATCH
    for result in results:
        assert result["steps"] == run.summary.updates
        for name, value in result["state"].items():
            assert torch.equal(value, results[0]["state"][name])


def test_docs_show_the_subclass_of_the_example_in_twenty_lines() -> None:
    text = runpy.run_path(str(SCRIPT), run_name="read")["subclass"]()
    assert len(text.splitlines()) - 1 <= 20  # without the class line
    assert text in (ROOT / "docs" / "frameworks.md").read_text()
