"""A trial keeps options that help, refuses those that change results, and restores all objects.

Candidates are planted: a step takes a known time on a clock that only steps advance, so that the
gain of each is known on any machine.
"""

import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.speed import Finding, Outcome, Speed, Value
from paceline.tuning import pairs, trial
from paceline.tuning.candidate import Objects, TrialSubject
from subjects import batch, loss_of, network, subject

SLOW_S, FAST_S = 0.02, 0.01


class Clock:
    """A clock that advances on request."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


clock = Clock()


@pytest.fixture(autouse=True)
def _on_this_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pairs, trial):
        monkeypatch.setattr(module, "perf_counter", clock)


class Waiting(nn.Module):
    """A model whose forward pass takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.wait_s = SLOW_S
        self.factor = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        clock.now_s += self.wait_s
        outputs: Tensor = self.inner(inputs) * self.factor
        return outputs


@dataclass
class Planted:
    """A candidate that sets the wait of the model; its value is in the field ``compile``."""

    wait_s: float
    factor: float = 1.0
    name: str = "compile"
    needs_feed: bool = False
    needs_whole_batch: bool = False
    begins_s: float = 0.0

    def options(self, of: TrialSubject, speed: Speed) -> tuple[Value, ...]:
        return ("planted",)

    def apply(self, objects: Objects, value: Value) -> None:
        if value == "planted":
            model = objects.model
            assert isinstance(model, Waiting)
            time.sleep(self.begins_s)
            if self.wait_s < 0:
                raise ConfigError("there is no compiler here")
            model.wait_s, model.factor = self.wait_s, self.factor

    def words(self, value: Value) -> str:
        return "planted"


def run_trial(candidate: Planted, budget_s: float = 20.0) -> trial.Outcome:
    return trial.try_all(subject(Waiting()), Speed(), [candidate], budget_s)


def test_option_that_halves_a_step_is_kept_with_its_gain() -> None:
    outcome = run_trial(Planted(FAST_S))
    (finding,) = outcome.findings
    assert finding.is_kept
    assert outcome.speed.compile == "planted"
    assert finding.gain == pytest.approx(2.0)
    assert outcome.before_s / outcome.after_s == pytest.approx(2.0)
    assert "planted" in outcome.lines()[0]


class SlowedByLoad(Waiting):
    """Its step takes much longer while the machine is busy otherwise."""

    until_s = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if clock.now_s < SlowedByLoad.until_s and self.wait_s == SLOW_S:
            clock.now_s += 50 * SLOW_S
        return super().forward(inputs)


@dataclass
class BesideLoad(Planted):
    """A candidate that is tried while the machine is busy otherwise for some time."""

    lasts_s: float = 5.0

    def apply(self, objects: Objects, value: Value) -> None:
        super().apply(objects, value)
        if value == "planted":
            SlowedByLoad.until_s = clock.now_s + self.lasts_s


@pytest.mark.parametrize("lasts_s", [4.0, 6.0])  # as long as one measurement, or two
def test_gain_of_a_disturbed_moment_is_not_kept(lasts_s: float) -> None:
    outcome = trial.try_all(
        subject(SlowedByLoad()), Speed(), [BesideLoad(0.99 * SLOW_S, lasts_s=lasts_s)], 60.0
    )
    assert not outcome.is_steady
    assert outcome.speed == Speed()


def test_large_lasting_gain_is_kept() -> None:
    outcome = run_trial(Planted(SLOW_S / 10))
    assert outcome.is_steady
    (finding,) = outcome.findings
    assert finding.is_kept
    assert finding.gain == pytest.approx(10.0)


@pytest.mark.parametrize("wait_s", [0.99 * SLOW_S, SLOW_S, 2 * SLOW_S])
def test_option_without_gain_is_not_kept(wait_s: float) -> None:
    outcome = run_trial(Planted(wait_s))
    assert outcome.speed == Speed()
    assert outcome.lines()[0].startswith("fast: nothing helps here")
    assert outcome.before_s == pytest.approx(outcome.after_s)


