"""The time of a model at each batch size: pieces interpolated and scaled to the whole."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.exports.subject import Subject, find_subject
from paceline.partition.graph import WorkGraph
from paceline.predict import measuring
from paceline.predict.measuring import Counting, GraphAt, Measuring, least_of, measuring_of
from paceline.splits.measuring import ROUNDS, Measurement
from paceline.splits.tracing import TracedModel, trace
from paceline.workloads import load_task


def inputs(size: int) -> tuple[Tensor, ...]:
    return (torch.ones(size, 16),)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def make_subject() -> Subject:
    return Subject(name="a model", model=model(), inputs=inputs)


def make_measuring() -> Measuring:
    return Measuring(make_subject(), inputs, torch.get_num_threads(), None)


def known(seconds: dict[int, float]) -> Callable[..., list[float]]:
    """Stand for a measurement of these seconds, by batch size."""
    return lambda size, *_: [seconds[size]]


def pieces(one: Measuring, micro_batch: int, batch: int) -> tuple[TracedModel, GraphAt]:
    return one.pieces(trace(one._model, inputs(least_of(batch))), (micro_batch, batch))


def test_pieces_sum_to_the_time_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_measuring()
    traced, graph_at = pieces(one, 4, 32)
    taken = {2: 1.0, 4: 1.5, 8: 2.5, 32: 8.0}
    monkeypatch.setattr(one, "_updates_s", known(taken))
    scaled_at = one.as_one(graph_at, {1, 4, 8, 32})  # for one sample, two are measured
    assert [scaled_at(size).alone_s for size in (4, 6, 8, 20)] == pytest.approx([1.5, 2, 2.5, 5.25])
    assert one.alone_s(32) == 8.0
    assert len(traced.pieces) == 4
    shares = [
        [node.work_s / graph.work_s for node in graph.nodes]
        for graph in (graph_at(6), scaled_at(6))
    ]
    assert shares[0] == pytest.approx(shares[1])


def forbid_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEASURED_S", "_LONG_S"):
        monkeypatch.setattr(measuring, name, 0.0)


def test_slow_batch_is_extrapolated_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_long_steps(monkeypatch)
    one = make_measuring()
    _, graph_at = pieces(one, 4, 64)
    monkeypatch.setattr(measuring, "_WHOLE_S", 0.0)
    asked = list[int]()

    def updates_s(size: int, *_: object) -> list[float]:
        asked.append(size)
        return [1.0 * size]

    monkeypatch.setattr(one, "_updates_s", updates_s)
    assert one.as_one(graph_at, {64, 2})(64).alone_s == pytest.approx(64.0)
    assert one.alone_s(64) == pytest.approx(64.0)
    assert max(asked) == 4


def test_pieces_are_measured_at_two_batches_however_slow_the_model_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At one alone, a micro-batch of any size would cost as much as that one."""
    forbid_long_steps(monkeypatch)
    one, taken = make_measuring(), list[int]()
    add_round = Measurement.add_round

    def measured(self: Measurement) -> None:
        taken.append(self.batch_size)
        add_round(self)

    monkeypatch.setattr(Measurement, "add_round", measured)
    monkeypatch.setattr(Measurement, "rounds_s", [1.0] * ROUNDS)
    pieces(one, 2, 64)
    assert taken == [2, 4] * measuring._ROUNDS_EACH


