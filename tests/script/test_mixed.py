"""Mixed precision by ``pace.autocast`` and ``pace.backward``, under every protocol."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mixed
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from reference import differ
from runs import Run, run_script
from tiny import EPOCHS, grouped

CLOSE = 1e-6
SCRIPT = Path(mixed.__file__)


def _run(case: str, folder: Path, **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    settings = {"workers": 2, "protocol": "full-sync", "precision": "fp16", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    return run, [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


@pytest.mark.parametrize(
    "where", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}, {"workers": 1}], ids=str
)
def test_the_loop_matches_mixed_precision_by_hand(tmp_path: Path, where: dict[str, Any]) -> None:
    """One update an epoch overflows; the clip is of the averaged, unscaled gradient."""
    run, results = _run("one sample", tmp_path, **where)
    plain = mixed.plainly(mixed.in_one_sample)
    assert run.summary.skipped_updates == EPOCHS
    for result in results:
        assert differ(result, plain) < CLOSE


def test_a_worker_without_a_launcher_matches_mixed_precision_by_hand() -> None:
    alone = mixed.mixed(Pace(SoloExchange(), Context(precision="fp16")), mixed.in_one_sample)
    assert differ(alone, mixed.plainly(mixed.in_one_sample)) < CLOSE


@pytest.mark.parametrize(
    "protocol",
    [
        "full-sync",
        "k-sync:3",
        "k-batch-sync:3",
        "async",
        "k-async:2",
        "k-batch-async:2",
        "stale-synchronous:2",
        "adaptive",
    ],
)
def test_one_overflow_is_skipped_by_all_workers_and_counted_by_no_schedule(
    tmp_path: Path, protocol: str
) -> None:
    """Some worker gets the sample that overflows once an epoch, whichever is called off."""
    run, results = _run("one sample", tmp_path, workers=4, protocol=protocol, engine="inline")
    skipped = run.summary.skipped_updates
    assert skipped == sum(not push.is_finite for push in run.pushes) == EPOCHS
    counted = run.summary.updates - skipped
    parameters = [name for name in results[0] if name[0].isalpha() and name not in ("half",)]
    for result in results:
        wanted = mixed.LEARNING_RATE * mixed.GAMMA**counted
        assert float(result["rates"][0]) == pytest.approx(wanted)
        for name in parameters:
            assert torch.isfinite(result[name]).all()
            assert torch.equal(result[name], results[0][name])


@pytest.mark.parametrize("protocol", ["local-sgd:2", "adaptive-local:2"])
def test_a_local_sgd_worker_skips_its_own_step(tmp_path: Path, protocol: str) -> None:
    run, results = _run("one worker", tmp_path, workers=4, protocol=protocol)
    assert run.summary.skipped_updates == 0
    assert all(torch.isfinite(value).all() for result in results for value in result.values())


def test_forward_passes_run_in_half_precision_and_train(tmp_path: Path) -> None:
    run, results = _run("half", tmp_path)
    assert all(float(result["half"]) == 1.0 for result in results)
    assert run.summary.skipped_updates <= 2  # torch's first scale, 65536, may be too much
    assert run.summary.final_loss is not None
    assert run.summary.final_loss < 1.2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("without autocast", r"precision fp16 was asked for.*with pace.autocast\(\)"),
        ("without scaling", r"pace.backward\(loss\) in place of loss.backward\(\)"),
    ],
)
def test_a_script_that_ignores_the_precision_setting_is_refused(
    tmp_path: Path, case: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _run(case, tmp_path, engine="inline")


def test_backward_inside_autocast_runs_outside_it() -> None:
    """Its operations would otherwise be cast once more."""
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.rand(8, 2), torch.rand(8, 1))
    pace = Pace(SoloExchange(), Context())
    model, _, loader = pace.prepare(
        model, grouped(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4)
    )
    for inputs, _ in loader:
        with pace.autocast(torch.bfloat16):
            loss = Watched.apply(model(inputs)).sum()
            assert torch.is_autocast_enabled("cpu")
            pace.backward(loss)
        break
    assert seen == [False]


def test_a_part_in_full_precision_leaves_the_loss_scaled_and_clips_may_follow_each_other() -> None:
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.rand(8, 2))
    pace = Pace(SoloExchange(), Context(precision="fp16"))
    model, optimizer, loader = pace.prepare(
        model, grouped(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4)
    )
    for number, (inputs,) in enumerate(loader):
        with pace.step() as step:
            optimizer.zero_grad()
            with pace.autocast():
                outputs = model(inputs)
                with pace.autocast(torch.float32):
                    loss = 1e-3 * outputs.float().sum()
            with torch.no_grad(), pace.autocast(torch.bfloat16):
                model(inputs)
            pace.backward(loss)
            assert float(model.get_parameter("bias").grad) > 1.0
            pace.clip_grad_norm_(model.parameters(), 1.0)
            pace.clip_grad_value_(model.parameters(), 0.1)
            assert float(model.get_parameter("bias").grad) == pytest.approx(4e-3, rel=1e-2)
            if number == 0:
                step.skip()
                continue
            optimizer.step()
