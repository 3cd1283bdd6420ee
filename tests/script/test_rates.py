"""A scaled rate is that of a plain loop, a warm-up is a plain scheduler; the plan shows both."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

import runs
from paceline.checkpoints.resumption import adopt
from paceline.config import RunSettings, resolve
from paceline.context import Context
from paceline.errors import ConfigError, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.fields import Length, read_length
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.replay import replay
from paceline.replica.rates import RateScaling, Warmup, ramp, scale
from paceline.report.live import QuietObserver
from paceline.script.worker import Pace
from paceline.verification.plain import Order, State, _batches, fresh, state_of
from paceline.workloads.base import Task
from reference import differ, plain_loop
from tiny import BATCH_SIZE, NUM_SAMPLES, TASK

CLOSE = 1e-12
INLINE, PEERS = {"engine": "inline"}, {"engine": "local", "path": "peers"}


def warmed_loop(task: Task, lr: float, num_steps: int, start: float) -> State:
    """Plain PyTorch with LambdaLR."""
    model, optimizer = fresh(task, lr)
    schedule = lr_scheduler.LambdaLR(
        optimizer, lambda step: start + (1 - start) * min(1.0, step / num_steps)
    )
    order = Order(task)
    for epoch in range(task.epochs):
        for lease in _batches(NUM_SAMPLES, task.batch_size, epoch):
            inputs, targets = order.batch(lease)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    return state_of(model)


# -- tasks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5), ("none", 1.0)])
@pytest.mark.parametrize("where", [INLINE, PEERS])
def test_a_tasks_rate_is_scaled_by_the_samples_of_an_update(
    tmp_path: Path, where: dict[str, Any], kind: str, factor: float
) -> None:
    run = runs.train(TASK, tmp_path, workers=2, mini_batch_size=BATCH_SIZE, scale_lr=kind, **where)
    large = replace(TASK, batch_size=2 * BATCH_SIZE)
    assert differ(run.state, plain_loop(large, lr=factor * TASK.learning_rate)) < CLOSE


def test_a_global_batch_needs_no_scaling_with_any_number_of_workers(tmp_path: Path) -> None:
    run = runs.train(TASK, tmp_path, workers=3, scale_lr="linear", **INLINE)
    assert differ(run.state, plain_loop(TASK)) < CLOSE


@pytest.mark.parametrize("where", [INLINE, PEERS, {**INLINE, "protocol": "k-sync:2"}], ids=str)
def test_a_warm_up_is_a_scheduler_stepped_once_an_update(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    run = runs.train(TASK, tmp_path, workers=2, warmup="4", **where)
    assert differ(run.state, warmed_loop(TASK, TASK.learning_rate, 4, 0.25)) < CLOSE


def test_a_warm_up_of_epochs_begins_at_the_unscaled_rate(tmp_path: Path) -> None:
    run = runs.train(
        TASK, tmp_path, workers=2, mini_batch_size=BATCH_SIZE, scale_lr="linear", warmup="1.5ep",
        **INLINE,
    )  # fmt: skip
    large = replace(TASK, batch_size=2 * BATCH_SIZE)
    num_steps = round(1.5 * -(-NUM_SAMPLES // (2 * BATCH_SIZE)))
    assert differ(run.state, warmed_loop(large, 2 * TASK.learning_rate, num_steps, 0.5)) < CLOSE


def test_asynchronous_workers_warm_up_by_version(tmp_path: Path) -> None:
    run = runs.train(TASK, tmp_path, workers=1, protocol="async", warmup="4", **INLINE)
    assert differ(run.state, warmed_loop(TASK, TASK.learning_rate, 4, 0.25)) < CLOSE


def test_a_local_sgd_update_has_several_warm_up_steps(tmp_path: Path) -> None:
    run = runs.train(TASK, tmp_path, workers=1, protocol="local-sgd:2", warmup="2", **INLINE)
    assert differ(run.state, warmed_loop(TASK, TASK.learning_rate, 4, 0.25)) < CLOSE


@pytest.mark.parametrize("where", [INLINE, PEERS])
def test_a_resumed_run_has_the_rates_of_one_that_never_stopped(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    chosen = {
        "workers": 2, "mini_batch_size": BATCH_SIZE, "scale_lr": "linear", "warmup": "5", **where,
    }  # fmt: skip
    whole = runs.train(TASK, tmp_path / "whole", **chosen)
    folder = str(tmp_path / "cut")
    go(**chosen, run_dir=folder, updates=3)
    go(resume=folder, updates=10**6)
    state = runs.load_file(tmp_path / "cut" / "model.safetensors")
    assert differ(state, whole.state) == 0.0


def go(**settings: Any) -> None:
    fixed = {"device": "cpu", "threads": 1}
    chosen = adopt(resolve({**fixed, **settings}, env={}, is_call=True))
    launcher.launch_run(TaskProgram(task=TASK), chosen, QuietObserver())


def test_a_run_cannot_be_resumed_with_another_scaling(tmp_path: Path) -> None:
    folder = str(tmp_path / "cut")
    go(engine="inline", workers=2, run_dir=folder, updates=3)
    with pytest.raises(ConfigError, match="scale_lr = linear: it has none"):
        go(resume=folder, scale_lr="linear")


def test_a_run_with_a_warm_up_cannot_be_replayed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    launcher.train("quadratic", workers=2, updates=5, warmup="3", engine="inline", run_dir="run")
    with pytest.raises(ConfigError, match="--warmup 3"):
        replay(Path("run"))


def test_the_plan_shows_scaling_and_warm_up(tmp_path: Path) -> None:
    observer = QuietObserver()
    settings = RunSettings(
        workers=2, engine="inline", device="cpu", dry_run=True, mini_batch_size=24,
        scale_lr="linear", warmup="2ep",
    )  # fmt: skip
    launcher.launch_run(TaskProgram(task=TASK), settings, observer)
    assert observer.shown_plan is not None
    text = "\n".join(observer.shown_plan.render())
    assert (
        "learning rate 1.2 = 0.3 x 4 (--scale-lr linear: an update averages 48 samples, it was "
        "chosen for 12)"
    ) in text
    assert "learning rate from 0.3 to 1.2 over the first 4 updates (--warmup 2ep)" in text


# -- scripts ---------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(0)
model = nn.Linear(6, 3).double()
optimizer = SGD([{{"params": [model.weight]}}, {{"params": [model.bias], "lr": 0.05}}], lr=0.1)
inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1)).double()
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=8)
scheduler = {scheduler}
objects = [model, optimizer, loader]
if scheduler is not None and {is_prepared}:
    objects.append(scheduler)
{prepare}
rates = []
for epoch in pace.epochs(2):
    for x, y in loader:
        with pace.step():
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            {inside}
    if scheduler is not None:
        scheduler.step()
if pace.is_main:
    torch.save(rates, "rates.pt")
"""
BY_HAND = "_ = len(rates) % 2 or (optimizer.step(), optimizer.zero_grad())"
EACH = 'pace.prepare(*objects, batch="per-worker")'


