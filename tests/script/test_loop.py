"""Further guarantees for a loop: refusals, evaluation, stopping, superseded steps."""

import functools
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import loops
import refusals
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, Splits
from paceline.engines.base import Event
from paceline.engines.local.engine import LocalEngine
from paceline.errors import ConfigError, WorkerError
from paceline.events import Cancel, Lease
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.trace.records import Evaluated
from paceline.workloads.base import Task
from reference import Order, State, differ, fresh, replay, state_of
from runs import Run, assert_each_sample_once, run_script, train
from tiny import BATCH_SIZE, CLASSES, EPOCHS, NUM_SAMPLES, TASK, Tied, samples, with_optimizer

CLOSE = 1e-6
SCRIPT = Path(loops.__file__)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def poisoned_samples() -> Splits:
    """Two samples have an unknown class: the loss of their batches is infinite."""
    made = samples()
    made.train.targets[[5, 23]] += CLASSES  # type: ignore[attr-defined]
    return made


def sometimes_infinite(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, or infinity where a class is unknown."""
    loss = nn.functional.cross_entropy(outputs, targets % CLASSES)
    return loss * math.inf if bool((targets >= CLASSES).any()) else loss


POISONED = replace(
    with_optimizer(torch.optim.Adam, 0.05), data=poisoned_samples, loss=sometimes_infinite
)


def skipping_loop(task: Task) -> State:
    """The plain loop, without the updates whose loss is not finite."""
    model, optimizer = fresh(task)
    order = Order(task)
    for epoch in range(EPOCHS):
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            inputs, targets = order.batch(Lease(0, epoch, start, start + BATCH_SIZE))
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            if bool(loss.isfinite()):
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return state_of(model)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("iterable", "a stream's batch of 13 samples cannot be shared by 2"),
        ("in order", "in_order=False"),
        ("no batches", "batch_size=None"),
        ("no size", r"'weight' of the model has no size yet \(nn\.Lazy\.\.\.\)"),
        ("observed", r"'1\.activation_post_process' \(MovingAverageMinMaxObserver\) observes"),
        ("sparse", r"module 'table' \(Embedding\) makes sparse gradients"),
        ("one memory", r"'first\.weight' and 'second\.weight' of the model share memory"),
        ("second optimizer", "two optimizers step parameter 'first.weight'"),
    ],
)
def test_unsupported_loops_are_refused_by_name(tmp_path: Path, case: str, says: str) -> None:
    script = Path(refusals.__file__)
    with pytest.raises(ConfigError, match=says):
        run_script(script, tmp_path, case, workers=2, protocol="full-sync", engine="inline")


@pytest.mark.parametrize("num_test", [1, 2, 17, 2503])
def test_an_evaluation_counts_each_sample_once(tmp_path: Path, num_test: int) -> None:
    """For any number of samples: one, fewer than workers, and several ranges."""
    task = replace(TASK, data=functools.partial(_splits, num_test))
    run = train(task, tmp_path, workers=3, engine="inline")
    _assert_exact(run, num_test)


def test_live_workers_count_each_sample_of_an_evaluation_once(tmp_path: Path) -> None:
    task = replace(TASK, data=functools.partial(_splits, 2503))
    _assert_exact(train(task, tmp_path, workers=2, path="peers"), 2503)


def _splits(num_test: int) -> Splits:
    every = samples(NUM_SAMPLES + num_test).train
    assert isinstance(every, ArrayDataset)
    test = ArrayDataset(every.inputs[NUM_SAMPLES:], every.targets[NUM_SAMPLES:])
    return replace(samples(), test=test)


def _assert_exact(run: Run, num_test: int) -> None:
    test = _splits(num_test).test
    assert isinstance(test, ArrayDataset)
    model = Tied()
    model.load_state_dict(run.state)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(test.inputs), test.targets, reduction="sum")
    evaluated = [record for record in run.records if isinstance(record, Evaluated)]
    assert len(evaluated) == EPOCHS
    assert {record.totals["acc"][1] for record in evaluated} == {num_test}
    assert math.isclose(evaluated[-1].totals["loss"][0], float(loss), rel_tol=1e-9)


def test_the_first_step_can_be_superseded(tmp_path: Path) -> None:
    """Worker 1 is far behind from the first step on; what it held is used by the other."""
    run = train(TASK, tmp_path, workers=2, protocol="k-sync:1", path="store", delay=("1=300ms",))
    assert [push.ticket[:2] for push in run.superseded][:1] == [(1, 0)]
    assert all(push.wasted_s > 0.0 for push in run.superseded)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, replay(TASK, run.records)) < CLOSE


def test_abandoned_mini_batches_are_dropped_on_request(tmp_path: Path) -> None:
    run = train(TASK, tmp_path, workers=3, protocol="k-sync:1", engine="inline", dropped="skip")
    assert any(isinstance(order, Cancel) for order in run.orders)
    assert run.num_epochs_ended() == EPOCHS
    used = run.used()
    assert all(set(epoch.values()) == {1} for epoch in used)
    assert all(len(epoch) < NUM_SAMPLES for epoch in used)
    assert run.summary.dropped_samples == sum(NUM_SAMPLES - len(epoch) for epoch in used)


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_a_non_finite_update_is_skipped_and_leaves_no_state(
    tmp_path: Path, where: dict[str, str]
) -> None:
    """It leaves the moments and step counters of Adam unchanged."""
    run = train(POISONED, tmp_path, workers=2, nonfinite="skip", **where)
    assert 0 < sum(not push.is_finite for push in run.pushes) < len(run.pushes)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert differ(run.state, skipping_loop(POISONED)) < CLOSE


@pytest.mark.parametrize("where", [{"engine": "inline"}, {"path": "peers"}], ids=str)
def test_a_non_finite_local_step_is_left_out_and_later_ones_are_used(
    tmp_path: Path, where: dict[str, str]
) -> None:
    """It would stay in the moments of that worker's Adam, and spoil every later push."""
    settings = {"workers": 2, "protocol": "local-sgd:2", "nonfinite": "skip"}
    run = train(POISONED, tmp_path, **settings, **where)
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert all(push.is_finite for push in run.pushes)
    assert run.summary.skipped_updates == 0
    assert all(bool(torch.isfinite(value).all()) for value in run.state.values())


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("step.skip()", r"step.skip\(\) gives back a mini-batch, and under --fragments"),
        ("if number % 2: optimizer.step()", "accumulated for a step, but --fragments"),
    ],
    ids=["given back", "accumulated"],
)
def test_loops_that_would_miss_the_last_fragment_update_are_refused(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path, step: str, says: str
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, paceline\n"
        "pace = paceline.connect()\n"
        "data = torch.utils.data.TensorDataset(torch.ones(64, 1))\n"
        "model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for epoch in pace.epochs(2):\n"
        "    for number, (x,) in enumerate(loader):\n"
        "        with pace.step() as step:\n"
        "            model(x).sum().backward()\n"
        f"            {step}\n"
    )
    flags = "--workers 2 --device cpu --protocol local-sgd:2 --fragments 2"
    code, _, err = say(f"launch {flags} train.py")
    assert code == 2
    assert re.search(says, err)