def test_extrapolation_uses_larger_batches_than_two_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of a large model take all the time there; the next two sizes extrapolate."""
    one, taken = make_measuring(), {1: 0.3, 2: 0.5, 4: 0.55, 8: 0.6, 16: 0.8, 32: 1.2, 64: 2.0}
    monkeypatch.setattr(one, "_once_s", taken.__getitem__)
    monkeypatch.setattr(one, "_updates_s", known(taken))
    monkeypatch.setattr(measuring, "_WHOLE_S", 1.5)
    _, graph_at = pieces(one, 8, 64)
    assert one.alone_s(64) == pytest.approx(2.0)
    assert one.as_one(graph_at, {8, 64})(8).alone_s == pytest.approx(0.6)
    monkeypatch.setattr(one, "_updates_s", known({8: 0.6, 16: 2.0}))
    one._taken.clear()
    assert one.alone_s(64) == pytest.approx(8.0)  # no longer per sample than those


def test_model_that_takes_no_time_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_measuring()
    _, graph_at = pieces(one, 2, 8)
    still: WorkGraph = graph_at(8).scaled(0.0)
    assert still.alone_s == 0.0
    assert one.as_one(lambda batch: still, {8})(8) is still


def test_measuring_leaves_the_model_unchanged() -> None:
    torch.manual_seed(3)
    one, before = make_measuring(), torch.get_rng_state()
    pieces(one, 2, 8)
    one.alone_s(8)
    assert torch.equal(before, torch.get_rng_state())
    assert all(held.grad is None for held in one._model.parameters())


@pytest.mark.parametrize("cores", [2, 3])
def test_a_workers_columns_are_measured(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker's only where all share cores: otherwise they wait for the last."""
    divided = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 2))
    subject = Subject(name="a model", model=divided, inputs=inputs)
    monkeypatch.setattr(measuring, "num_cores", lambda: cores)
    one, channels = Measuring(subject, inputs, 1, None), list[int]()
    own = one._updates_s

    def updates_s(size: int, num_rounds: int, of: nn.Module | None = None) -> list[float]:
        taken_s = own(size, num_rounds, of)
        if of is None:
            return taken_s
        channels.append(len(next(of.parameters())))
        return [float(channels[-1])]

    monkeypatch.setattr(one, "_updates_s", updates_s)
    measured = one.all_of(trace(divided, inputs(2)), (4, 8), 3)
    assert [pair.nodes for pair in measured.columns.pairs] == [(0, 1, 2)]
    last, first = [11] * measuring._ROUNDS_EACH, [10] * measuring._ROUNDS_EACH
    assert channels == (last if cores == 3 else last + first)
    assert measured.columns.seconds == ((11.0, 11.0, 11.0) if cores == 3 else (10.0, 11.0, 11.0))
    assert divided[0].weight.shape == (32, 16)
    assert all(parameter.grad is None for parameter in divided.parameters())


@pytest.mark.parametrize(
    "undivided",
    [
        nn.Sequential(nn.Linear(16, 16), nn.Softmax(1), nn.Linear(16, 16)),
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.BatchNorm1d(16)),
    ],
    ids=["none between", "batch norm"],
)
def test_models_without_divisible_layers_have_no_columns(undivided: nn.Module) -> None:
    subject = Subject(name="a model", model=undivided, inputs=inputs)
    one = Measuring(subject, inputs, torch.get_num_threads(), None)
    measured = one.all_of(trace(undivided, inputs(2)), (4, 8), 2)
    assert measured.columns == ((), (), "")


def wide_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 80, 1), nn.ReLU(), nn.Conv1d(80, 2, 1), nn.Flatten())