def test_option_that_changes_the_loss_is_refused() -> None:
    (finding,) = run_trial(Planted(0.0, factor=1.5)).findings
    assert not finding.is_kept
    assert "changes the loss" in finding.reason


@dataclass
class Hasty(Planted):
    """A candidate whose first loss is right but whose update differs."""

    def apply(self, objects: Objects, value: Value) -> None:
        super().apply(objects, value)
        if value == "planted":
            objects.optimizer.param_groups[0]["lr"] *= 5.0


def test_option_that_changes_the_update_is_refused() -> None:
    (finding,) = run_trial(Hasty(FAST_S)).findings
    assert not finding.is_kept
    assert "changes the loss after an update" in finding.reason


class Dropping(Waiting):
    """A model that drops inputs, and another one of them for each ``factor``."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.rand(int(self.factor))
        return super().forward(nn.functional.dropout(inputs)) / self.factor


class Lagging(torch.optim.SGD):
    """An optimizer of the user's, with attributes beside its groups and its state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.beta, self.lag, self.lock = 0.5, list(model.parameters()), threading.Lock()

    def step(self, closure: Any = None) -> Any:
        for one, lagging in zip(self.param_groups[0]["params"], self.lag, strict=True):
            assert one is lagging
            one.grad *= self.beta
        return super().step(closure)


def test_optimizer_is_copied_with_its_attributes() -> None:
    mine = subject(model := Waiting())
    torch.optim.lr_scheduler.StepLR(own := Lagging(model), 1)  # it replaces own.step
    mine = replace(mine, objects=replace(mine.objects, optimizer=own))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (finding,) = trial.try_all(mine, Speed(), [Planted(FAST_S)], 20.0).findings
    assert finding.is_kept
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (2.0, False)])
def test_option_that_draws_other_masks_is_refused(factor: float, is_kept: bool) -> None:
    """Both arms begin with one seed, so that a random loss can be compared too."""
    planted = Planted(FAST_S, factor=factor)
    (finding,) = trial.try_all(subject(Dropping()), Speed(), [planted], 20.0).findings
    assert finding.is_kept is is_kept
    assert ("changes the loss" in finding.reason) is not is_kept


def test_option_with_nan_loss_is_refused() -> None:
    (finding,) = run_trial(Planted(0.0, factor=math.nan)).findings
    assert not finding.is_kept
    assert "changes the loss" in finding.reason


@dataclass
class Several(Planted):
    """A candidate with two options, the second better than the first."""

    def options(self, of: TrialSubject, speed: Speed) -> tuple[Value, ...]:
        return ("good", "better")

    def apply(self, objects: Objects, value: Value) -> None:
        if value in ("good", "better"):
            model = objects.model
            assert isinstance(model, Waiting)
            model.wait_s = FAST_S if value == "good" else FAST_S / 2

    def words(self, value: Value) -> str:
        return str(value)


def test_better_option_of_the_same_kind_replaces_the_first() -> None:
    outcome = run_trial(Several(0.0))
    first, second = outcome.findings
    assert outcome.speed.compile == "better"
    assert (first.is_kept, first.reason, second.is_kept) == (False, "better is faster", True)
    assert second.gain == pytest.approx(4.0)
    assert outcome.lines()[0].startswith("fast: better 4.00x; together 4.00x")


def test_part_of_a_batch_is_enough_for_batch_norm() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    inputs, targets = (torch.cat([one, one]) for one in batch())
    mine = subject(model, batch=(inputs, targets), num_samples=len(inputs))
    outcome = trial.try_all(mine, Speed(), [], 20.0)
    assert (outcome.speed, outcome.batch_size) == (Speed(), 16)


