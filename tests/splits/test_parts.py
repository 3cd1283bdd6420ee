"""Any cut of any module computes the same as the module, gradients included."""

import copy
import random
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hard_to_cut as nets
from forked import Forked
from paceline.errors import ConfigError
from paceline.splits.parts import make_parts, run_parts
from paceline.splits.tracing import trace
from paceline.workloads.resnets import build_resnet18
from paceline.workloads.transformer import Transformer

FLOATS = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)
WORDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], str]] = {
    "skips and in-place": (nets.Skips(4), (FLOATS,), "torch.fx"),
    "tied ends": (nets.TiedEnds(), (WORDS,), "torch.fx"),
    "two in, two out": (nets.TwoInTwoOut(), (FLOATS, torch.tensor([1, 0, 2])), "torch.fx"),
    "a layer with buffers twice": (
        nets.Normed(), (torch.ones(2, 2, 5, 5, dtype=torch.float64),), "torch.fx",
    ),
    "a part that branches": (nets.AroundBranching(), (FLOATS,), "torch.fx"),
    "torch.export": (nets.ByLength(), (FLOATS,), "torch.export"),
    "a submodule by torch.export": (nets.AroundByLength(), (FLOATS,), "torch.export"),
    "defaults": (nets.Defaults(), (FLOATS,), "torch.fx"),
    "a row of children": (nets.RowOfChildren(), (FLOATS,), "children"),
    "a transformer": (
        Transformer(num_tokens=16, window=3, width=8, num_heads=2, depth=2), (WORDS,), "torch.fx",
    ),
    "resnet18": (
        build_resnet18(10, 1), (torch.ones(2, 1, 16, 16, dtype=torch.float64),), "torch.fx",
    ),
}  # fmt: skip


def cuts(num_pieces: int, seed: int) -> list[list[int]]:
    """Cuts along the order of the pieces, into two, three and four parts."""
    draw = random.Random(seed)
    results = []
    for num_parts in (2, 3, 4):
        if num_parts <= num_pieces:
            borders = sorted(draw.sample(range(1, num_pieces), num_parts - 1))
            results.append([sum(i >= border for border in borders) for i in range(num_pieces)])
    return results


def values(outputs: Any) -> dict[str, Tensor]:
    return outputs if isinstance(outputs, dict) else {"": outputs}


def gradients(module: nn.Module, outputs: Any) -> dict[str, Tensor]:
    module.zero_grad()
    sum((value.sin()).sum() for value in values(outputs).values()).backward()
    trained = (pair for pair in module.named_parameters() if pair[1].requires_grad)
    return {name: one.grad.clone() for name, one in trained}


@pytest.mark.parametrize("name", CASES)
def test_parts_of_any_cut_equal_the_whole_model(name: str) -> None:
    module, inputs, how = CASES[name]
    module = copy.deepcopy(module).double()
    traced = trace(module, inputs)
    assert traced.how == how
    state = copy.deepcopy(module.state_dict())
    expected = module(*inputs)
    wanted_grads = gradients(module, expected)
    after = copy.deepcopy(module.state_dict())
    for part_of in cuts(len(traced.pieces), seed=len(name)):
        module.load_state_dict(state)
        parts = make_parts(traced, part_of)
        actual = run_parts(parts, inputs)
        assert values(actual).keys() == values(expected).keys()
        for key, value in values(expected).items():
            torch.testing.assert_close(values(actual)[key], value, rtol=1e-12, atol=1e-12)
        for key, grad in gradients(module, actual).items():
            torch.testing.assert_close(grad, wanted_grads[key], rtol=1e-9, atol=1e-12)
        for key, value in module.state_dict().items():
            torch.testing.assert_close(value, after[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_parts_together_have_the_names_of_the_whole(name: str) -> None:
    module, inputs, _ = CASES[name]
    module = copy.deepcopy(module).double()
    traced = trace(module, inputs)
    for part_of in cuts(len(traced.pieces), seed=1):
        parts = make_parts(traced, part_of)
        names = [one for part in parts for one in part.parameters]
        assert set(names) == {one for one, _ in module.named_parameters()}
        twice = {one for one in names if names.count(one) > 1}
        assert twice == {one for part in parts for one in part.shared}
        assert {one for part in parts for one in part.buffers} == {
            one for one, _ in module.named_buffers()
        }


def test_tied_weight_across_parts_is_reported_as_shared() -> None:
    module = nets.TiedEnds()
    traced = trace(module, (WORDS,))
    first, last = make_parts(traced, [0] * (len(traced.pieces) - 1) + [1])
    assert first.shared == last.shared == ("tokens.weight",)
    assert dict(last.module.named_parameters())["tokens.weight"] is module.tokens.weight


def test_cut_that_needs_a_later_part_is_refused() -> None:
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (FLOATS.float(),))
    with pytest.raises(ConfigError, match="part 0 needs _0 of a later part"):
        make_parts(traced, [1, 0])
    with pytest.raises(ConfigError, match="2 pieces need a part each, got 1"):
        make_parts(traced, [0])


def test_parts_run_in_the_pipeline_of_torch(tmp_path: Path) -> None:
    """Two processes, 1f1b, a tied weight in both parts: gradients and loss equal the whole."""
    script = Path(__file__).parents[1] / "support" / "pipelined.py"
    ranks = [
        Forked([script, rank, 2, tmp_path / "store"], stdout=PIPE, stderr=STDOUT)
        for rank in range(2)
    ]
    for one in ranks:
        out, _ = one.communicate(timeout=100)
        assert one.returncode == 0, out
        assert "1 shared" in out