def test_workers_between_have_the_time_of_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 vectors of 16 channels, three workers get 1, 2 and 2."""
    held = wide_convolutions()
    subject = Subject(name="a model", model=held, inputs=lambda size: (torch.ones(size, 1, 4),))
    monkeypatch.setattr(measuring, "num_cores", lambda: 2)
    one = Measuring(subject, subject.inputs, 1, None)
    monkeypatch.setattr(
        one, "_worker_s", lambda size, rounds, of: [float(len(next((of or held).parameters())))]
    )
    measured = one.all_of(trace(held, subject.inputs(2)), (4, 8), 3)
    assert measured.columns.seconds == pytest.approx((16.0, 32.0, 32.0))


def test_a_cut_alone_needs_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    divided = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    subject, told = Subject(name="a model", model=divided, inputs=inputs), list[str]()
    one = Measuring(subject, inputs, torch.get_num_threads(), None, told.append)
    measured = one.all_of(trace(divided, inputs(2)), (4, 8), 2, is_cut_only=True)
    assert measured.columns == ((), (), "")
    assert not any("channels" in what or "columns" in what for what in told)


def test_batches_take_turns_unless_steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = make_measuring(), list[tuple[int, int]]()
    _, graph_at = pieces(one, 4, 8)

    def updates_s(size: int, num_rounds: int, of: nn.Module | None = None) -> list[float]:
        asked.append((size, num_rounds))
        return [1.0]

    monkeypatch.setattr(one, "_updates_s", updates_s)
    one.as_one(graph_at, {4, 8})
    assert asked == [(4, ROUNDS), (8, ROUNDS)] * measuring._ROUNDS_EACH
    asked.clear()
    vars(one)["_longest"] = 8, 2.0
    one.as_one(graph_at, {4, 8})
    assert asked == [(4, 1), (8, 1)]


def test_one_slow_round_changes_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    one, number = make_measuring(), itertools.count()
    _, graph_at = pieces(one, 4, 8)

    def updates_s(size: int, num_rounds: int, of: nn.Module | None = None) -> list[float]:
        return [2.0 if next(number) < 2 else 1.0]

    monkeypatch.setattr(one, "_updates_s", updates_s)
    assert one.as_one(graph_at, {4, 8})(8).alone_s == pytest.approx(1.0)
    assert next(number) == 2 * 3  # one round differs from two: their median is known


def test_rounds_go_on_while_they_differ_and_take_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even, moving = [1.0] * 15, [1.0, 1.2, 0.8, 1.1, 0.9] * 3
    numbers = itertools.count(1)
    assert list(measuring._rounds(lambda: [even], 3)) == [0, 1, 2]
    moved = measuring._rounds(lambda: [even, moving[: next(numbers) + 2]], 2)
    assert list(moved) == list(range(15))
    monkeypatch.setattr(measuring, "_ENOUGH_S", 0.0)
    assert list(measuring._rounds(lambda: [moving], 3)) == [0, 1, 2]


def test_error_is_small_once_rounds_are_many() -> None:
    assert measuring._error([0.0, 0.0]) == measuring._error([1.0, 1.0, 5.0]) == 0.0
    assert measuring._error([1.0, 1.2, 0.8] * 40) < 0.05 < measuring._error([1.0, 1.2, 0.8])


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"), [(1, 2, 1.0), (2, 2, 1.042), (2, 4, 1.042), (8, 4, 1.068)]
)
def test_workers_wait_for_the_slowest(
    cores: int, num_workers: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that compute at a time, the slower one takes the 71st of 100 in half of all steps."""
    monkeypatch.setattr(measuring, "num_cores", lambda: cores)
    one = Measuring(make_subject(), inputs, 1, None)
    _, graph_at = pieces(one, 4, 8)
    taken_s = [(90 + percent / 5) / 100 for percent in range(101)]
    monkeypatch.setattr(one, "_updates_s", lambda *_: taken_s)
    one.as_one(graph_at, {8})
    assert one._waiting(num_workers) == pytest.approx(expected, abs=0.003)


def test_steady_machine_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_measuring()
    _, graph_at = pieces(one, 4, 8)
    assert one._waiting(2) == 1.0
    monkeypatch.setattr(one, "_updates_s", known({8: 2.0}))
    one.as_one(graph_at, {8})
    assert one._waiting(2) == 1.0


def test_model_that_fails_in_its_other_mode_has_no_columns() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.last = nn.Dropout(0.0)
            self.last.register_forward_hook(self._refuse)

        def _refuse(self, module: nn.Module, args: object, output: Tensor) -> None:
            if not module.training:
                raise ValueError("only in training")

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layers(x))

    held = Fickle()
    subject = Subject(name="a model", model=held, inputs=inputs)
    one = Measuring(subject, inputs, torch.get_num_threads(), None)
    measured = one.all_of(trace(held, inputs(2)), (4, 8), 2)
    assert measured.columns.pairs == ()
    assert "only in training" in measured.columns.why
    assert measured.alone_s > 0