def test_gain_of_the_loader_is_separate_from_computing() -> None:
    fed = Finding(
        name="loader_workers", what="2 loader workers", gain=3.0, is_kept=True, is_apart=True
    )
    outcome = Outcome(
        speed=Speed(loader_workers=2), findings=(fed,), before_s=0.03, after_s=0.03, num_samples=8,
        batch_size=8, took_s=1.0,
    )  # fmt: skip
    assert outcome.lines() == ["fast: 2 loader workers 3.00x"]


def test_unavailable_option_is_named_with_its_reason() -> None:
    (finding,) = run_trial(Planted(-1.0)).findings
    assert finding.reason == "failed: ConfigError: there is no compiler here"


def test_slow_option_is_abandoned_and_another_alarm_keeps_running() -> None:
    start_s = time.perf_counter()
    with another_alarm():
        (finding,) = run_trial(Planted(0.0, begins_s=50.0), budget_s=5.0).findings
    assert time.perf_counter() - start_s < 40.0
    assert not finding.was_tried
    assert finding.reason == "no time was left"


def test_no_option_starts_after_the_budget() -> None:
    (finding,) = run_trial(Planted(0.0), budget_s=0.1).findings
    assert not finding.was_tried
    assert finding.reason == "no time was left"


def test_loader_without_time_left_is_named_as_untried() -> None:
    fed = subject(Waiting(), feed=lambda speed: itertools.repeat(batch()))
    loading = Planted(FAST_S, name="loader_workers", needs_feed=True)
    outcome = trial.try_all(fed, Speed(), [loading], budget_s=0.5)
    (finding,) = outcome.findings
    assert (finding.what, finding.reason) == ("loader", "no time was left")
    assert not outcome.is_whole


@dataclass
class Threaded(Planted):
    """A candidate that is faster with another number of threads."""

    name: str = "threads"
    count: int = 0

    def options(self, of: TrialSubject, speed: Speed) -> tuple[Value, ...]:
        return (self.count,)

    def apply(self, objects: Objects, value: Value) -> None:
        if value:
            torch.set_num_threads(int(value))
            super().apply(objects, "planted")


def test_loader_is_measured_on_the_usual_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, counts = torch.get_num_threads(), list[int]()

    def feed(speed: Speed) -> Iterator[Any]:
        counts.append(torch.get_num_threads())
        return itertools.repeat(batch())

    def withdrawn(self: trial._Trial, plain: pairs.Arm, best: pairs.Arm) -> tuple[float, float]:
        best.block_s(1)
        return SLOW_S, SLOW_S

    monkeypatch.setattr(trial._Trial, "_remeasure", withdrawn)
    loading = Planted(FAST_S, name="loader_workers", needs_feed=True)
    candidates = [Threaded(FAST_S, count=usual + 1), loading]
    outcome = trial.try_all(subject(Waiting(), feed=feed), Speed(), candidates, 20.0)
    assert [finding.reason for finding in outcome.findings] == [
        "no gain when measured again",
        "the loader keeps up",
    ]
    assert counts == [usual]


def test_option_chosen_by_the_user_is_not_tried() -> None:
    given = Speed(compile="planted")
    outcome = trial.try_all(subject(Waiting()), given, [Planted(FAST_S)], 20.0)
    assert outcome.findings == ()
    assert outcome.before_s == pytest.approx(FAST_S)


