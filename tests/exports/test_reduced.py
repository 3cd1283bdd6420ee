"""Reduced precision: the rounding bound, and the smaller files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.exports import FORMATS
from paceline.exports.reduced import Precision, quantise, reduced

X = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 64)
    ).eval()


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_quantised_weight_is_off_by_at_most_half_a_step(seed: int, factor: float) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * factor
    weight[0] = 0.0
    quantised, scale = quantise(weight)
    assert quantised.dtype is torch.int8
    off = (weight - quantised.to(torch.float32) * scale).abs()
    assert bool((off <= scale / 2 * (1 + 1e-4)).all())
    assert bool((quantised[0] == 0).all())


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.INT8])
@pytest.mark.parametrize("name", ["torchscript", "export"])
def test_reduced_model_is_accurate_and_its_file_smaller(
    tmp_path: Path, precision: Precision, name: str
) -> None:
    model = network()
    small = reduced(model, precision, (X,))
    with torch.no_grad():
        difference = (small(X) - model(X)).abs().max().item()
    assert 0 < difference < 0.05
    sizes = []
    for which, made in (("whole", model), ("small", small)):
        path = tmp_path / which
        FORMATS[name].write(made, (X,), path, is_batch_fixed=False)
        sizes.append(path.stat().st_size)
    assert sizes[1] < (0.40 if precision is Precision.INT8 else 0.62) * sizes[0]


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_tokens_stay_integers(precision: Precision) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2)).eval()
    tokens = torch.arange(8)[None]
    small = reduced(model, precision, (tokens,))
    with torch.no_grad():
        assert (small(tokens) - model(tokens)).abs().max() < 0.05


def test_transformer_encoder_layers_are_not_reduced() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)).eval()
    rows = torch.randn(1, 3, 8)
    small = reduced(model, Precision.INT8, (rows,))
    with torch.no_grad():
        assert (small(rows) - model(rows)).abs().max() < 0.05
    with pytest.raises(ConfigError, match=r"none but in nn\.TransformerEncoderLayer"):
        reduced(model[0], Precision.INT8, (rows,))


class Halved(nn.Module):
    """Computes with half the weights of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight * 0.5, self.layer.bias)


@pytest.mark.parametrize("name", ["torchscript", "torchscript-trace", "export"])
def test_weights_read_by_other_code_are_as_large_as_before(tmp_path: Path, name: str) -> None:
    model, rows = Halved().eval(), torch.randn(3, 4)
    small, path = reduced(model, Precision.INT8, (rows,)), tmp_path / "model"
    FORMATS[name].write(small, (rows,), path, is_batch_fixed=False)
    with torch.no_grad():
        assert (small(rows) - model(rows)).abs().max() < 0.05
        assert (FORMATS[name].load(path)(rows) - small(rows)).abs().max() < 1e-6


def hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda layer, inputs, output: 10 * output)


def hooked_before(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda layer, inputs: (10 * inputs[0],))


def with_own_forward(layer: nn.Module) -> None:
    layer.forward = lambda x: 10 * nn.functional.relu(x)  # type: ignore[method-assign]  # as users do


@pytest.mark.parametrize("alter", [hooked, hooked_before, with_own_forward])
def test_altered_layers_are_not_reduced(alter: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 1, 1), nn.Linear(4, 4)).eval()
    alter(model[0])
    alter(model[1])
    rows = torch.randn(1, 3, 4)
    small = reduced(model, Precision.INT8, (rows,))
    with torch.no_grad():
        assert (small(rows) - model(rows)).abs().max() < 0.02 * model(rows).abs().max()
    assert [type(layer) for layer in small.children()][:2] == [nn.Linear, nn.Conv2d]


def test_original_model_is_unchanged() -> None:
    model = network()
    before = [value.clone() for value in model.state_dict().values()]
    reduced(model, Precision.INT8, (X,))
    reduced(model, Precision.FP16, (X,))
    after = model.state_dict().values()
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
