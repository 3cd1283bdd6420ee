"""A run gives the same result with any speed settings, set by hand or by a trial."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loops
import runs
import speeds
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.speed import Speed
from paceline.tuning import fast, trial
from paceline.tuning.candidate import Feed
from paceline.tuning.candidates import ChannelsLast, CopiesAhead, LoaderWorkers, OptimizerKernel
from reference import differ
from runs import Run, run_script
from subjects import subject
from tiny import TASK

CLOSE = 1e-6
SCRIPT = Path(speeds.__file__)
PROTOCOLS = ["full-sync", "k-batch-sync:2", "k-batch-async:2", "async", "local-sgd:2"]


def _run(folder: Path, case: str = "train", **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run = run_script(SCRIPT, folder, case, str(folder), **settings)
    return run, [torch.load(folder / f"{case}-{n}.pt") for n in range(settings["workers"])]


def _plain(is_channels_last: bool = False, case: str = "train") -> dict[str, Tensor]:
    results = speeds.CASES[case](loops.Plain())
    return {**results, "channels last": torch.tensor(float(is_channels_last))}


@pytest.mark.parametrize(
    "where", [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}, {"path": "collective"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("case", ["train", "loaded"])
def test_store_keeps_strides_and_values(tmp_path: Path, case: str, where: dict[str, Any]) -> None:
    _, results = _run(tmp_path, case, channels_last=True, **where)
    plain = _plain(is_channels_last=True, case=case)
    for result in results:
        # Between accelerators the optimizer state is in the store only after they leave.
        names = set(plain) if where != {"path": "collective"} else set(plain) & set(result)
        assert {"0.weight", "channels last"} <= names
        assert differ({n: result[n] for n in names}, {n: plain[n] for n in names}) < CLOSE


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_compiled_model_works_under_every_protocol(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured graph is run directly: generated code is torch's responsibility."""
    original, calls = torch.compile, []

    def captured(function: Any, *, dynamic: bool, **_: Any) -> Any:
        def backend(graph: Any, _: Any) -> Any:
            def run(*arguments: Any) -> Any:
                calls.extend(
                    len(argument) for argument in arguments if argument.shape[1:] == (2, 6, 6)
                )
                return graph.forward(*arguments)

            return run

        return original(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", captured)
    torch._dynamo.reset()
    settings = {"protocol": protocol, "engine": "inline"}
    _, eager = _run(tmp_path / "eager", **settings)
    assert not calls
    _, results = _run(tmp_path / "compiled", compile="default", **settings)
    # The last batch of an epoch, of 4 samples, runs eagerly.
    assert set(calls) == {6 if protocol in ("full-sync", "k-batch-sync:2", "k-batch-async:2",
                                            "local-sgd:2") else 12}  # fmt: skip
    for first, second in zip(results, eager, strict=True):
        assert differ(first, second) < CLOSE


def test_compiled_worker_is_cancelled_between_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda one, dynamic, **_: original(one, backend="eager", dynamic=dynamic)
    )
    run, _ = _run(tmp_path, compile="default", protocol="k-sync:1", engine="inline")
    assert run.superseded
    assert run.summary.updates > 0


def test_trial_runs_once_and_all_workers_use_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fast, "CANDIDATES", (OptimizerKernel(), ChannelsLast()))
    made: list[int] = []
    original = fast.try_all

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return original(*arguments)

    monkeypatch.setattr(fast, "try_all", counted)
    for number in range(2):
        run, results = _run(tmp_path / str(number), fast="auto", engine="inline")
        is_last = float(results[0]["channels last"])
        for result in results:
            assert differ(result, _plain(bool(is_last))) < CLOSE
        assert run.summary.could_try == ()
    assert made == [1]


def test_run_without_a_trial_names_untried_options(tmp_path: Path) -> None:
    run, _ = _run(tmp_path, engine="inline")
    assert "channels last" in run.summary.could_try
    assert "optimizer" not in run.summary.could_try  # the store has kernels of its own
    assert "loader workers" not in run.summary.could_try  # the script's loader has none
    task = runs.train(TASK, tmp_path / "task", workers=2, engine="inline")
    assert "loader workers" in task.summary.could_try


def test_deterministic_run_names_only_options_it_would_try() -> None:
    usual, repeatable = (
        fast.settle(subject(), speeds.loader(), Context(deterministic=is_on), "none").could_try
        for is_on in (False, True)
    )
    assert {"threads", "channels last"} & {*usual}
    assert {*repeatable} == {*usual} & {"keep memory", "loader workers", "ahead"}