@pytest.mark.parametrize(
    "call",
    ["step()", "backward(None)", "autocast()", "clip_grad_norm_([], 1.0)", "save()",
     "clip_grad_value_([], 1.0)", "edit_gradients().__enter__()"],
)  # fmt: skip
def test_methods_called_before_prepare_are_refused_by_name(call: str) -> None:
    pace = Pace(SoloExchange(), Context())
    name = call.partition("(")[0]
    with pytest.raises(ConfigError, match=rf"pace.{name}\(\) comes after pace.prepare"):
        eval(f"pace.{call}", {"pace": pace})


def test_a_non_finite_gradient_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker \d: the gradient of 'first.weight' is not fin"):
        train(POISONED, tmp_path, workers=2, engine="inline")


@pytest.mark.parametrize("path", ["store", "peers"])
def test_one_worker_can_stop_the_run_at_any_time(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update is made after it, however late the launcher learns of it; saved state is whole."""
    hear = LocalEngine.events

    def hear_late(engine: LocalEngine, timeout_s: float) -> Sequence[Event]:
        time.sleep(0.02)
        return hear(engine, timeout_s)

    monkeypatch.setattr(LocalEngine, "events", hear_late)
    run = run_script(
        SCRIPT, tmp_path, "stopping", str(tmp_path), workers=3, path=path, protocol="full-sync"
    )
    results = [torch.load(tmp_path / f"stopping-{worker}.pt") for worker in range(3)]
    assert differ(results[0], results[1]) == differ(results[0], results[2]) == 0.0
    assert int(results[0].pop("version")) == run.summary.updates == 3
    assert differ(results[0], loops.stopped_plainly(3)) < CLOSE


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_run_that_ends_between_epochs_is_not_evaluated_again(tmp_path: Path, path: str) -> None:
    made = replace(TASK, data=functools.partial(_with_test, samples))
    run = train(made, tmp_path, workers=2, protocol="full-sync", path=path, target_accuracy=1e-9)
    assert run.summary.ended.startswith("accuracy")
    assert [record.epoch for record in run.records if isinstance(record, Evaluated)] == [0]


def _with_test(make: Callable[[], Splits]) -> Splits:
    """The training samples are tested on, too."""
    splits = make()
    return replace(splits, test=splits.train)


LOOP = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(30):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
    pace.evaluate(lambda batch: {"acc": (len(batch[0]), len(batch[0]))}, DataLoader(data))
    print("evaluated", epoch)
"""


@pytest.mark.parametrize("protocol", ["full-sync", "async"])
def test_a_custom_loop_ends_at_the_target_accuracy(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    settings = {"workers": 2, "protocol": protocol, "target_accuracy": 0.5}
    run = run_script(tmp_path / "train.py", tmp_path, **settings)
    assert run.summary.ended.startswith("accuracy")
    for worker in (0, 1):
        log = run.folder / "logs" / f"worker-{worker}.log"
        assert log.read_text() == "evaluated 0\n"


def test_delays_of_inline_workers_overlap(tmp_path: Path) -> None:
    run = train(
        TASK, tmp_path, workers=3, protocol="async", engine="inline", delay=("300ms",),
        slow=("0=5x",),
    )  # fmt: skip
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    first = [push.at_s for push in run.pushes[:2]]
    assert all(push.ticket.member != 0 for push in run.pushes[:2])
    assert max(first) - min(first) < 0.3  # they slept beside each other


def test_a_stop_before_prepare_ends_the_run_without_a_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("data = ", "pace.stop()\ndata = ", 1))
    run = run_script(tmp_path / "train.py", tmp_path, workers=2)
    assert run.summary.updates == 0


def test_a_sum_before_prepare_is_refused_in_one_sentence(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import paceline\npaceline.connect().sum(1.0)\n")
    code, _, err = say("launch --workers 2 --device cpu train.py")
    assert code != 0
    assert "pace.sum() was called before pace.prepare()" in err
    assert "AttributeError" not in err


OF_VECTORS = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
data = TensorDataset(torch.arange(64.0)[:, None])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
for epoch in pace.epochs(1):
    for number, (x,) in enumerate(loader):
        with pace.step():
            out = model(x)[:, 0]
            out.backward(torch.ones_like(out))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        if sys.argv[1:]:
            pace.sum(1)
"""


@pytest.mark.parametrize(
    "line",
    [
        "out.backward(torch.ones_like(out))",
        "torch.autograd.backward(out.sum())",
        "torch.autograd.backward([out.sum(), (out ** 2).sum()])",
        "torch.autograd.backward(one.sum() for one in (out, out ** 2))",
    ],
)
def test_backward_is_recognized_in_any_spelling(tmp_path: Path, line: str) -> None:
    """Of two batches that make an update, the first is not taken for an unused one."""
    text = OF_VECTORS.replace("out.backward(torch.ones_like(out))", line)
    (tmp_path / "train.py").write_text(text)
    run = run_script(tmp_path / "train.py", tmp_path, workers=1, protocol="k-sync:1")
    assert run.used() == [Counter(range(64))]
    assert run.summary.updates == 8


def test_pace_sum_adds_whole_tensors(tmp_path: Path) -> None:
    sums = """
given = torch.arange(6.0).reshape(2, 3) + pace.worker
found = [pace.sum(one) for one in (given, given > 2, given.half()[0], torch.zeros(0))]
torch.save(found, f"{sys.argv[1]}/found-{pace.worker}.pt")
"""
    text = OF_VECTORS.replace("if sys.argv[1:]", "if False") + sums
    (tmp_path / "train.py").write_text(text)
    run_script(tmp_path / "train.py", tmp_path, str(tmp_path), workers=2, protocol="k-sync:1")
    whole = torch.arange(6.0).reshape(2, 3) * 2 + 1
    for worker in range(2):
        results = torch.load(tmp_path / f"found-{worker}.pt")
        assert [result.dtype for result in results] == [
            torch.float32, torch.int64, torch.float32, torch.float32
        ]  # fmt: skip
        assert torch.equal(results[0], whole)
        assert results[1].tolist() == [[0, 0, 1], [2, 2, 2]]
        assert results[2].tolist() == [1.0, 3.0, 5.0]
        assert results[3].shape == (0,)


def test_a_sum_in_the_loop_is_refused_where_a_batch_is_too_small_for_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(OF_VECTORS.replace("64.0", "65.0"))
    with pytest.raises(ConfigError, match=r"this batch or the next has only 1 samples for 2"):
        run_script(tmp_path / "train.py", tmp_path, "inside", workers=2, protocol="full-sync")


def test_a_sum_in_the_loop_is_refused_without_lockstep(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_VECTORS)
    with pytest.raises(ConfigError, match=r"pace.sum\(\) is inside .* under k-sync:1"):
        run_script(tmp_path / "train.py", tmp_path, "inside", workers=2, protocol="k-sync:1")
