"""Gradients in fewer bytes among the ranks of torchrun, bucket by bucket during the backward pass.

The result equals that of path collective of the local engine, which compresses the whole gradient
at once after the backward pass: the model fits one bucket.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from paceline.engines.torchrun.averaging import make_buckets
from paceline.store.layout import lay_out
from ranks import SCRIPT, run_by_mpirun, run_ranks
from reference import differ
from runs import Run, assert_each_sample_once, run_script

NUM_SAMPLES = 61
CLOSE = 1e-9


def on_local(folder: Path, workers: int, compress: str, protocol: str = "full-sync") -> Run:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return run_script(
        folder / "train.py", folder,
        workers=workers, path="collective", compress=compress, protocol=protocol,
    )  # fmt: skip


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("num_ranks", "compress", "protocol", "mode"),
    [
        (2, "int8", "full-sync", ""),
        (2, "powersgd:1", "full-sync", "twice"),
        (3, "topk:20%", "full-sync", ""),
        (2, "int8", "local-sgd:2", ""),
    ],
)
def test_compressed_ranks_match_local_workers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    compress: str,
    protocol: str,
    mode: str,
) -> None:
    """Also where gradients change after their exchange has started, and it is repeated."""
    chosen = {"PACELINE_COMPRESS": compress, "PACELINE_PROTOCOL": protocol, "MODE": mode}
    ended = run_by_mpirun(tmp_path, num_ranks, **chosen)
    assert ended.code == 0, ended.said
    assert f"compress         {compress}: " in ended.said
    assert "compressing wins here" in ended.said or "compressing loses here" in ended.said
    assert_each_sample_once(ended.run, NUM_SAMPLES, 2)
    monkeypatch.setenv("MODE", mode)
    monkeypatch.chdir(tmp_path)
    expected = on_local(tmp_path / "local", num_ranks, compress, protocol)
    plain = on_local(tmp_path / "plain", num_ranks, "none", protocol)
    assert differ(ended.run.state, expected.state) < CLOSE
    assert differ(expected.state, plain.state) > 1e-6


@pytest.mark.timeout(150)
@pytest.mark.parametrize("compress", ["powersgd:1"])  # its residual, and what it began with
def test_a_killed_rank_resumes_with_its_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    chosen = {
        "PACELINE_COMPRESS": compress,
        "PACELINE_CHECKPOINT_EVERY": "1 updates",
        "EPOCHS": "4",
    }
    ended = run_ranks(tmp_path, 2, "--max-restarts", "2", MODE="kill 1", **chosen)
    assert ended.code == 0, ended.said
    assert "going on with" in ended.said
    assert_each_sample_once(ended.run, NUM_SAMPLES, 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPOCHS", "4")
    expected = on_local(tmp_path / "local", 2, compress)
    assert differ(ended.run.state, expected.state) < CLOSE


def test_buckets_contain_every_gradient_once() -> None:
    """Each of one dtype, the last parameters first; none splits a parameter."""
    large = torch.zeros(300_000)
    parameters = {"a": large, "b": torch.zeros(7), "c": torch.zeros(3).half(), "d": large}
    section = lay_out(parameters.items(), [], []).parameters
    buckets = make_buckets(section, large.device)
    assert [bucket.numbers for bucket in buckets] == [(3,), (2,), (1, 0)]
    assert buckets[0].span.stop == section.stop
    for one, following in pairwise(buckets):
        assert one.span.start == following.span.stop
    assert buckets[-1].span.start == 0