def test_trial_restores_objects_and_random_state() -> None:
    mine = subject(Waiting())
    model, optimizer = mine.objects.model, mine.objects.optimizer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    trial.try_all(mine, Speed(), [Planted(FAST_S)], 20.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_slow_step_is_measured_on_part_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        clock.now_s += 0.05 * len(one[0])
        return loss_of(model, one)

    monkeypatch.setattr(trial, "_STEP_S", 0.2)
    outcome = trial.try_all(replace(subject(), forward=slow), Speed(), [], 20.0)
    assert outcome.batch_size == len(batch()[0])
    assert outcome.num_samples in (3, 4)
    assert f"on {outcome.num_samples} of 8 samples" in outcome.lines()[0]


@pytest.mark.parametrize("gain", [1.5, 1.0])
def test_option_that_depends_on_the_batch_is_measured_on_all_of_it(
    monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    lengths: list[int] = []

    def slow(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Waiting)
        lengths.append(len(one[0]))
        clock.now_s += model.wait_s * len(one[0])
        return loss_of(model.inner, one)

    monkeypatch.setattr(trial, "_STEP_S", 0.04)
    candidate = Planted(SLOW_S / gain, needs_whole_batch=True)
    outcome = trial.try_all(replace(subject(Waiting()), forward=slow), Speed(), [candidate], 20.0)
    (finding,) = outcome.findings
    assert outcome.num_samples < len(batch()[0]) == outcome.batch_size
    assert lengths.count(len(batch()[0])) == 4
    assert finding.gain == pytest.approx(gain)
    assert finding.is_kept == (outcome.speed.compile == "planted") == (gain > 1.05)
    message = outcome.lines()[0]
    assert message.startswith(
        "fast: planted 1.50x" if finding.is_kept else "fast: nothing helps here"
    )


def test_gain_that_does_not_repeat_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remeasure = trial._Trial._remeasure

    def later(self: trial._Trial, plain: pairs.Arm, best: pairs.Arm) -> tuple[float, float]:
        for one in (plain, best):
            assert isinstance(one._model, Waiting)
            one._model.wait_s = SLOW_S
        return remeasure(self, plain, best)

    monkeypatch.setattr(trial._Trial, "_remeasure", later)
    outcome = run_trial(Planted(FAST_S))
    (finding,) = outcome.findings
    assert outcome.speed == Speed()
    assert (finding.is_kept, finding.reason) == (False, "no gain when measured again")
    assert outcome.lines()[0] == "fast: nothing helps here"


def test_alarm_at_the_end_of_its_block_leaves_the_other_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_timer = signal.setitimer

    def ring_when_stopped(which: int, seconds: float, interval: float = 0.0) -> object:
        if not seconds and signal.getsignal(signal.SIGALRM) is not too_early:
            signal.raise_signal(signal.SIGALRM)
        return set_timer(which, seconds, interval)

    with another_alarm(), monkeypatch.context() as patch:
        patch.setattr(signal, "setitimer", ring_when_stopped)
        with pairs.time_limit(50.0):
            pass


def test_alarm_before_the_cleanup_leaves_the_other_alarm() -> None:
    """After the block, before the alarm is disarmed."""
    code = pairs.time_limit.__wrapped__.__code__  # type: ignore[attr-defined]  # by functools.wraps

    def ring_in_the_next_line(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            signal.raise_signal(signal.SIGALRM)
        return ring_in_the_next_line

    trace = sys.gettrace()
    with another_alarm():
        try:
            with pytest.raises(pairs.TooLong), pairs.time_limit(50.0):
                sys.settrace(ring_in_the_next_line)
        finally:
            sys.settrace(trace)


def test_time_limit_needs_a_python_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another handler could not be restored."""
    with another_alarm(), monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        with pairs.time_limit(50.0):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 90.0


def too_early(number: int, frame: object) -> None:
    raise AssertionError("the other alarm rang too early")


@contextmanager
def another_alarm() -> Iterator[None]:
    """A repeating alarm of other code, which must still be there afterwards."""
    handler = signal.signal(signal.SIGALRM, too_early)
    timer = signal.setitimer(signal.ITIMER_REAL, 100.0, 7.0)
    try:
        yield
        assert signal.getsignal(signal.SIGALRM) is too_early
        left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
        assert 90.0 < left_s <= 100.0
        assert interval_s == pytest.approx(7.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_model_whose_copy_would_compute_with_it_is_refused() -> None:
    """``model.forward = torch.compile(model.forward)`` holds the original in a closure."""
    model = network()
    original = model.forward
    model.forward = lambda inputs: original(inputs)  # type: ignore[method-assign]  # as users do
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = replace(subject(model).objects, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"its own forward\(\) was replaced by a function"):
        pairs._copy_of(objects)