@pytest.fixture
def rates_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[float]]]:
    """Run the script, and the rates of its steps."""
    monkeypatch.chdir(tmp_path)

    def run(
        scheduler: str = "",
        inside: str = "",
        *,
        is_prepared: bool = True,
        accumulates: bool = False,
        **settings: Any,
    ) -> list[list[float]]:
        prepare = f"_, _, loader, *_ = {EACH}"
        text = SCRIPT.format(
            scheduler=scheduler or None,
            is_prepared=is_prepared,
            inside=inside or "pass",
            prepare=prepare,
        )
        if accumulates:
            text = text.replace("            optimizer.zero_grad()\n", "")
            text = text.replace("optimizer.step()", BY_HAND)
        (tmp_path / "train.py").write_text(text)
        chosen = {"workers": 2, "engine": "inline", **settings}
        runs.run_script(tmp_path / "train.py", tmp_path, **chosen)
        result: list[list[float]] = torch.load(tmp_path / "rates.pt")
        return result

    return run


def test_every_parameter_group_of_a_script_is_scaled(
    rates_of: Callable[..., list[list[float]]],
) -> None:
    assert rates_of(scale_lr="linear") == [[0.2, 0.1]] * 6


def test_a_prepared_scheduler_continues_from_the_scaled_rate(
    rates_of: Callable[..., list[list[float]]],
) -> None:
    result = rates_of("lr_scheduler.StepLR(optimizer, 1, gamma=0.5)", scale_lr="linear")
    assert result == [[0.2, 0.1]] * 3 + [[0.1, 0.05]] * 3


