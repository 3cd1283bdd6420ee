"""The constants given to theory are those of the function."""

import pytest
import torch

from paceline.data.arrays import collate_batch
from paceline.workloads import load_task
from paceline.workloads.quadratic import Quadratic, constants, samples


@pytest.fixture
def everything() -> torch.Tensor:
    train = samples().train
    return collate_batch(train.__getitems__(list(range(len(train)))))[0].double()


def test_mean_over_all_samples_is_the_function(everything: torch.Tensor) -> None:
    model = Quadratic().double()
    assert model(everything).mean().item() == pytest.approx(constants().start_gap, rel=1e-6)


def test_optimum_has_zero_gradient_and_the_stated_loss(everything: torch.Tensor) -> None:
    model = Quadratic().double()
    with torch.no_grad():
        model.w.copy_(model.optimum)
    loss = model(everything).mean()
    loss.backward()
    assert loss.item() == pytest.approx(constants().optimum_loss, abs=1e-7)
    assert model.w.grad is not None
    assert model.w.grad.abs().max().item() < 1e-7


def test_gradient_noise_has_the_stated_variance_everywhere(
    everything: torch.Tensor,
) -> None:
    model = Quadratic().double()
    for w in (torch.zeros(32), torch.randn(32, generator=torch.Generator().manual_seed(1))):
        with torch.no_grad():
            model.w.copy_(w)
        full = torch.autograd.grad(model(everything).mean(), model.w)[0]
        squares = [
            (torch.autograd.grad(model(one[None]).mean(), model.w)[0] - full).square().sum().item()
            for one in everything[:400]
        ]
        expected = everything[:400].square().sum(dim=1).mean().item()
        assert sum(squares) / 400 == pytest.approx(expected, rel=1e-5)
    assert everything.square().sum(dim=1).mean().item() == pytest.approx(
        constants().noise_variance, rel=1e-5
    )


def test_curvature_lies_between_the_stated_bounds(everything: torch.Tensor) -> None:
    model = Quadratic().double()

    gradient = torch.autograd.grad(model(everything).mean(), model.w, create_graph=True)[0]
    rows = [torch.autograd.grad(part, model.w, retain_graph=True)[0] for part in gradient]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(rows))
    assert eigenvalues.min().item() == pytest.approx(constants().convexity, rel=1e-5)
    assert eigenvalues.max().item() == pytest.approx(constants().smoothness, rel=1e-5)


def test_quadratic_has_a_loss_and_no_accuracy() -> None:
    task = load_task("quadratic")
    assert set(task.metrics(torch.ones(3), torch.zeros(3))) == {"loss"}


def test_constants_are_not_part_of_the_saved_model() -> None:
    assert set(Quadratic().state_dict()) == {"w"}
