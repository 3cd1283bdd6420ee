"""Operations that stay together, and the report of parts that are kept whole."""

import inspect
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

import hard_to_cut as nets
from paceline.errors import ConfigError
from paceline.splits.pieces import label
from paceline.splits.tracing import TracedModel, trace

FLOATS = torch.linspace(-1.0, 1.0, 12).view(3, 4)


def labels(traced: TracedModel) -> list[list[str]]:
    return [[label(node) for node in piece] for piece in traced.pieces]


def test_in_place_operation_stays_with_the_producer_of_its_tensor() -> None:
    """Not with its later readers."""
    result = labels(trace(nets.Skips(4), (FLOATS,)))
    assert result == [["a"], ["b", "relu"], ["add", ".relu_"], ["c"], ["add"]]


def test_earlier_readers_stay_with_an_in_place_operation() -> None:
    """In a later part it would read the changed tensor."""

    class ReadBefore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            before = hidden + 1
            return self.last(hidden.relu_()) + before

    result = labels(trace(ReadBefore(), (FLOATS,)))
    assert result == [["first", "add", ".relu_"], ["last"], ["add"]]


def test_tuples_and_sizes_stay_with_their_readers() -> None:
    result = labels(trace(nets.TwoInTwoOut(), (FLOATS, torch.tensor([1, 0, 2]))))
    together = next(piece for piece in result if ".chunk" in piece)
    assert together.count("[]") >= 2
    assert ["left"] in result


def test_layer_with_buffers_called_twice_is_one_piece() -> None:
    result = labels(trace(nets.Normed(), (torch.ones(2, 2, 5, 5),)))
    assert [piece.count("norm") for piece in result if "norm" in piece] == [2]


def test_data_dependent_branch_is_kept_whole_and_named() -> None:
    traced = trace(nets.AroundBranching(), (FLOATS,))
    lines, first = inspect.getsourcelines(nets.Branching)
    line = first + next(i for i, text in enumerate(lines) if "if bool" in text)
    (kept,) = traced.kept
    assert kept.name == "branch"
    assert f"hard_to_cut.py:{line}" in kept.why
    assert labels(traced) == [["before"], ["branch"], ["relu"], ["behind"]]


def test_branching_model_is_one_piece() -> None:
    traced = trace(nets.Branching(), (FLOATS,))
    assert (traced.how, len(traced.pieces)) == ("whole", 1)
    assert "hard_to_cut.py:" in traced.kept[0].why


@pytest.mark.parametrize("module", [nets.SometimesSkips(), nets.Loops()])
def test_data_dependent_calls_of_children_keep_the_model_whole(module: nn.Module) -> None:
    traced = trace(module, (FLOATS,))
    assert (traced.how, len(traced.pieces)) == ("whole", 1)


def test_layers_using_batch_statistics_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert trace(model, (FLOATS,)).batch_statistics == ("1",)
    assert trace(model.eval(), (FLOATS,)).batch_statistics == ()


def test_tracing_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trace(model, (FLOATS,))
    assert torch.equal(torch.rand(2), expected)
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_that_does_not_run_gets_a_one_line_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(7, 7)

    with pytest.raises(ConfigError, match=r"does not run on its inputs: .*test_tracing.py:\d+"):
        trace(Wrong(), (FLOATS,))


def say(words: str) -> None:
    print(words, file=sys.stderr)


class Loud(nn.Module):
    """Prints while it is exported, and so does another thread."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x).__name__ == "FakeTensor":
            say("from here")
            other = threading.Thread(target=say, args=("from another thread",))
            other.start()
            other.join()
        return x * 2 if x.shape[1] > 2 else x


def test_only_what_the_exporting_thread_prints_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trace(Loud(), (torch.ones(2, 8),)).how == "torch.export"
    assert set(capsys.readouterr().err.split("\n")) == {"from another thread", ""}
