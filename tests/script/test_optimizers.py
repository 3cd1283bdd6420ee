"""Several models and optimizers in one script: a GAN, a WGAN, an actor and its critic.

The protocol decides what a step is: one worker, and full-sync, take step after step as plain
PyTorch does; local-sgd does so on every worker; elsewhere the steps of a block are one update.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import several
from meanwhile import stopped_at
from paceline.context import Context
from paceline.errors import ConfigError, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.script.closures import context_with
from paceline.script.step import zero_grad_of
from paceline.script.worker import Pace
from paceline.store.optimizer_copy import own_memory, reads_others
from reference import differ
from runs import Run, run_script

CLOSE = 1e-6
Say = Callable[[str], tuple[int, str, str]]
SCRIPT = Path(several.__file__)
PLACES = [{"engine": "inline"}, {"path": "store"}, {"path": "peers"}]
LOADED_LATE = """
import contextlib, sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

where, case = sys.argv[1:]
torch.manual_seed(0)
models = [nn.Linear(2, 1), nn.Linear(2, 1)]
optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.5, momentum=0.9),
              torch.optim.Adam(models[1].parameters(), lr=0.1)]
loader = DataLoader(TensorDataset(torch.arange(24.0).view(12, 2) / 24), 4)
if "one" in case:
    models, optimizers = models[1:], optimizers[1:]
if "plain" in case:
    epochs = range(3)
else:
    pace = paceline.connect()
    *made, loader = pace.prepare(*models, *optimizers, loader)
    models, optimizers, epochs = made[:len(models)], made[len(models):], pace.epochs(3)
saved = optimizers[-1].state_dict()
saved["param_groups"][0]["lr"] = 1e-3
optimizers[-1].load_state_dict(saved)
if case == "hook":
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: None)
if case == "other":
    optimizers[0].param_groups[0]["params"] = list(models[0].parameters())
seen = []
for epoch in epochs:
    for (x,) in loader:
        with contextlib.nullcontext() if "plain" in case else pace.step():
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
        state = optimizers[-1].state_dict()
        seen.append(state["state"][0]["exp_avg"].clone())
    optimizers[-1].param_groups[0]["lr"] *= 0.5
if "plain" in case or pace.is_main:
    weights = [one.detach().clone() for model in models for one in model.parameters()]
    torch.save({str(n): one for n, one in enumerate([*weights, *seen])}, where)
"""


def _run(
    folder: Path, case: str, blocks: int, slow_s: float = 0.0, **settings: Any
) -> tuple[Run, list[dict[str, Tensor]]]:
    """A run, and each worker's result."""
    words = [case, str(folder), str(blocks), str(slow_s)]
    run = run_script(SCRIPT, folder, *words, **{"workers": 2, "seed": 5, **settings})
    return run, [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]


@pytest.mark.parametrize("case", several.CASES)
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(case: str) -> None:
    result = several.train(Pace(SoloExchange(), Context(seed=5)), case, 12)
    assert differ(result, several.twin(case, 5, 12, 1)) == 0.0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("case", several.CASES)
def test_full_sync_matches_plain_pytorch(
    tmp_path: Path, case: str, workers: int, where: dict[str, str]
) -> None:
    run, results = _run(tmp_path, case, 7, workers=workers, protocol="full-sync", **where)
    assert len(results) == workers
    for result in results:
        assert differ(result, several.twin(case, 5, 7, workers)) < CLOSE
    assert run.used() == [Counter(range(7 * workers))]
    assert run.summary.updates == {"gan": 14, "wgan": 8, "actor": 14}[case]
    assert run.summary.dropped_samples == 0


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_local_steps_match_averaged_plain_workers(tmp_path: Path, where: dict[str, str]) -> None:
    _, results = _run(tmp_path, "gan", 5, protocol="local-sgd:2", **where)
    twin = several.local_twin("gan", 5, 5, workers=2, num_steps=2)
    for result, its in zip(results, twin, strict=True):
        assert differ(result, its) < CLOSE


@pytest.mark.parametrize("case", ["gan", "actor"])
def test_the_steps_of_a_block_in_one_update_use_one_version(tmp_path: Path, case: str) -> None:
    run, results = _run(tmp_path, case, 9, protocol="k-sync:2")
    for result in results:
        assert differ(result, several.twin(case, 5, 9, 2, is_at_once=True)) < CLOSE
    assert run.summary.updates == 9


