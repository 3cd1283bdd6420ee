"""A model is built and walked: mismatches, chains and wasteful sizes."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.cli.app import run
from paceline.doctor.built.checks import check
from paceline.doctor.built.tables import render_model
from paceline.doctor.built.walk import walk
from paceline.exports.subject import InputShape


def rules(model: nn.Module, batch: int, *shape: int) -> set[tuple[str, str]]:
    findings = check(walk(model, batch, [InputShape(shape, torch.float32)]))
    return {(finding.module, finding.rule) for finding in findings}


def linears(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(ins, outs) for ins, outs in itertools.pairwise(sizes)]


class Net(nn.Module):
    """All faults that a Sequential cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 5)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(100, 16)
        self.idle = nn.Linear(8, 8)
        self.listed = [nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.softmax(self.head(x.flatten(1)), dim=1)


class AsksForNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(x + 1 if x.sum() > 0 else x)
        return result


def test_mismatch_chain_and_sizes_of_the_first_program_are_found() -> None:
    """Its feature mismatch, linear chain and sizes, by module."""
    model = nn.Sequential(*linears(128, 64, 32, 16, 8, 4, 5))
    findings = check(walk(model, 128, [InputShape((15,), torch.float32)]))
    mismatch, chain = findings[:2]
    assert (mismatch.module, mismatch.fix) == ("0", "in_features=15")
    assert "that is the number of samples" in mismatch.what
    assert (chain.module, chain.rule) == ("0", "linear-chain")
    assert {finding.module for finding in findings if finding.rule == "tensor-core-sizes"} == {
        "0",
        "5",
    }
    assert model[0].in_features == 128, "the user's own model was changed"


def test_each_finding_names_its_module() -> None:
    assert rules(Net(), 4, 3, 32, 32) == {
        ("conv", "bias-before-norm"), ("head", "feature-mismatch"), ("conv", "tensor-core-sizes"),
        ("listed", "unregistered-modules"), ("idle", "unused-parameters"),
        ("the output", "softmax-into-cross-entropy"),
    }  # fmt: skip


def test_layers_after_a_mismatch_are_checked() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(7, 8)
    )
    seen = walk(model, 2, [InputShape((8, 6, 6), torch.float32)])
    fixes = {one.fix for one in check(seen) if one.rule == "feature-mismatch"}
    assert fixes == {"in_channels=8", "num_features=8", "in_features=128"}
    assert seen.outputs == (2, 8)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.ReLU(), nn.Linear(32, 8)),
        nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16)),  # low rank
        nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU()),
        AsksForNumbers(),
    ],
)
def test_healthy_model_has_no_findings(model: nn.Module) -> None:
    width = 8 if isinstance(model, AsksForNumbers) else 16
    assert rules(model, 4, width) == set()


def test_dropout_and_views_do_not_break_a_linear_chain() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Unflatten(1, (4, 8)),
                          nn.Linear(8, 24))  # fmt: skip
    assert ("0", "linear-chain") in rules(model, 4, 16)


class Residual(nn.Module):
    """The start of EDSR: two convolutions, with the output of the first added after them."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.head, self.first = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        y: torch.Tensor = self.second(F.relu(self.first(x)))
        return x + y if self.adds else y


class Attends(nn.Module):
    """Queries and keys of one projection; also returns the features."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.q, self.k = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.into(x)
        scores = self.q(x) @ self.k(x).mT
        return scores, x


class Featured(nn.Module):
    """Scores with their features; or with only sizes read in between."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns, self.into, self.out = returns, nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.into(x)
        scores = self.out(x.view(x.size(0), -1).float().contiguous())
        return (scores, x) if self.returns else (scores,)


def test_layers_with_shared_inputs_form_no_linear_chain() -> None:
    assert ("head", "linear-chain") in rules(Residual(adds=False), 4, 8, 6, 6)
    assert rules(Residual(adds=True), 4, 8, 6, 6) == set()
    assert rules(Attends(), 4, 8, 16) == set()
    assert ("into", "linear-chain") in rules(Featured(returns=False), 4, 16)
    assert rules(Featured(returns=True), 4, 16) == set()


def test_tensor_core_sizes_are_weighted_by_work() -> None:
    """Ten classes after a large layer waste little; a narrow hidden size wastes much."""
    assert rules(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10)), 8, 1024) == (
        set()
    )
    assert ("0", "tensor-core-sizes") in rules(nn.Sequential(nn.Linear(33, 33)), 8, 33)


def test_failing_forward_pass_is_a_finding_with_its_location() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    seen = walk(Fails(), 2, [InputShape((3,), torch.float32)])
    (result,) = check(seen)
    assert (result.rule, "test_built.py" in result.what) == ("forward-fails", True)
    assert "1 bug" in next(render_model("x", seen, [result]))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["torch.nn:ReLU"], "needs the shape of an input"),
        (["torch.nn:ReLU", "--input", "x"], "must be sizes >= 1"),
        (["collections:nothing", "--input", "1,2"], "collections:nothing could not be made"),
        (
            ["collections:OrderedDict", "--input", "1,2"],
            "must return an nn.Module, got OrderedDict",
        ),
    ],
)
def test_invalid_model_requests_are_refused(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *asked]) == 2
    assert said in capsys.readouterr().err
