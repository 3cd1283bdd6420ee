"""A plain loop with the sample orders and step seeds of a run equals that run bitwise."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.order import EpochOrder
from runs import run_script

SCRIPT = Path(__file__)
SIZE, EPOCHS, SEED = 8, 3, 4


class Augmented(Dataset[Any]):
    """Samples augmented under the random state of their mini-batch."""

    def __init__(self) -> None:
        self.inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4) + random.random() + float(np.random.random())
        return self.inputs[index] + noise, index


class Backwards:
    """Batches made by the script."""

    def __iter__(self) -> Any:
        return iter([[29, 28, 27], list(range(27))[::-1]])

    def __len__(self) -> int:
        return 2


def make(which: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    # torch's single-pass kernel, which runs use by default, rounds differently.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    options: dict[str, Any] = {"batch_size": SIZE, "shuffle": True}
    if which == "generator":
        options["generator"] = torch.Generator().manual_seed(7)
    if which == "batches":
        options = {"batch_sampler": Backwards()}
    return model, optimizer, DataLoader(Augmented(), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def run_by_paceline(which: str) -> None:
    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(*make(which))
    for _ in pace.epochs(EPOCHS):
        for inputs, _ in loader:
            with pace.step():
                step(model, optimizer, inputs)
    torch.save(model.state_dict(), f"{which}.pt")


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def run_plainly(which: str) -> dict[str, Any]:
    model, optimizer, loader = make(which)
    for epoch in range(EPOCHS):
        order = paceline.epoch_order(loader, SEED, epoch)
        if which != "batches":
            order = [order[at : at + SIZE] for at in range(0, len(order), SIZE)]
        position = 0
        for batch in order:
            seed(paceline.step_seed(SEED, epoch, position, is_loading=True))
            inputs = torch.stack([loader.dataset[index][0] for index in batch])
            seed(paceline.step_seed(SEED, epoch, position))
            step(model, optimizer, inputs)
            position += len(batch)
    return model.state_dict()


@pytest.mark.parametrize("which", ["shuffled", "generator", "batches"])
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_run_of_one_worker_equals_its_plain_twin(
    engine: Any, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(SCRIPT, tmp_path, which, workers=1, engine=engine, seed=SEED)
    actual, expected = torch.load(tmp_path / f"{which}.pt"), run_plainly(which)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_step_seeds_are_distinct() -> None:
    seeds = {
        paceline.step_seed(seed, epoch, position, is_loading=is_loading)
        for seed in range(3)
        for epoch in range(3)
        for position in range(0, 24, 8)
        for is_loading in (False, True)
    }
    assert len(seeds) == 54


def test_epoch_order_is_that_of_the_run_and_draws_no_numbers() -> None:
    _, _, loader = make("generator")
    state = torch.get_rng_state(), loader.generator.get_state()
    drawn = EpochOrder(loader, SEED)
    drawn.draw(2)
    assert paceline.epoch_order(loader, SEED, 2) == list(drawn.indices)
    assert paceline.epoch_order(loader, SEED, 2) != paceline.epoch_order(loader, SEED, 1)
    assert torch.equal(state[0], torch.get_rng_state())
    assert torch.equal(state[1], loader.generator.get_state())


if __name__ == "__main__":
    import sys

    run_by_paceline(sys.argv[1])