@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:1"])
@pytest.mark.parametrize(
    "scheduler",
    [
        "lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** epoch)",
        "lr_scheduler.SequentialLR(optimizer, milestones=[5], schedulers=["
        "lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** epoch), "
        "lr_scheduler.ConstantLR(optimizer)])",
    ],
    ids=["one", "chain"],
)
def test_an_unprepared_scheduler_continues_from_the_scaled_rate(
    rates_of: Callable[..., list[list[float]]], scheduler: str, protocol: str
) -> None:
    result = rates_of(scheduler, is_prepared=False, scale_lr="linear", protocol=protocol)
    assert result == [[0.2, 0.1]] * 3 + [[0.1, 0.05]] * 3


def test_an_unprepared_scheduler_with_its_own_rates_is_refused(
    rates_of: Callable[..., list[list[float]]],
) -> None:
    with pytest.raises((ConfigError, WorkerError), match="the rates of OneCycleLR"):
        rates_of(
            "lr_scheduler.OneCycleLR(optimizer, 0.5, 99)", is_prepared=False, scale_lr="linear"
        )


def test_a_script_warms_up_in_each_parameter_group(
    rates_of: Callable[..., list[list[float]]],
) -> None:
    results = rates_of(scale_lr="linear", warmup="4")
    wanted = [0.1, 0.125, 0.15, 0.175, 0.2, 0.2]
    for rates, rate in zip(results, wanted, strict=True):
        assert rates == pytest.approx([rate, rate / 2])