class Addressed(torch.nn.Sequential):
    """A model whose repr contains the address of an object."""

    def __init__(self, activation: object) -> None:
        super().__init__(speeds.network())
        self.activation = activation

    def extra_repr(self) -> str:
        return repr(self.activation)


def test_outcome_key_ignores_object_addresses() -> None:
    models = [Addressed(object()), Addressed(object())]
    assert repr(models[0]) != repr(models[1])
    keys = {fast._key(subject(model), speeds.loader(), Context(), Speed(), ()) for model in models}
    assert len(keys) == 1


def test_script_under_plain_python_may_request_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fast, "CANDIDATES", (OptimizerKernel(), ChannelsLast()))
    alone = speeds.train(Pace(SoloExchange(), Context()), fast="auto")
    assert differ(alone, _plain(bool(alone["channels last"]))) < CLOSE
    assert "fast: measured in" in capsys.readouterr().out


def test_model_a_trial_cannot_call_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fails(model: Any, batch: Any) -> Tensor:
        raise TypeError("forward() missing 1 required argument: 'mask'")

    pace = Pace(SoloExchange(), Context())
    with pytest.raises(ConfigError, match=r"'mask'; say how the loop computes its loss.*forward="):
        speeds.train(pace, fast="auto", forward=fails)


def test_layer_may_unfreeze_with_a_fused_optimizer_alone() -> None:
    result = speeds.train(Pace(SoloExchange(), Context(fused_optimizer=True)), thaws=True)
    assert differ(result, _plain(case="thawing")) < CLOSE


def test_layer_may_unfreeze_with_fused_optimizers_of_local_steps(tmp_path: Path) -> None:
    settings = {"workers": 1, "protocol": "local-sgd:4", "fused_optimizer": True}
    _, (result,) = _run(tmp_path, "thawing", engine="inline", **settings)
    assert differ(result, _plain(case="thawing")) < CLOSE


@pytest.mark.parametrize("is_chosen", [True, False])
def test_loaded_momentum_stays_with_its_elements(is_chosen: bool) -> None:
    context = Context(fused_optimizer=True, channels_last=is_chosen)
    result = speeds.train(Pace(SoloExchange(), context), is_loaded=True)
    assert differ(result, _plain(is_chosen, "loaded")) < CLOSE


def test_data_without_loader_workers_stays_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes by its loop would not reach other processes, and draws would differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fast, "CANDIDATES", (LoaderWorkers(), CopiesAhead()))
    monkeypatch.setattr(trial, "compare", lambda *_: [2.0])  # every option is twice as fast
    original, results = fast.try_all, []

    def noted(*arguments: Any) -> Any:
        results.append(original(*arguments))
        return results[-1]

    monkeypatch.setattr(fast, "try_all", noted)
    _run(tmp_path, fast="auto", engine="inline")
    speeds.train(Pace(SoloExchange(), Context()), fast="auto")
    assert [result.speed.loader_workers for result in results] == [-1, -1]
    for one in results:
        assert "a higher num_workers may hide it" in " ".join(one.lines())


@pytest.mark.parametrize(("size", "wanted"), [(12, 12), (64, speeds.NUM_SAMPLES)])
@pytest.mark.parametrize("speed", [Speed(), Speed(loader_workers=1), Speed(ahead=True)], ids=str)
def test_trial_feed_is_endless_with_batches_of_one_size(
    size: int, wanted: int, speed: Speed
) -> None:
    batches = Feed(speeds.loader(), range(speeds.NUM_SAMPLES), size, torch.device("cpu"))(speed)
    assert [len(next(batches)[0]) for _ in range(5)] == [wanted] * 5


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (Context(compile="default"), r"--compile default needs a C\+\+ compiler"),
        (Context(precision="auto"), "precision auto lets a trial.*add --fast auto"),
        (Context(fused_optimizer=True), "Rprop has no fused kernel; leave --fused-optimizer out"),
    ],
    ids=["no compiler", "no trial", "no kernel"],
)
def test_unavailable_options_are_refused_by_name(
    context: Context, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    model = speeds.network()
    with pytest.raises(ConfigError, match=words):
        Pace(SoloExchange(), context).prepare(
            model, torch.optim.Rprop(model.parameters()), speeds.loader()
        )
