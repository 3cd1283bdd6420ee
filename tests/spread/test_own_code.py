"""State read by the code of a divided model is checked, and changes are refused by name."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.splits.tracing import trace
from paceline.spread.cut import followed
from paceline.spread.own_code import difference

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)
FACTOR = [1.0]
LAYERS = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)]


class Annealed(nn.Module):
    """Reads many kinds of state in its forward pass."""

    shift = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
        self.tau, self.depth, self.said, self.epoch = 1.0, [1.0, 2.0], False, 0
        self.settings = SimpleNamespace(scale=1.0, epoch=0)
        self.options = {"scale": 1.0}
        self.weights = torch.ones(6)
        self.register_buffer("heat", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.said:
            print("called")
        x = self.act(self.first(x)) / self.tau * self.depth[0] * self.settings.scale
        x = self.last(x * self.options["scale"] * self.weights.exp()) * self.factor()
        return x * self.heat.exp()

    def factor(self) -> float:
        return FACTOR[0] + type(self).shift


def change(change: Callable[[Annealed], object], calls: int = 1) -> None:
    model = Annealed()
    code = followed(model, (X,))
    code.retire()
    for _ in range(2):
        code.check()
    change(model)
    for _ in range(calls):
        code.check()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tau", 0.5, "Annealed.tau was 1.0 when Annealed was split and is now 0.5"),
        ("depth", [3.0, 2.0], r"Annealed.depth was \[1.0, 2.0\]"),
        ("act", nn.Identity(), "Annealed.act was another ReLU when .* and is now another Identity"),
        ("weights", torch.zeros(6), "Annealed.weights was another Tensor"),
    ],
)
def test_changed_attribute_read_by_forward_is_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        change(lambda model: setattr(model, key, value))


def test_changed_nested_or_in_place_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Annealed.settings.scale was 1.0 when"):
        change(lambda model: setattr(model.settings, "scale", 2.0))
    with pytest.raises(ConfigError, match=r"Annealed.options\['scale'\] was 1.0 when"):
        change(lambda model: model.options.update(scale=2.0))
    with pytest.raises(ConfigError, match=r"Annealed.depth was"):
        change(lambda model: model.depth.__setitem__(0, 2.0))
    with pytest.raises(ConfigError, match="_tensor_constant0 has changed"):
        change(lambda model: model.weights.zero_())


def test_change_found_only_by_retracing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(lambda model: monkeypatch.setattr(Annealed, "shift", 0.7))
    with pytest.raises(ConfigError, match=r"is now 'mul_4 = last \* 1.9;"):
        change(lambda model: monkeypatch.setattr(Annealed, "shift", 0.9), calls=2)


def test_harmless_changes_are_allowed() -> None:
    change(lambda model: setattr(model, "epoch", 3))
    change(lambda model: setattr(model, "said", 0))
    change(lambda model: setattr(model, "tau", 1.0))
    change(lambda model: setattr(model, "best", nn.Linear(1, 1)))
    change(lambda model: setattr(model.settings, "epoch", 7))
    change(lambda model: setattr(model, "weights", torch.ones(6)))
    change(lambda model: model.eval())


def test_parts_read_the_current_buffer() -> None:
    model = Annealed()
    parts = followed(model, (X,)).traced.graph_module
    before = model(X)
    model.heat.fill_(1.0)
    assert torch.allclose(parts(X), model(X))
    assert not torch.allclose(parts(X), before)


class Keeping(nn.Module):
    """Sets attributes; with ``counts`` it also reads them."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.counts, self.num = nn.Linear(6, 6), nn.Linear(6, 3), counts, 0
        self.aux_loss, self.seen = torch.zeros(()), list[Tensor]()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.num += 1
        if self.mask is None:
            self.mask = torch.ones(6)
        hidden = self.first(x) * self.mask
        self.aux_loss, self.seen = hidden.pow(2).mean(), [hidden]
        return self.last(hidden)


def test_attribute_set_by_forward_is_refused_later() -> None:
    model = Keeping()
    code = followed(model, (X,))
    code.retire()
    loss = torch.ones((), requires_grad=True)
    for use in (
        lambda: loss + model.aux_loss,
        lambda: model.aux_loss * 0.5,
        lambda: model.aux_loss.item(),
        lambda: torch.stack([loss, model.aux_loss]),
        lambda: f"{model.aux_loss:.3f}",
        lambda: float(model.aux_loss),
    ):
        with pytest.raises(ConfigError, match=r"Keeping.aux_loss is set by forward\(\)"):
            use()
    with pytest.raises(ConfigError, match=r"Keeping.seen is set by forward\(\)"):
        sum(one.sum() for one in model.seen)
    assert isinstance(model.mask, Tensor)
    for _ in range(4):  # and it is traced again in between
        code.check()
    with pytest.raises(ConfigError, match=r"Keeping.aux_loss is set by forward\(\)"):
        print(loss + model.aux_loss)


def test_state_carried_between_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Keeping.num is changed by each forward pass"):
        followed(Keeping(counts=True), (X,))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training and random.random() < 1e-9:
            hidden = x
        return self.last(hidden)


def test_code_that_draws_random_numbers_is_kept_whole() -> None:
    traced = trace(nn.Sequential(nn.Linear(6, 6), Dropping()), (X,))
    assert [(one.name, "draws random numbers" in one.why) for one in traced.kept] == [("1", True)]
    assert trace(Dropping(), (X,)).how == "whole"


class Branching(nn.Module):
    """Branches on the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("is_on", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) if self.is_on > 0 else x)


def test_branch_on_a_buffer_is_traced_and_checked() -> None:
    model = Branching()
    code = followed(model, (X,))
    assert (code.traced.how, code.traced.kept) == ("torch.fx", ())
    code.check()
    model.is_on.zero_()
    with pytest.raises(
        ConfigError, match="Branching computes something else than when it was split"
    ):
        code.check()


def test_different_layer_is_detected() -> None:
    one, again = (trace(nn.Sequential(*LAYERS), (X,)).graph_module for _ in range(2))
    other = trace(nn.Sequential(nn.Linear(6, 6), *LAYERS[1:]), (X,)).graph_module
    assert difference(one, again) == ""
    assert difference(one, other) == "0 has changed"
    assert "is now" in difference(one, trace(nn.Sequential(*LAYERS[:2]), (X,)).graph_module)


def test_constants_do_not_count_as_reading_the_mode() -> None:
    class Placed(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) + torch.arange(6))

    assert followed(Placed(), (X,)).traced.how == "torch.fx"
