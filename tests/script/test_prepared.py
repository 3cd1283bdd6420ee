"""The parts that ``prepare`` makes, driven by one worker: the loop, its loader, the step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.context import Context
from paceline.errors import ConfigError, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.passes import Passes
from paceline.script.evaluation import Evaluation
from paceline.script.loader import PreparedLoader
from paceline.script.loop import TrainingLoop
from paceline.script.member_state import MemberState
from paceline.script.prepared import Prepared, PrepareOptions
from paceline.script.step import OptimizerStep, Step
from paceline.script.worker import Pace

CPU = torch.device("cpu")
NUM_SAMPLES = 4


class Alone:
    """One worker's prepared objects."""

    def __init__(self, **settings: Any) -> None:
        self.exchange = SoloExchange()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        inputs: Any = torch.arange(float(NUM_SAMPLES)).reshape(-1, 1)
        self.objects = (self.model, self.optimizer, DataLoader(inputs))
        context = Context(device="cpu", **settings)
        keeper = MemberState(None, None, 0)
        self.prepared = Prepared(
            self.exchange, context, self.objects, CPU, keeper, PrepareOptions()
        )
        self.loop: TrainingLoop = self.prepared.loop
        self.loader = PreparedLoader(
            self.loop, self.prepared.schedules, self.prepared.source.shape, NUM_SAMPLES, Passes()
        )

    def step(self) -> Step:
        return Step(self.loop, self.prepared.explain)


def test_each_step_is_a_separate_update() -> None:
    alone = Alone()
    assert isinstance(alone.prepared.step, OptimizerStep)
    assert len(alone.loader) == NUM_SAMPLES
    for _ in alone.loader:
        alone.model.weight.grad = torch.ones(1, 1)
        before = float(alone.model.weight)
        alone.optimizer.step()
        assert float(alone.model.weight) == before - 1.0
    assert alone.exchange.version == NUM_SAMPLES


def test_a_skipped_batch_comes_again_after_the_next_one() -> None:
    alone = Alone()
    seen = []
    for batch in alone.loader:
        seen.append(int(batch))
        with alone.step() as step:
            if seen == [0]:
                step.skip()
    assert seen == [0, 1, 0, 2, 3]


def test_iterating_the_loader_inside_its_loop_gives_the_users_batches() -> None:
    alone = Alone()
    for _ in alone.loader:
        assert alone.loop.is_iterating
        assert [int(batch) for batch in alone.loader] == [0, 1, 2, 3]
        assert alone.loop.is_iterating
        break
    alone.loop.end_iteration()
    assert not alone.loop.is_iterating


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_non_finite_update_is_refused_or_skipped(nonfinite: str) -> None:
    alone = Alone(nonfinite=nonfinite)
    before = float(alone.model.weight)
    alone.model.weight.grad = torch.full((1, 1), float("inf"))
    if nonfinite == "error":
        with pytest.raises(WorkerError, match="gradient of 'weight' is not finite at step 0"):
            alone.optimizer.step()
        return
    alone.optimizer.step()
    assert float(alone.model.weight) == before
    assert (alone.exchange.version, alone.exchange.applied(1)) == (1, 0)


def test_a_meaningless_step_is_refused() -> None:
    alone = Alone(precision="bf16")
    with pytest.raises(ConfigError, match="the script computes without it"):
        alone.optimizer.step()
    assert alone.loop.is_failing
    with pytest.raises(ConfigError, match=r"step\.weight must be >= 0"):
        alone.step().weight = -1.0


def test_an_evaluation_sums_results_and_explains_wrong_ones() -> None:
    alone = Alone()
    alone.model.train()
    evaluation = Evaluation(alone.exchange, alone.prepared, 0, CPU)
    modes = []

    def sums(batch: torch.Tensor) -> dict[str, tuple[float, int]]:
        modes.append(alone.model.training)
        return {"x": (float(batch.sum()), len(batch))}

    assert evaluation.totals(sums, alone.loader) == {"x": (6.0, 4.0)}
    assert modes == [False] * NUM_SAMPLES
    assert alone.model.training
    with pytest.raises(ConfigError, match="it looks like a mean or one sum"):
        evaluation.totals(lambda _: {"x": 1.0}, alone.loader)  # type: ignore[dict-item]


def test_prepare_is_called_once_and_returns_objects_in_order() -> None:
    alone = Alone()
    pace = Pace(SoloExchange(), Context(device="cpu"))
    model, optimizer, loader = alone.objects
    ready = pace.prepare(loader, optimizer, model)
    assert isinstance(ready[0], PreparedLoader)
    assert ready[1:] == (optimizer, model)
    with pytest.raises(ConfigError, match="prepare all objects in one call"):
        pace.prepare(model)
    with pytest.raises(ConfigError, match="batch must be 'global'"):
        pace.prepare(model, batch="each")
    assert list(pace.epochs(2)) == [0, 1]


def test_none_is_returned_in_its_place() -> None:
    alone = Alone()
    model, optimizer, loader = alone.objects
    with pytest.raises(ConfigError, match=r"prepare\(\) needs a model, got none"):
        Pace(SoloExchange(), Context(device="cpu")).prepare(None, None)
    pace = Pace(SoloExchange(), Context(device="cpu"))
    ready = pace.prepare(model, None, optimizer, loader, None)
    assert (*ready[:3], *ready[4:]) == (model, None, optimizer, None)
    assert isinstance(ready[3], PreparedLoader)


def test_a_model_on_the_cpu_is_refused_where_batches_are_moved() -> None:
    pace, model = Pace(SoloExchange(), Context(device="cpu")), nn.Linear(2, 2)
    pace.device = torch.device("cuda", 0)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 4
    with pytest.raises(ConfigError, match="is on cpu, but this worker's batches are on cuda:0"):
        pace.prepare(model, optimizer, DataLoader(data))  # type: ignore[arg-type]  # a list is a data set
    pace.prepare(model, optimizer)  # draws its batches itself