def test_meta_model_is_counted_instead_of_measured() -> None:
    held = model().to("meta")

    def on_meta(size: int) -> tuple[Tensor, ...]:
        return (torch.ones(size, 16, device="meta"),)

    subject = Subject(name="a model", model=held, inputs=on_meta)
    result = measuring_of(subject, on_meta, 1, None)
    assert isinstance(result, Counting)
    traced = trace(held, (torch.ones(2, 16, device="meta"),))
    measured = result.all_of(traced, (4, 16), 2)
    assert len(measured.traced.pieces) == 4
    assert measured.graph_at(16).alone_s == pytest.approx(measured.alone_s)
    assert measured.graph_at(4).alone_s < measured.alone_s
    assert measured.script_s(16) == 0.0


def test_a_script_draws_batches_and_computes_losses() -> None:
    task = load_task("softmax", 2)
    model = task.module()
    drawn = list[int]()

    def slow_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        drawn.append(len(targets))
        time.sleep(0.01)  # what the loss takes
        return task.loss(outputs, targets)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    slow = replace(task, loss=slow_loss)
    subject = Subject(name="softmax", model=model, inputs=find_subject("softmax").inputs, task=slow)
    script_s = Measuring(subject, subject.inputs, 1, None)._script_s({8, 64})
    assert set(drawn) == {8, 64}
    assert 0.01 < script_s(8) < 0.1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_round_of_all_workers_is_scaled_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six on two cores take twice as long as the three that are measured."""

    class Beside:
        size, asked = 3, list[int]()

        def together_s(self, batch_size: int, step: Callable[[], object], num_rounds: int) -> float:
            self.asked.append(batch_size)
            step()
            return 0.5 * batch_size

    beside: Any = Beside()
    monkeypatch.setattr(measuring, "num_cores", lambda: 2)
    one = Measuring(make_subject(), inputs, 1, beside)
    vars(one)["_longest"] = 8, 0.001
    assert one._together({4}, 4, 3) == pytest.approx(2.0)
    assert one._together({4}, 4, 6) == pytest.approx(4.0)
    assert set(beside.asked) == {4}
    assert make_measuring()._together({4}, 4, 6) is None


def test_unequal_shares_are_on_the_line_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 samples on 3 workers one has 6 and two have 5; batch norm needs two."""
    one = Measuring(make_subject(), inputs, 1, cast(Any, object()))
    vars(one)["_longest"] = 16, 0.001
    monkeypatch.setattr(measuring, "num_cores", lambda: 2)
    assert one._shares(16, 3) == {5, 6}
    assert one._shares(2, 3) == {2}
    monkeypatch.setattr(measuring, "num_cores", lambda: 4)
    assert one._shares(16, 3) == {6}


def test_second_sitting_adds_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was slow for all of the first is known better after the second."""
    one = make_measuring()
    vars(one)["_longest"] = 8, 2.0  # long steps are measured once a sitting
    monkeypatch.setattr(one, "_updates_s", lambda *_: [2.0])
    assert one.alone_s(8) == 2.0
    monkeypatch.setattr(one, "_updates_s", lambda *_: [1.0, 1.0])
    assert one.alone_s(8) == 1.0


def test_pieces_of_all_sittings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_measuring()
    pieces(one, 4, 8)
    before = [len(measured.rounds_s) for measured in one._pieces]
    monkeypatch.setattr(measuring, "_CLOSE", float("inf"))
    one._pieces_again()
    one._larger_batch_s = 2.0  # long steps are measured once a sitting
    one._pieces_again()
    assert [len(measured.rounds_s) for measured in one._pieces] == [
        number + measuring._ROUNDS_EACH + 1 for number in before
    ]
