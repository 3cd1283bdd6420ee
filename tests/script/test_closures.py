"""Optimizers that evaluate the model again inside their step: LBFGS, SAM, and one that may.

One worker is plain PyTorch. Under full-sync all workers make each step together, each evaluation on
the mean of all gradients, so it is one process with whole batches; under local-sgd each worker does
so by itself. Torch's first-order optimizers call a closure once, which every protocol carries.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS

import closing
from meanwhile import stopped_at
from paceline.context import Context
from paceline.errors import AllGone, ConfigError, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.plan import Plan
from paceline.report.live import QuietObserver
from paceline.script.closures import NOTE_OF_CLOSURES, calls_once
from paceline.script.worker import Pace
from reference import differ
from runs import Run, run_script

CLOSE = 1e-6
Say = Callable[[str], tuple[int, str, str]]
SCRIPT = Path(closing.__file__)
EVEN, UNEVEN, SHORT = 64, 61, 50
"""Samples; the last batch of the second has 13, of the third 2: fewer than four workers."""
NOT_OF_ALL = ("losses", "calls")


def _own(case: str, result: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values equal to plain PyTorch's: a loss not given by ``step`` is of a worker's part."""
    return result if closing.CASES[case].is_given else _weights(result)


def _run(
    folder: Path, case: str, num_samples: int = EVEN, **settings: Any
) -> tuple[Run, list[dict[str, Tensor]]]:
    """A run, and each worker's result."""
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), str(num_samples), **settings)
    return run, [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]


def _weights(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in result.items() if name not in NOT_OF_ALL}


@pytest.mark.parametrize("case", closing.CASES)
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(case: str) -> None:
    result = closing.train(Pace(SoloExchange(), Context()), case, UNEVEN)
    assert differ(result, closing.twin(case, UNEVEN)) == 0.0


@pytest.mark.parametrize("case", closing.TOGETHER)
def test_one_worker_under_full_sync_matches_plain_pytorch_bit_for_bit(
    tmp_path: Path, case: str
) -> None:
    _, (result,) = _run(tmp_path, case, UNEVEN, workers=1, engine="inline")
    assert differ(result, closing.twin(case, UNEVEN)) == 0.0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("case", closing.TOGETHER)
def test_full_sync_matches_plain_pytorch(tmp_path: Path, case: str, workers: int) -> None:
    run, results = _run(tmp_path, case, UNEVEN, workers=workers, engine="inline")
    twin = closing.twin(case, UNEVEN)
    assert len(results) == workers
    for result in results:
        # Also the losses of step(), and the calls.
        assert differ(_own(case, result), _own(case, twin)) < CLOSE
    assert run.used() == [Counter(range(UNEVEN))] * closing.EPOCHS
    assert run.summary.updates == 4 * closing.EPOCHS


@pytest.mark.parametrize("path", ["peers", "collective"])
@pytest.mark.parametrize("case", ["lbfgs", "sam", "lbfgs and sgd", "hooks and sgd"])
def test_processes_match_the_inline_engine(tmp_path: Path, case: str, path: str) -> None:
    _, results = _run(tmp_path, case, SHORT, workers=4, path=path)
    twin = closing.twin(case, SHORT)
    for result in results:
        assert differ(_weights(result), _weights(twin)) < CLOSE


@pytest.mark.parametrize("engine", ["inline", "local"])
@pytest.mark.parametrize("case", ["lbfgs", "sam, clipped", "lbfgs and sgd"])
def test_a_worker_without_a_mini_batch_steps_too(tmp_path: Path, case: str, engine: str) -> None:
    _, results = _run(tmp_path, case, SHORT, workers=4, engine=engine)
    twin = closing.twin(case, SHORT)
    for result in results:
        assert differ(_weights(result), _weights(twin)) < CLOSE
    assert float(results[3]["calls"]) < float(twin["calls"])


def test_a_scheduler_that_misses_a_short_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fewer samples than there are workers.*drop_last=True"):
        _run(tmp_path, "lbfgs, scheduled", SHORT, workers=4, engine="inline")


@pytest.mark.parametrize("protocol", ["full-sync", "k-sync:2", "local-sgd:1"])
def test_every_protocol_accepts_a_closure_that_is_called_once(
    tmp_path: Path, protocol: str
) -> None:
    run, results = _run(tmp_path, "sgd", EVEN, protocol=protocol, engine="inline")
    assert run.used() == [Counter(range(EVEN))] * closing.EPOCHS
    is_averaged = protocol != "local-sgd:1"  # two steps of SGD with momentum average to one
    for result in results:
        assert differ(_weights(result), _weights(closing.twin("sgd", EVEN))) < CLOSE, is_averaged


