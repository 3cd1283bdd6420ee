"""What a run does by a script's own metrics, by any name; or a note that it does nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

Say = Callable[[str], tuple[int, str, str]]
SCRIPT = """\
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = TensorDataset(torch.ones(8, 2))
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(4):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).mean().backward()  # each epoch takes the same from each weight
            optimizer.step()
    worth = [0.1, 0.9, 0.5, 0.2][epoch]
    if {evaluates}:
        pace.evaluate(lambda batch: {{"{name}": (worth * len(batch[0]), len(batch[0]))}},
                      DataLoader(data, batch_size=4))
"""


@pytest.fixture
def launch(say: Say, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def run(flags: str, name: str = "accuracy", evaluates: bool = True) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(SCRIPT.format(name=name, evaluates=evaluates))
        return say(f"launch --workers 2 --device cpu --run-dir run {flags} train.py")

    return run


@pytest.mark.parametrize("name", ["acc", "accuracy", "val_acc"])
def test_a_run_ends_at_the_target_accuracy_by_the_scripts_metric_name(
    name: str, launch: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = launch("--target-accuracy 0.8", name)
    assert code == 0, err
    assert "ended             accuracy 0.9000 reached 0.8" in out
    assert "test accuracy     0.9000" in out


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_the_parameters_of_the_best_evaluation_are_kept(
    name: str, launch: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = launch("--keep-best", name)
    assert code == 0, err
    best = load_file(tmp_path / "run" / "best.safetensors")["weight"]
    epochs = 2 if name == "accuracy" else 1  # 0.9 is the best accuracy, 0.1 the best loss
    assert torch.equal(best, torch.full((1, 2), -1.0 * epochs))
    assert "has no effect" not in out


def test_a_flag_without_effect_is_reported_with_the_metrics_name(
    launch: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = launch("--target-accuracy 0.8 --keep-best", "f1")
    assert code == 0
    for flag in ("--target-accuracy", "--keep-best"):
        assert out.count(f"note: {flag} has no effect: pace.evaluate measures 'f1', and none") == 1


def test_flags_of_a_script_that_never_evaluates_are_reported_at_the_end(
    launch: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = launch("--target-accuracy 0.8 --keep-best", evaluates=False)
    assert code == 0
    for flag in ("--target-accuracy", "--keep-best"):
        assert (
            out.count(f"note: {flag} had no effect: pace.evaluate(fn, loader) was not called") == 1
        )


def test_an_accuracy_after_another_metric_counts(
    launch: Callable[..., tuple[int, str, str]], say: Say, tmp_path: Path
) -> None:
    text = SCRIPT.format(name="accuracy", evaluates=True)
    before, result, after = text.partition("        pace.evaluate(")
    first = (
        '        pace.evaluate(lambda batch: {"loss": (1.0, 1)}, DataLoader(data, batch_size=4))\n'
    )
    (tmp_path / "train.py").write_text(before + first + result + after)
    code, out, err = say("launch --workers 2 --device cpu --target-accuracy 0.8 train.py")
    assert code == 0, err
    assert "accuracy 0.9000 reached 0.8" in out
    assert "has no effect" not in out