@pytest.mark.parametrize("engine", ["inline", "local"])
@pytest.mark.parametrize(
    ("protocol", "parts"),
    [("k-sync:1", 1), ("k-batch-sync:2", 2), ("k-async:2", 2), ("k-batch-async:2", 2),
     ("async", 1), ("stale-synchronous:1", 1), ("adaptive-local:2", 0), ("adaptive", 0)],
)  # fmt: skip
def test_every_protocol_uses_each_number_once(
    tmp_path: Path, engine: str, protocol: str, parts: int
) -> None:
    run, results = _run(tmp_path, "wgan", 12, engine=engine, workers=3, protocol=protocol)
    assert run.summary.updates == 12
    assert all(set(used.values()) == {1} for used in run.used())
    assert not parts or run.used() == [Counter(range(12 * parts))]
    weights = [{k: v for k, v in result.items() if ":" not in k} for result in results]
    assert all(differ(one, other) < CLOSE for one, other in pairwise(weights))
    assert all(bool(value.isfinite().all()) for value in weights[0].values())


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_resumed_run_ends_as_one_that_never_stopped(say: Say, tmp_path: Path, path: str) -> None:
    words = f"launch --workers 2 --device cpu --seed 5 --run-dir {tmp_path / 'run'}"
    with stopped_at(tmp_path / "is-there"):
        code, _, err = say(f"{words} --path {path} {SCRIPT} gan {tmp_path} 40 0.02")
    assert code == 143, err
    code, _, err = say(
        f"launch --workers 2 --resume {tmp_path / 'run'} {SCRIPT} gan {tmp_path} 40 0"
    )
    assert code == 0, err
    assert differ(torch.load(tmp_path / "result-0.pt"), several.twin("gan", 5, 40, 2)) < CLOSE


def test_a_death_loses_no_number(tmp_path: Path) -> None:
    run, _ = _run(
        tmp_path, "gan", 40, slow_s=0.01, protocol="k-batch-async:2", respawn=True,
        fault=("kill worker 1 at update 9", "kill worker 0 at update 25"),
    )  # fmt: skip
    assert len(run.left) == 2
    assert run.used() == [Counter(range(80))]


def test_a_lockstep_run_with_respawn_restarts_from_its_checkpoint(tmp_path: Path) -> None:
    run, results = _run(
        tmp_path, "gan", 30, slow_s=0.02, protocol="full-sync", respawn=True,
        checkpoint_every="5 updates", fault=("kill worker 1 at update 31",),
    )  # fmt: skip
    assert differ(results[0], several.twin("gan", 5, 30, 2)) < CLOSE
    assert run.used() == [Counter(range(60))]


def test_a_lockstep_run_without_respawn_ends_at_a_death(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"of several optimizers is an update of all workers, and"
    ):
        _run(
            tmp_path,
            "gan",
            30,
            slow_s=0.02,
            protocol="full-sync",
            fault=("kill worker 1 at update 9",),
        )


def test_lockstep_workers_must_step_the_same_optimizers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers 0 and 1 stepped different optimizers"):
        _run(tmp_path, "by turns", 4, protocol="full-sync", path="store")


def test_each_of_several_models_can_be_saved_separately(tmp_path: Path) -> None:
    pace = Pace(SoloExchange(), Context(run_dir=str(tmp_path)))
    parts = several.Parts.of_gan()
    pace.prepare(*parts.models, *parts.optimizers)
    one, every = pace.save("one.safetensors", model=parts.models[1]), pace.save()
    assert load_file(one).keys() == parts.models[1].state_dict().keys()
    names = {f"{i}.{name}" for i, model in enumerate(parts.models) for name in model.state_dict()}
    assert load_file(every).keys() == names
    with pytest.raises(ConfigError, match=r"was given a Linear that prepare\(\) was not"):
        pace.save(model=torch.nn.Linear(1, 1))


def test_state_loaded_into_one_optimizer_is_used(tmp_path: Path) -> None:
    """Before the first epoch, of one optimizer of two."""
    _, results = _run(tmp_path, "loading", 3, engine="inline", protocol="full-sync")
    assert float(results[0]["0:0.step"]) == 103.0
    assert "1:0.momentum_buffer" in results[0]