def test_torch_optimizers_call_a_closure_once() -> None:
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if kind in (torch.optim.Optimizer, LBFGS, torch.optim.SparseAdam):
            continue
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        optimizer, calls = kind([parameter], lr=0.1), []

        def closure(parameter: Tensor = parameter, calls: list[int] = calls) -> Tensor:
            calls.append(parameter._version)
            (loss := parameter.square().sum()).backward()
            return loss

        before = parameter._version
        optimizer.step(closure)
        assert calls == [before], name  # once, and before anything was changed
        assert calls_once(optimizer)
    assert not calls_once(LBFGS([torch.nn.Parameter(torch.ones(1))]))
    assert not calls_once(closing.Sam([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_local_sgd_workers_step_on_their_own_mini_batches(tmp_path: Path) -> None:
    _, results = _run(tmp_path, "lbfgs", UNEVEN, workers=1, protocol="local-sgd:3", engine="inline")
    assert differ(results[0], closing.twin("lbfgs", UNEVEN)) < CLOSE
    folder = tmp_path / "two"
    folder.mkdir()
    _, results = _run(folder, "sam", UNEVEN, protocol="local-sgd:2")
    assert differ(_weights(results[0]), _weights(results[1])) == 0.0
    assert float(results[0]["losses"][-4:].mean()) < float(results[0]["losses"][:4].mean())


# -- what cannot be carried ------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["lbfgs", "sam", "hooks"])
@pytest.mark.parametrize("protocol", ["async", "k-sync:1", "k-batch-async:2", "ssp:2"])
def test_repeated_closures_are_refused_where_workers_differ_in_version(
    tmp_path: Path, case: str, protocol: str
) -> None:
    name = {"lbfgs": "LBFGS: ", "sam": "closures=True: ", "hooks": "has step hooks"}[case]
    with pytest.raises(ConfigError, match=f"{name}.*--protocol full-sync .*local-sgd"):
        _run(tmp_path, case, protocol=protocol, engine="inline")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("clipped by torch", r"the gradient of '0.weight' was changed.*pace.clip_grad_norm_"),
        ("changed behind torch", "gradients were changed"),
        ("stepped twice by one", "worker 1 begins a step with a closure where worker 0 is at the"),
        ("skipped by one", r"step.skip\(\) is not supported where all workers step .* together"),
        ("left by one", "a mini-batch without a step of its own .* is not supported where"),
        ("not said", r"Sam.step cannot be called without .*prepare\(\.\.\., closures=True\)"),
        ("not said, optional", r"Twice may call the model .*prepare\(\.\.\., closures=True\)"),
    ],
)
def test_unsupported_loops_are_refused_by_name(tmp_path: Path, case: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _run(tmp_path, case, engine="inline")


def test_a_non_finite_gradient_is_named_after_its_evaluation(tmp_path: Path) -> None:
    words = r"worker 1: the gradient of '0.weight' is not finite"
    with pytest.raises(WorkerError, match=words) as caught:
        _run(tmp_path, "not finite")
    assert "--nonfinite skip" not in str(caught.value)  # which is refused with closures


def test_a_lone_worker_names_a_non_finite_gradient() -> None:
    pace = Pace(SoloExchange(), Context())
    pace.worker = 1
    fault = closing.FAULTS["not finite"]
    with pytest.raises(WorkerError, match=r"the gradient of '0.weight' is not finite"):
        closing.train_with(pace, fault)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nonfinite": "skip"}, "--nonfinite skip cannot skip a part"),
        ({"path": "store"}, "average between peers, but path 'store' was asked for"),
        ({"fast": "auto"}, "--fast auto times steps without a closure"),
    ],
)
def test_an_unsupported_setting_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _run(tmp_path, "lbfgs", **settings)


def test_lbfgs_without_a_closure_is_refused() -> None:
    pace, model = Pace(SoloExchange(), Context()), closing.network()
    _, optimizer, _ = pace.prepare(
        model, LBFGS(model.parameters()), torch.utils.data.DataLoader(closing.points(4))
    )
    with pytest.raises(ConfigError, match="this loop gives it no closure"):
        optimizer.step()


# -- ends ------------------------------------------------------------------------------------------


def test_a_death_ends_the_run_and_names_the_cause(tmp_path: Path) -> None:
    fault = ("kill worker 1 at update 5",)
    with pytest.raises(AllGone, match=r"made by all workers together.*--respawn"):
        _run(tmp_path, "lbfgs", workers=3, fault=fault)


def test_respawn_resumes_from_the_checkpoint_with_the_same_result(
    tmp_path: Path,
) -> None:
    settings = {"fault": ("kill worker 1 at update 6",), "respawn": True}
    run, results = _run(tmp_path, "lbfgs", UNEVEN, checkpoint_every="2 updates", **settings)
    assert any("the run begins again from update" in note for note in run.notes)
    for result in results:
        assert differ(_weights(result), _weights(closing.twin("lbfgs", UNEVEN))) < CLOSE


def test_a_resumed_run_keeps_the_optimizer_state(tmp_path: Path) -> None:
    first, _ = _run(tmp_path, "lbfgs", UNEVEN, updates=5)
    assert first.summary.updates == 5
    run, results = _run(tmp_path, "lbfgs", UNEVEN, resume=str(tmp_path / "run"))
    assert run.summary.updates == 4 * closing.EPOCHS
    for result in results:
        assert differ(_weights(result), _weights(closing.twin("lbfgs", UNEVEN))) < CLOSE


@pytest.mark.parametrize("case", ["lbfgs", "sam"])
def test_a_resumed_run_ends_as_one_that_never_stopped(say: Say, tmp_path: Path, case: str) -> None:
    """Wherever in a step the stop comes, the saved optimizers and version belong to one step."""
    words = f"launch --workers 2 --device cpu --run-dir {tmp_path / 'run'} {SCRIPT}"
    with stopped_at(tmp_path / "is-there"):
        code, _, err = say(f"{words} {case} {tmp_path} {UNEVEN} 0.05")
    assert code == 143, err
    resumed = f"launch --workers 2 --resume {tmp_path / 'run'} {SCRIPT}"
    code, _, err = say(f"{resumed} {case} {tmp_path} {UNEVEN}")
    assert code == 0, err
    for path in tmp_path.glob("result-*.pt"):
        assert differ(_weights(torch.load(path)), _weights(closing.twin(case, UNEVEN))) < CLOSE


def test_the_plan_explains_joint_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(QuietObserver, "plan", lambda self, plan: plans.append(plan))
    _run(tmp_path, "sgd, together", engine="inline")
    assert NOTE_OF_CLOSURES in plans[0].notes
    assert plans[0].path == "peers"
