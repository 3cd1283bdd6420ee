"""What a loop does to gradients between backward and step is as in plain PyTorch, or refused.

One text each (tests/support/edited.py), with several workers and plainly. Clipping acts on
the average; a change of one worker's part is detected however it is made, and nothing else is taken
for one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import edited
import loops
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from reference import differ
from runs import Run, run_script
from tiny import EPOCHS

CLOSE = 1e-6
SCRIPT = Path(edited.__file__)
ON_A_PART = r"changed between backward\(\) and optimizer.step\(\).*pace.clip_grad_norm_.*edit_gr"


def _run(case: str, folder: Path, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    settings = {"workers": 2, "protocol": "full-sync", "engine": "inline", **settings}
    if "path" in settings:
        del settings["engine"]
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    return run, [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


def _plain(case: str) -> dict[str, Tensor]:
    return edited.CASES[case](loops.Plain())


def _assert_same(case: str, results: list[dict[str, Tensor]]) -> None:
    for result in results:
        assert differ(result, _plain(case)) < CLOSE


@pytest.mark.parametrize("case", edited.SAME)
def test_linear_changes_and_clips_of_the_average_match_one_process(
    tmp_path: Path, case: str
) -> None:
    _, results = _run(case, tmp_path)
    _assert_same(case, results)


@pytest.mark.parametrize(
    "where", [{"path": "peers", "workers": 3}, {"path": "store"}, {"path": "collective"}], ids=str
)
@pytest.mark.parametrize("case", ["by both", "halved then clipped", "zeroed by torch", "thawing"])
def test_gradient_changes_match_one_process_on_every_path(
    tmp_path: Path, case: str, where: dict[str, Any]
) -> None:
    _, results = _run(case, tmp_path, **where)
    _assert_same(case, results)


@pytest.mark.parametrize("case", ["by both", "by value", "to zero"])
def test_several_pushes_per_worker_are_clipped_once(tmp_path: Path, case: str) -> None:
    _, results = _run(case, tmp_path, protocol="k-batch-sync:4")
    plain = _plain(case)
    for result in results:
        assert differ({**result, "kept": plain["kept"]}, plain) < CLOSE


@pytest.mark.parametrize("case", [*edited.SAME, *edited.ON_A_PART])
def test_one_worker_matches_plain_pytorch_bit_for_bit(case: str) -> None:
    if case == "noisy":
        torch.manual_seed(1)
    alone = edited.CASES[case](Pace(SoloExchange(), Context()))
    if case != "noisy":  # the model's seed is drawn from before the noise
        assert differ(alone, _plain(case)) == 0.0


@pytest.mark.parametrize("case", edited.ON_A_PART)
def test_a_nonlinear_change_of_one_workers_part_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigError, match=ON_A_PART):
        _run(case, tmp_path)


@pytest.mark.parametrize("where", [{"path": "peers"}, {"path": "store"}], ids=str)
@pytest.mark.parametrize("case", ["by torch", "clamped behind"])
def test_a_nonlinear_change_of_a_part_is_refused_on_every_path(
    tmp_path: Path, case: str, where: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=ON_A_PART):
        _run(case, tmp_path, **where)


@pytest.mark.parametrize("case", [one for one in edited.ON_A_PART if one not in ("noisy",)])
def test_a_lone_workers_part_is_the_whole_gradient(tmp_path: Path, case: str) -> None:
    _, results = _run(case, tmp_path, workers=1)
    _assert_same(case, results)


def test_workers_whose_pushes_are_updates_may_change_gradients(tmp_path: Path) -> None:
    run, _ = _run("by torch", tmp_path, protocol="async")
    assert run.summary.updates > 0


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("a part", r"given 2 parameters that have gradients, and the model has 4.*as a whole"),
        ("a part by value", r"clip_grad_value_ was given 1 parameters"),
        ("own number", r"workers 0 and 1 pushed .* 0 clips it to norm 0.3, worker 1 to norm 0.6"),
        ("own value", r"workers 0 and 1 .* worker 0 clips it to nothing, worker 1 to value 0.02"),
        ("another type", r"norm of type 2, not 1: leave norm_type out"),
        ("again", r"called after another clip of the same step"),
        ("more after clipping", r"loss.backward\(\) was called after pace.clip_grad_norm_"),
        ("if finite", r"which exists only after optimizer.step\(\): read it then"),
        ("step hook", r"SGD got step hooks after prepare\(\), which would see a share"),
        ("edited after clipping", r"edit first, then clip"),
    ],
)
def test_an_unsupported_clip_is_refused_by_name(tmp_path: Path, case: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(case, tmp_path)


@pytest.mark.parametrize("case", ["own number", "own value"])
def test_peers_with_different_clips_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigError, match=r"workers 0 and 1 pushed into one update"):
        _run(case, tmp_path, path="peers")


# -- local-sgd: every worker's steps are its own ---------------------------------------------------


@pytest.mark.parametrize("case", ["by norm", "by both", "by torch", "clamped behind", "noisy"])
def test_a_local_step_matches_plain_pytorch(tmp_path: Path, case: str) -> None:
    """One worker under local-sgd: the average of one difference is the difference."""
    _, results = _run(case, tmp_path, workers=1, protocol="local-sgd:2")
    if case != "noisy":
        assert differ(results[0], _plain(case)) < CLOSE


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_local_sgd_clips_each_local_step(tmp_path: Path, where: dict[str, str]) -> None:
    """As torch's own function in the same run; the norm is there at once."""
    pairs = []
    for case in ("by norm", "by torch"):
        _, results = _run(case, tmp_path / case, protocol="local-sgd:2", **where)
        pairs.append(results)
    for ours, torchs in zip(*pairs, strict=True):
        assert differ(ours, torchs) == 0.0
        assert bool(torch.isfinite(ours["kept"]).all())


# -- the norm that comes back ----------------------------------------------------------------------


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "store"}], ids=str)
@pytest.mark.parametrize("protocol", ["async", "stale-synchronous:2"])
def test_the_norm_is_that_of_the_update_that_used_the_push(
    tmp_path: Path, protocol: str, where: dict[str, str]
) -> None:
    """One push is an update: its norm is that of the worker's own gradient."""
    _, results = _run("norms", tmp_path, workers=3, protocol=protocol, **where)
    own, norms = torch.cat([result["kept"] for result in results]).unbind(dim=1)
    is_known = ~norms.isnan()  # a late one, at an epoch's end, is in no update
    assert is_known.any()  # of some worker: a slow one may push only late
    assert torch.allclose(own[is_known], norms[is_known], atol=CLOSE)


def test_a_push_without_an_update_has_no_norm(tmp_path: Path) -> None:
    """Each worker pushes twice an update, and continues after the first push."""
    _, results = _run("norms", tmp_path, protocol="k-batch-sync:4")
    norms = torch.cat([result["kept"][:, 1] for result in results])
    known = norms[~norms.isnan()]
    assert 0 < len(known) < len(norms)
    plain = _plain("norms")["kept"][:, 1]
    assert torch.allclose(known, plain, atol=CLOSE)  # by the last push into each update


def test_an_empty_round_keeps_the_norm_of_the_last_push(tmp_path: Path) -> None:
    """Every second update is of one sample, so that two of three workers have none of it."""
    case = "norms of uneven batches"
    _, results = _run(case, tmp_path, path="peers", workers=3)
    plain = _plain(case)["kept"][:, 1]
    assert len(plain) == 2 * EPOCHS
    for result in results:
        norms = result["kept"][:, 1]
        wanted = plain if len(norms) == len(plain) else plain[::2]
        assert torch.allclose(norms, wanted, atol=CLOSE)