@pytest.mark.parametrize(
    ("scheduler", "inside", "settings", "words"),
    [
        (
            "lr_scheduler.OneCycleLR(optimizer, 0.5, 99)", "", {"scale_lr": "linear"},
            "the rates of OneCycleLR",
        ),
        (
            "lr_scheduler.CosineAnnealingLR(optimizer, 9, eta_min=0.01)", "",
            {"scale_lr": "linear"}, "a minimum rate",
        ),
        (
            "lr_scheduler.StepLR(optimizer, 1)", "", {"warmup": "4"}, "and so does StepLR",
        ),
        (
            "", 'optimizer.param_groups[0]["lr"] = 0.01', {"warmup": "4"},
            "the script has set it to 0.01",
        ),
        ("", "", {"scale_lr": "linear", "protocol": "adaptive"}, "update averages is not fixed"),
        ("", "", {"warmup": "4", "protocol": "adaptive-local:2"}, "give epochs"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_unsupported_settings_are_refused_by_name(
    rates_of: Callable[..., list[list[float]]],
    scheduler: str,
    inside: str,
    settings: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises((ConfigError, WorkerError), match=words):
        rates_of(scheduler, inside, **settings)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:1"])
def test_a_warm_up_of_epochs_is_refused_where_steps_per_epoch_are_unknown(
    rates_of: Callable[..., list[list[float]]], workers: int, protocol: str
) -> None:
    """The number of updates in an epoch is unknown then."""
    with pytest.raises((ConfigError, WorkerError), match="1ep: this script does not step its opt"):
        rates_of(warmup="1ep", workers=workers, protocol=protocol, accumulates=True)


def test_a_warm_up_of_updates_works_with_accumulation_by_hand(
    rates_of: Callable[..., list[list[float]]],
) -> None:
    results = rates_of(warmup="1", workers=1, accumulates=True)
    assert results[-1] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("every", [1, 2])
def test_a_lone_worker_gets_the_same_refusals(every: int) -> None:
    pace = Pace(SoloExchange(), Context(device="cpu", warmup="1ep"))
    model, data = nn.Linear(2, 1), [torch.ones(2) for _ in range(8)]
    model, optimizer, loader = pace.prepare(
        model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)
    )

    def train() -> None:
        for number, inputs in enumerate(loader):
            with pace.step():
                model(inputs).square().mean().backward()
                if number % every == every - 1:
                    optimizer.step()
                    optimizer.zero_grad()

    if every == 1:
        train()
        return
    with pytest.raises(ConfigError, match=r"--warmup 1ep: .*--warmup 200, or .*--accumulate N"):
        train()


# -- the parts -------------------------------------------------------------------------------------


def test_a_length_is_read_as_epochs_or_updates() -> None:
    assert read_length("5ep") == Length(5.0, 0)
    assert read_length("0.5ep") == Length(0.5, 0)
    assert read_length("200") == Length(0.0, 200)
    assert read_length(None) is None


@pytest.mark.parametrize("text", ["0", "0ep", "-3", "2.5", "5 epochs", "ep", "", "1e3", "nan"])
def test_an_invalid_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="5ep"):
        RunSettings(warmup=text)


def test_a_refused_scheduler_leaves_the_rates_unchanged() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    cycle = lr_scheduler.CyclicLR(optimizer, 0.1, 0.5)
    with pytest.raises(ConfigError, match="CyclicLR"):
        scale([optimizer], [cycle], 2.0)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_chained_schedulers_are_scaled_and_a_tensor_rate_stays_the_same_object() -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = SGD(model.parameters(), lr=rate)
    chain = lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    )
    scale([optimizer], [chain], 4.0)
    assert optimizer.param_groups[0]["lr"] is rate
    results = []
    for _ in range(4):
        results.append(float(rate))
        optimizer.step()
        chain.step()
    assert results == pytest.approx([0.2, 0.3, 0.4, 0.2])


def test_a_rate_tensor_shared_by_groups_is_scaled_once() -> None:
    model, rate = nn.Linear(2, 2), torch.tensor(0.1)
    optimizer = SGD([{"params": [parameter]} for parameter in model.parameters()], lr=rate)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scale([optimizer], [schedule], 4.0)
    assert float(rate) == pytest.approx(0.4)
    optimizer.step()
    schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 0.4])


def test_a_warm_up_ends_at_the_optimizers_current_rate() -> None:
    """Also where its state was loaded, and has the first rate of another run."""
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 10.0
    assert Warmup(optimizer, 4, 0.5).base_lrs == [0.1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_ramp_goes_from_its_start_to_one() -> None:
    assert [ramp(step, num_steps=4, start=0.5) for step in range(6)] == [
        0.5, 0.625, 0.75, 0.875, 1.0, 1.0,
    ]  # fmt: skip
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    warm = Warmup(optimizer, 4, 0.5)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert warm.base_lrs == [2.0]
    assert RateScaling(kind="sqrt", samples=64, own=16).factor == 2.0


BY_OWN_LOSS = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 2))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(3):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    optimizer.param_groups[0]["lr"].mul_(1.0 + pace.worker)  # in place, and each its own
"""


@pytest.mark.parametrize("protocol", ["full-sync", "k-sync:1", "async"])
def test_rates_that_workers_set_differently_between_epochs_are_refused(
    tmp_path: Path, protocol: str
) -> None:
    (tmp_path / "train.py").write_text(BY_OWN_LOSS)
    with pytest.raises(ConfigError, match="0 and 1 begin an epoch with different optimizer sett"):
        runs.run_script(tmp_path / "train.py", tmp_path, workers=2, protocol=protocol)
