"""Every task of the table keeps the contract, and some are tested to learn."""

import inspect as python_inspect
import math

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.arrays import collate_batch
from paceline.data.fetch import Choice
from paceline.workloads import TASKS, load_task
from paceline.workloads.base import Task

NOTE = "the digits stand in"


def on_digits(name: str) -> Choice:
    return Choice(name="digits", note=NOTE)


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return load_task(request.param, 1, None, on_digits)


def test_task_has_its_registered_name(task: Task) -> None:
    assert load_task(task.name, 1, None, on_digits).name == task.name


def test_model_accepts_its_data_and_the_loss_is_a_batch_mean(task: Task) -> None:
    torch.manual_seed(0)
    model, train = task.model().eval(), task.data().train
    inputs, targets = collate_batch(train.__getitems__(list(range(6))))
    outputs = model(inputs)
    each = [task.loss(outputs[i : i + 1], targets[i : i + 1]).item() for i in range(6)]
    assert task.loss(outputs, targets).item() == pytest.approx(sum(each) / 6, rel=1e-4)


def test_metrics_of_parts_sum_to_those_of_the_whole(task: Task) -> None:
    torch.manual_seed(0)
    model, test = task.model().eval(), task.data().test
    inputs, targets = collate_batch(test.__getitems__(list(range(9))))
    outputs = model(inputs).detach()
    whole = task.metrics(outputs, targets)
    parts = [task.metrics(outputs[:4], targets[:4]), task.metrics(outputs[4:], targets[4:])]
    assert "loss" in whole
    for name, (total, count) in whole.items():
        assert count == 9 == sum(part[name][1] for part in parts)
        assert total == pytest.approx(sum(part[name][0] for part in parts), rel=1e-4)


def test_same_seed_gives_the_same_model(task: Task) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(task.model().state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_every_parameter_gets_a_gradient(task: Task) -> None:
    model, train = task.model(), task.data().train
    inputs, targets = collate_batch(train.__getitems__(list(range(8))))
    task.loss(model(inputs), targets).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_optimizer_uses_the_learning_rate_of_the_task(task: Task) -> None:
    optimizer = task.optimizer(task.model().parameters(), task.learning_rate)
    assert [group["lr"] for group in optimizer.param_groups] == [task.learning_rate]


def test_task_table_names_the_data_set_of_each_task() -> None:
    for name, entry in TASKS.items():
        asked: list[str] = []

        def chooser(wished: str, asked: list[str] = asked) -> Choice:
            asked.append(wished)
            return on_digits(wished)

        task = load_task(name, 1, None, chooser)
        assert set(asked) == ({entry.data_set} if entry.data_set else set())
        if asked:
            assert task.notes[0] == NOTE
            assert task.data().source.endswith("scaled up to 28x28)")


def test_factories_are_called_with_workers_init_and_chooser() -> None:
    for entry in TASKS.values():
        names = list(python_inspect.signature(entry.factory()).parameters)
        assert names == ["num_workers", "init", "chooser"]


# resnet18 is too slow to train in a unit test.
@pytest.mark.parametrize(
    ("name", "init", "num_epochs"),
    [("softmax", None, 3), ("lenet", "default", 3), ("quadratic", None, 1)],
)
def test_task_learns(name: str, init: str | None, num_epochs: int) -> None:
    task = load_task(name, 1, init, on_digits)
    torch.manual_seed(0)
    model, splits = task.model(), task.data()
    optimizer = task.optimizer(model.parameters(), task.learning_rate)
    loader = DataLoader(
        splits.train, batch_size=task.batch_size, shuffle=True, collate_fn=collate_batch
    )
    before = _loss(task, model)
    for _ in range(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
    after = _loss(task, model)
    assert math.isfinite(after)
    assert after < before * 0.6


@torch.no_grad()
def _loss(task: Task, model: torch.nn.Module) -> float:
    test = task.data().test
    inputs, targets = collate_batch(test.__getitems__(list(range(len(test)))))
    total, count = task.metrics(model(inputs), targets)["loss"]
    return total / count