def _loaded_late(folder: Path, case: str, **settings: Any) -> dict[str, Tensor]:
    (folder / "train.py").write_text(LOADED_LATE)
    words = (str(folder / "found.pt"), case)
    run_script(folder / "train.py", folder, *words, **{"workers": 2, **settings})
    result: dict[str, Tensor] = torch.load(folder / "found.pt")
    return result


@pytest.mark.parametrize(
    ("case", "path"), [("two", "store"), ("two", "peers"), ("one", "peers"), ("one", "collective")]
)
def test_late_settings_and_state_in_an_epoch_match_plain_pytorch(
    tmp_path: Path, case: str, path: str
) -> None:
    result = _loaded_late(tmp_path, case, protocol="full-sync", path=path)
    words = [sys.executable, "train.py", "plain.pt", f"plain-{case}"]
    subprocess.run(words, check=True, timeout=60, cwd=tmp_path)
    assert differ(result, torch.load(tmp_path / "plain.pt")) < CLOSE


@pytest.mark.parametrize(
    ("case", "words"),
    [("hook", "hooks on the steps of all optimizers"), ("other", r"\['params'\] was changed")],
)
def test_shared_step_changes_and_other_parameters_are_refused_after_prepare(
    tmp_path: Path, case: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _loaded_late(tmp_path, case, protocol="k-sync:2", workers=2)


def test_steps_outside_a_block_are_refused_where_a_block_is_an_update(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="call step\\(\\) inside"):
        _run(tmp_path, "outside", 3, engine="inline", protocol="k-sync:1")


def test_blocks_are_counted_where_each_step_is_a_version() -> None:
    pace = Pace(SoloExchange(), Context(seed=5))
    parts = several.Parts.of_gan()
    pace.prepare(*parts.models, *parts.optimizers)
    versions = []
    for blocks in (4, 4, 8):
        for number in pace.updates(blocks):
            with pace.step():
                several.block(parts, several.CASES["gan"][1], number)
        versions.append(pace.version)
    assert versions == [8, 8, 16]


class Wrapper(torch.optim.Optimizer):
    """A user's optimizer: clips, and lets another one step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.01)
        return self.inner.step()


def _wrapped(model: nn.Module) -> Wrapper:
    return Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_an_optimizer_that_wraps_another_steps_with_it_or_is_refused() -> None:
    """The check does not step it."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.clone()
    optimizer = _wrapped(model)
    assert own_memory(optimizer) == "self.inner"
    assert torch.equal(model.weight, before)
    together = context_with(
        Context(is_spmd=True, workers=2), [optimizer], asked=False, has_others=True
    )
    assert together.steps_together
    with pytest.raises(ConfigError, match=r"Wrapper steps another optimizer, self\.inner, but"):
        context_with(Context(is_spmd=False), [optimizer], asked=False, has_others=True)


class Own(torch.optim.SGD):
    """A user's optimizer: a step of SGD, and ``also``."""

    def __init__(self, parameters: Any, also: Callable[[Any], None]) -> None:
        super().__init__(parameters, lr=0.1)
        self.also, self.seen, self.counts = also, torch.zeros(()), [0]

    def step(self, closure: Any = None) -> Any:
        self.also(self)
        return super().step(closure)


def _in_a_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["t"] = optimizer.param_groups[0].get("t", 0) + 1


def _in_an_attribute(optimizer: Any) -> None:
    optimizer.t = getattr(optimizer, "t", 0) + 1


def _in_a_tensor(optimizer: Any) -> None:
    optimizer.seen += 1


def _in_a_list(optimizer: Any) -> None:
    optimizer.counts.append(1)


def _in_no_parameters_state(optimizer: Any) -> None:
    optimizer.state["all"] = {"t": 1}


def _late_in_the_state(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if optimizer.state[parameter].setdefault("t", torch.zeros(())).add_(1) > 1:
            optimizer.state[parameter]["slow"] = parameter.detach().clone()


def _by_the_norm(optimizer: Any) -> None:
    held = [each for group in optimizer.param_groups for each in group["params"]]
    nn.utils.clip_grad_norm_(held, 0.01)


def _nothing(optimizer: Any) -> None:
    return


@pytest.mark.parametrize(
    ("also", "memory", "reads"),
    [
        (_in_a_group, "group['t']", False),
        (_in_an_attribute, "self.t", False),
        (_in_a_tensor, "self.seen", False),
        (_in_a_list, "self.counts", False),
        (_in_no_parameters_state, "self.state['all']", False),
        (_late_in_the_state, "self.state[p]['slow']", False),
        (_by_the_norm, "", True),
        (_nothing, "", False),
    ],
)
def test_a_custom_optimizers_hidden_state_is_detected(
    also: Callable[[Any], None], memory: str, reads: bool
) -> None:
    """The check leaves it, its parameters and the random state unchanged."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = Own(model.parameters(), also)
    before = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    assert (own_memory(optimizer), reads_others(optimizer)) == (memory, reads)
    assert all(map(torch.equal, before[0], model.parameters()))
    assert torch.equal(before[1], torch.get_rng_state())
    assert (optimizer.seen, optimizer.counts, "t" in optimizer.__dict__) == (0, [0], False)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_over_all_is_detected_however_little_a_weight_moves(dtype: torch.dtype) -> None:
    """As of RMSNorm's ones in a model without biases, which are its smallest parameters."""
    model = nn.Sequential(*(nn.RMSNorm(768, dtype=dtype) for _ in range(2)))
    optimizer = Own(model.parameters(), _by_the_norm)
    optimizer.param_groups[0]["lr"] = 3e-4
    assert reads_others(optimizer)
    assert not reads_others(Own(model.parameters(), _nothing))


def test_a_trial_step_may_give_nan() -> None:
    parameter = nn.Parameter(torch.tensor([-torch.inf, 1.0]))
    assert not reads_others(Own([parameter, nn.Parameter(torch.ones(3))], _nothing))


def test_zero_grad_clears_as_torch_does_and_is_profiled() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    clear = zero_grad_of(optimizer)
    parameter.grad = torch.ones(2)
    clear(set_to_none=False)
    assert torch.equal(parameter.grad, torch.zeros(2))
    clear()
    assert parameter.grad is None
    with torch.autograd.profiler.profile() as seen:
        clear()
    assert any("zero_grad" in event.key for event in seen.key_averages())


def test_a_custom_zero_grad_is_called() -> None:
    class Counts(torch.optim.SGD):
        num_cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.num_cleared += 1
            super().zero_grad(set_to_none)

    optimizer = Counts([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    zero_grad_of(optimizer)()
    assert optimizer.num_cleared == 1


WITHOUT_RATE = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

class Descent(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"step_size": 0.1} | EXTRA)

    @torch.no_grad()
    def step(self, closure=None, **options):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["step_size"])

pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, Descent(model.parameters()), loader)
for epoch in pace.epochs(2):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.parametrize("extra", ["{}", "{'lr': None}"])
def test_an_optimizer_without_a_learning_rate_trains(tmp_path: Path, extra: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_RATE.replace("EXTRA", extra))
    run = run_script(script, tmp_path, workers=2, engine="inline")
    assert run.summary.updates == 6


@pytest.mark.parametrize(("given", "named"), [("bs=4", "bs=..."), ("4", "4"), ("None, 4", "4")])
def test_a_step_with_more_than_a_closure_is_refused(tmp_path: Path, given: str, named: str) -> None:
    script = tmp_path / "train.py"
    text = WITHOUT_RATE.replace("EXTRA", "{}").replace(
        "optimizer.step()", f"optimizer.step({given})"
    )
    script.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"step\(\) is called with {named}, which does not reach"
    ):
        run_script(script, tmp_path, workers=2, engine="inline")


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_steps_inside_an_iteration_that_is_not_over_are_refused(
    tmp_path: Path, protocol: str
) -> None:
    script = tmp_path / "train.py"
    text = WITHOUT_RATE.replace("EXTRA", "{}")
    script.write_text(text.replace("for epoch in", "seen = iter(loader)\nnext(seen)\nfor epoch in"))
    with pytest.raises(ConfigError, match="of a second iteration over the prepared loader"):
        run_script(script, tmp_path, workers=2, engine="inline", protocol=protocol)
