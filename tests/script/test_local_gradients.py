"""The gradients of one member: what a push says of them, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from paceline.errors import ConfigError
from paceline.exchange.base import Work
from paceline.exchange.solo import SoloExchange
from paceline.script.amp import Amp
from paceline.script.grad_scaler import Scaling
from paceline.script.gradients import LocalGradients
from paceline.store.clip import UNCLIPPED, Clip

CPU = torch.device("cpu")


def made(*, is_local: bool = False) -> tuple[nn.Module, LocalGradients]:
    """A model with gradients 1 and 2, and its ``LocalGradients``."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = LocalGradients(SoloExchange(), model, optimizer, CPU, None, is_local=is_local)
    model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.full((1,), 2.0)
    return model, gradients


def test_a_clip_of_the_average_is_sent_with_the_push_and_its_norm_returned() -> None:
    model, gradients = made()
    norm = gradients.clip_norm(model.parameters(), 3.0, 2.0)
    gradients.clip_value(model.parameters(), 0.5)
    with pytest.raises(ConfigError, match=r"exists only after optimizer.step\(\)"):
        bool(norm > 1)
    gradients.loss = torch.tensor(7.0)
    work = gradients.asked()
    assert (work.clip, work.loss) == (Clip(max_norm=3.0, max_value=0.5), 7.0)
    gradients.pushed(1.5)
    assert float(norm) == 1.5
    again = gradients.asked()
    assert again.clip == UNCLIPPED
    assert math.isnan(again.loss)


def test_a_local_clip_is_torchs_own() -> None:
    model, gradients = made(is_local=True)
    assert float(gradients.clip_norm(model.parameters(), 100.0, 2.0)) == pytest.approx(5**0.5)
    assert gradients.asked().clip == UNCLIPPED


def test_clipping_only_some_gradients_is_refused() -> None:
    model, gradients = made()
    with pytest.raises(ConfigError, match="was given 1 parameters that have gradients"):
        gradients.clip_norm([model.weight], 1.0, 2.0)
    with pytest.raises(ConfigError, match="max_norm must be >= 0, got -1"):
        gradients.clip_norm(model.parameters(), -1.0, 2.0)


def test_dropped_gradients_are_gone() -> None:
    model, gradients = made()
    gradients.clip_value(model.parameters(), 0.5)
    assert gradients.are_there()
    gradients.drop()
    assert not gradients.are_there()
    assert gradients.asked().clip == UNCLIPPED


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_the_first_non_finite_gradient_is_named(value: float) -> None:
    model, gradients = made()
    assert gradients.first_not_finite(0) is None
    model.bias.grad = torch.full((1,), value)
    assert gradients.first_not_finite(0) == "bias"


def test_a_sum_that_overflows_is_not_a_non_finite_gradient() -> None:
    model, gradients = made()
    model.weight.grad, model.bias.grad = torch.full((1, 1), 3e38), torch.full((1,), 3e38)
    assert gradients.first_not_finite(0) is None


def test_a_loss_must_be_a_scalar_tensor() -> None:
    _, gradients = made()
    with pytest.raises(ConfigError, match=r"got a tensor of shape \(2,\); leave out .item"):
        gradients.backward(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"got 0\.5; leave out"):
        gradients.backward(0.5)  # type: ignore[arg-type]


def test_a_precision_that_the_script_does_not_use_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    amp = Amp(optimizer, CPU, "bf16")
    with pytest.raises(ConfigError, match="precision bf16 was asked for"):
        amp.check(optimizer)
    amp.autocast(None)
    amp.check(optimizer)
    with pytest.raises(ConfigError, match="autocast takes float16"):
        amp.autocast(torch.float64)


def test_a_scale_left_on_the_optimizer_is_pushed_or_divided_out() -> None:
    model, _ = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = Scaling(SoloExchange(), model, optimizer, is_local=True)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    work = Work(loss=8.0)
    scaling.read(work, optimizer)
    assert (work.inv_scale, work.found_inf, work.loss) == (0.25, True, 2.0)
    assert [
        float(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
    ] == [0.25, 0.5]


def test_a_saved_scale_is_where_the_next_scaler_begins() -> None:
    model, _ = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = Scaling(SoloExchange(), model, optimizer, is_local=True)
    before = GradScaler("cpu", init_scale=8.0, growth_interval=5)
    before.scale(torch.tensor(1.0))
    saved = scaling.remember()
    assert saved is not None
    assert (saved["value"], saved["growth_interval"]) == (8.0, 5)
    del before
    scaling.go_on(saved)
    after = GradScaler("cpu")
    after.scale(torch.tensor(1.0))
    assert (after.get_scale(), after.get_growth_interval()) == (8.0, 5)
