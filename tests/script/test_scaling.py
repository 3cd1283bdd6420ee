"""All workers have one loss scale, and it is the one that a plain loop would have.

The scale belongs to a version: the worker that executes an update advances it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forked
import loops
import scaling
from paceline.errors import ConfigError
from paceline.store.control import Control, control_bytes
from paceline.store.memory import PrivateMemory
from paceline.store.versions import NO_OVERFLOW, LossScale, LossScales
from reference import differ
from runs import Run, assert_each_sample_once, run_script
from tiny import EPOCHS, NUM_SAMPLES

CLOSE = 1e-6
SCRIPT = Path(scaling.__file__)
ANYWHERE = [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}]


def _run(case: str, folder: Path, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    return run, [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


@pytest.mark.parametrize("where", ANYWHERE, ids=str)
def test_every_workers_scales_match_the_plain_loop(tmp_path: Path, where: dict[str, str]) -> None:
    """One of two workers overflows in each epoch; the scale grows in between, in both."""
    _, results = _run("growing", tmp_path, **where)
    plain = scaling.CASES["growing"](loops.Plain())
    wanted = [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]
    assert plain["scales"].tolist() == wanted
    for result in results:
        assert result["scales"].tolist() == wanted
        assert differ(result, {**plain, "left": result["left"]}) < CLOSE


@pytest.mark.parametrize(
    "settings",
    [
        *ANYWHERE,
        # With the delay no worker completes an epoch before the other has started.
        {"protocol": "k-batch-async:2", "delay": ("20ms",)},
        {"protocol": "k-batch-async:2", "engine": "inline"},
        {"protocol": "async", "delay": ("20ms",)},
        {"path": "collective"},
    ],
    ids=str,
)
def test_an_overflow_in_one_worker_lowers_the_scale_of_all(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    _, results = _run("one overflow", tmp_path, **settings)
    assert [float(result["scales"][-1]) for result in results] == [512.0, 512.0]
    assert len({int(result["tracker"]) for result in results}) == 1


@pytest.mark.parametrize(("case", "engine"), [("one overflow", "inline"), ("lingering", "local")])
def test_a_superseded_worker_follows_the_scale(tmp_path: Path, case: str, engine: str) -> None:
    """Lingering: also before the worker's own scaler has made a step."""
    _, results = _run(case, tmp_path, protocol="k-sync:1", engine=engine)
    assert results[1]["left"].tolist()[:3] == [1, 1, 1]
    assert results[1]["scales"].tolist()[:4] == [1024.0, 512.0, 512.0, 512.0]
    assert results[0]["scales"].tolist()[-1] == results[1]["scales"].tolist()[-1] == 512.0


def test_pushes_computed_with_one_old_scale_lower_it_once(tmp_path: Path) -> None:
    """Both first pushes overflow; the second is late, computed with the scale that fell since."""
    run, results = _run("overflow in all", tmp_path, protocol="async", engine="inline")
    assert [push.is_finite for push in run.pushes][:3] == [False, False, True]
    assert [push.ticket.version for push in run.pushes][:2] == [0, 0]
    assert [float(result["scales"][-1]) for result in results] == [512.0, 512.0]


def test_local_sgd_workers_have_their_own_scales(tmp_path: Path) -> None:
    """They step for themselves: what one worker's gradients can bear says nothing of another's."""
    _, results = _run("one overflow", tmp_path, protocol="local-sgd:2")
    assert [float(result["scales"][-1]) for result in results] == [512.0, 1024.0]


def test_a_lone_worker_keeps_torchs_own_scaler(tmp_path: Path) -> None:
    """By ``python train.py`` and by a launcher, a scale that is set by hand included."""
    forked.run([SCRIPT, "set by hand", tmp_path]).check_returncode()
    alone = torch.load(tmp_path / "set by hand-0.pt")
    _, (launched,) = _run("set by hand", tmp_path, workers=1)
    for result in (alone, launched):
        assert result["scales"].tolist() == [64.0] * 10


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("set by hand", r"scaler.update\(64\) would set the scale of one worker.*init_scale"),
        ("loaded", "load the scaler's state before the first step"),
        ("other rule", r"\(2.0, 0.5, 1\), the run began with \(2.0, 0.5, 2000\).*in all of them"),
    ],
)
def test_a_scale_set_by_one_worker_is_refused(tmp_path: Path, case: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _run(case, tmp_path, engine="inline")


def test_a_worker_that_takes_over_a_job_computes_the_same_scale() -> None:
    """The holder may die after the scale is written and before the version is."""
    scales = LossScales(Control(PrivateMemory(control_bytes(2)), 2))
    assert scales.bring(1, is_update=True, overflow_version=NO_OVERFLOW) is None
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    scales.offer(1, LossScale(value=8.0, growth_tracker=0, **rule))
    seen = []
    for version in range(1, 7):
        overflow = version - 1 if version == 4 else NO_OVERFLOW
        ways = {"is_update": version != 4, "overflow_version": overflow}
        once = scales.bring(version, **ways)
        assert scales.bring(version, **ways) == once == scales.of(version)
        assert once is not None
        seen.append((once.value, once.growth_tracker))
    assert seen == [(8.0, 1), (16.0, 0), (16.0, 1), (8.0, 0), (8.0, 1), (16.0, 0)]


def test_a_death_before_the_version_is_written_leaves_its_scale(tmp_path: Path) -> None:
    """Worker 1 pushes last and so makes the updates; worker 0 repeats one."""
    settings = {"workers": 2, "protocol": "full-sync", "path": "store", "slow": ("1=5x",)}
    run = run_script(SCRIPT, tmp_path, "dying", str(tmp_path), **settings)
    assert run.left == ["killed by signal 9"]
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    result, plain = torch.load(tmp_path / "dying-0.pt"), scaling.CASES["growing"](loops.Plain())
    assert result["scales"][-1] == plain["scales"][-1]
    assert result["tracker"] == plain["tracker"]


def test_an_update_skipped_for_another_reason_changes_no_scale() -> None:
    scale = LossScale(
        value=8.0, growth_tracker=1, growth_factor=2.0, backoff_factor=0.5, growth_interval=2
    )
    assert scale.after(1, is_update=False, overflow_version=NO_OVERFLOW) == scale
