"""A file is kept if it reproduces the model; otherwise the reason is one line."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.exports.formats import Format, Run
from paceline.exports.proof import write_proved
from paceline.exports.reduced import Precision
from paceline.exports.subject import InputShape, Subject, parse_input, random_inputs
from paceline.system.reasons import reason


class Kept(Format):
    """A format that keeps the model as Python, and answers with its output times ``factor``."""

    name, suffix, summary = "kept", ".kept", ""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def write(
        self, model: nn.Module, inputs: Sequence[Tensor], path: Path, *, is_batch_fixed: bool
    ) -> None:
        torch.save(model, path)

    def load(self, path: Path) -> Run:
        model = torch.load(path, weights_only=False)
        return lambda *inputs: self.factor * model(*inputs)


@pytest.fixture
def subject() -> Subject:
    inputs = random_inputs([parse_input("1,4")])
    return Subject(name="linear", model=nn.Linear(4, 2).eval(), inputs=inputs)


def test_file_with_equal_output_is_kept(subject: Subject, tmp_path: Path) -> None:
    written = write_proved(subject, Kept(1.0), tmp_path / "model.kept")
    assert [path.name for path in tmp_path.iterdir()] == ["model.kept"]
    assert written.num_bytes == written.path.stat().st_size
    assert written.differences == {1: 0.0, 7: 0.0}


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_file_with_different_output_is_deleted(
    subject: Subject, tmp_path: Path, factor: float
) -> None:
    with pytest.raises(ConfigError, match="output differs from the model's"):
        write_proved(subject, Kept(factor), tmp_path / "model.kept")
    assert list(tmp_path.iterdir()) == []


class Positive(nn.Module):
    """Takes no negative numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.sqrt()


def test_altered_inputs_that_the_model_cannot_take_are_left_out(tmp_path: Path) -> None:
    subject = Subject(name="roots", model=Positive(), inputs=lambda batch: (torch.ones(batch, 4),))
    assert write_proved(subject, Kept(1.0), tmp_path / "model.kept").is_example_only
    with pytest.raises(ConfigError, match="output differs from the model's"):
        write_proved(subject, Kept(2.0), tmp_path / "model.kept")


def test_file_is_run_on_other_inputs_than_its_example(subject: Subject, tmp_path: Path) -> None:
    for fixed_batch in (None, 3):
        path = tmp_path / "model.kept"
        assert not write_proved(subject, Kept(1.0), path, fixed_batch=fixed_batch).is_example_only


class Offset(nn.Module):
    """Weights of which int8 keeps only the one that its first input, 0, is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        with torch.no_grad():
            self.layer.weight[:, 0] = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.tensor([0.0, 1.0, 1.0, 1.0]))


def test_precision_that_loses_the_model_is_refused(tmp_path: Path) -> None:
    subject = Subject(name="offset", model=Offset(), inputs=random_inputs([parse_input("1,4")]))
    path = tmp_path / "model.kept"
    with pytest.raises(ConfigError, match="in int8 an output of offset differs from the float32"):
        write_proved(subject, Kept(1.0), path, precision=Precision.INT8)
    assert list(tmp_path.iterdir()) == []
    assert write_proved(subject, Kept(1.0), path).reduction is None


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.INT8])
def test_difference_from_float32_is_reported(
    subject: Subject, tmp_path: Path, precision: Precision
) -> None:
    path = tmp_path / "model.kept"
    reduction = write_proved(subject, Kept(1.0), path, precision=precision).reduction
    assert reduction is not None
    assert 0.0 < reduction < 0.05


class Classes(Offset):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def test_difference_of_classes_is_not_measured(tmp_path: Path) -> None:
    subject = Subject(name="classes", model=Classes(), inputs=random_inputs([parse_input("1,4")]))
    written = write_proved(subject, Kept(1), tmp_path / "model.kept", precision=Precision.INT8)
    assert written.reduction is None


def test_equal_outputs_are_rounded_without_an_error(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 0.3)
    subject = Subject(name="flat", model=model, inputs=random_inputs([parse_input("1,4")]))
    path = tmp_path / "model.kept"
    assert write_proved(subject, Kept(1.0), path, precision=Precision.BF16).reduction == 0.0


class Masked(nn.Module):
    """Some outputs are minus infinity, as masked scores are, and some are nan."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x.masked_fill(x > 1.0, -torch.inf)
        return torch.cat([scores, x.log()], 1)


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x > 0.0


@pytest.mark.parametrize("model", [Masked(), Signs()])
def test_nonfinite_outputs_are_compared_by_value(model: nn.Module, tmp_path: Path) -> None:
    subject = Subject(name="odd", model=model, inputs=random_inputs([parse_input("1,4")]))
    written = write_proved(subject, Kept(1), tmp_path / "model.kept")
    assert written.differences == {1: 0.0, 7: 0.0}
    with pytest.raises(ConfigError, match="output differs from the model's"):
        write_proved(subject, Kept(0), tmp_path / "other.kept")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ValueError"),
        ("too large", "ValueError: too large"),
        ('from user code:\n File "/me/net.py", line 7\nno branch', "no branch (/me/net.py:7)"),
        ("Constraints violated (batch)!\n - batch = 2. More", "the batch cannot vary: batch = 2"),
        ("Unsupported\nExplanation: a loop", "Unsupported; a loop"),
    ],
)
def test_failure_reason_is_one_line_with_the_users_location(text: str, said: str) -> None:
    assert reason(ValueError(text)).endswith(said)


def test_input_shape_omits_the_batch_and_has_a_dtype() -> None:
    assert parse_input("1,1,28,28") == InputShape((1, 28, 28), torch.float32)
