"""``pace.epochs`` yields what the script's range or list does, also in a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.passes import ScriptPlace
from paceline.script.worker import Pace
from runs import run_script

SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs({epochs}):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    if pace.is_main:
        with open("epochs", "a") as file:
            print(epoch, file=file)
"""


def epochs(of: Any, **context: Any) -> list[int]:
    return list(Pace(SoloExchange(), Context(device="cpu", **context)).epochs(of))


@pytest.mark.parametrize(
    ("of", "wanted"),
    [
        (3, [0, 1, 2]),
        (0, []),
        (-1, []),
        (range(1, 4), [1, 2, 3]),
        (range(10, 0, -5), [10, 5]),
        ([5, 7, 7], [5, 7, 7]),
        ((2,), [2]),
        (torch.tensor(2), [0, 1]),
    ],
    ids=str,
)
def test_epochs_yields_the_given_values(of: Any, wanted: list[int]) -> None:
    assert epochs(of) == wanted


@pytest.mark.parametrize(
    ("of", "num_epochs", "wanted"),
    [
        (10, 2, [0, 1]),
        (1, 3, [0, 1, 2]),
        (range(1, 11), 2, [1, 2]),
        (range(1, 3), 4, [1, 2, 3, 4]),
        (range(0, 4, 2), 3, [0, 2, 4]),
        ([5, 7, 9], 2, [5, 7]),
    ],
    ids=str,
)
def test_the_command_line_replaces_the_number_of_epochs(
    of: Any, num_epochs: int, wanted: list[int]
) -> None:
    assert epochs(of, epochs=num_epochs) == wanted


@pytest.mark.parametrize(
    ("of", "wanted"), [(4, [2, 3]), (range(1, 5), [3, 4]), ([5, 7, 9, 11], [9, 11]), (2, [])],
    ids=str,
)  # fmt: skip
def test_a_resumed_run_begins_with_the_value_of_its_epoch(of: Any, wanted: list[int]) -> None:
    assert epochs(of, first_epoch=2, place=ScriptPlace(2, 2)) == wanted


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (2.5, r"got 2\.5"),
        ("3", "got '3'"),
        (iter([1, 2]), "got <list_iterator"),
        ([1, 2.0], r"got 2\.0 in it"),
        ({1, 2}, "got {1, 2}"),
        (None, "got None"),
        (True, "got True"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_other_arguments_are_refused_in_one_sentence(of: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"a number of epochs, a range or a list.*{words}"):
        epochs(of)


def test_more_epochs_than_list_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 epochs were asked for.*has 3 values.*range\(\)"):
        epochs([1, 2, 3], epochs=5)


def test_the_loader_gives_one_epoch_per_value() -> None:
    pace = Pace(SoloExchange(), Context(device="cpu"))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(4, 1))
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=2))
    steps = []
    for epoch in pace.epochs(range(1, 3)):
        for (inputs,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                steps.append(epoch)
    assert steps == [1, 1, 2, 2]


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_finished_run_can_be_given_more_epochs(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It resumes with the value after the last one trained, not after the script's last."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.format(epochs="range(1, 8)"))
    options: dict[str, Any] = {"workers": 2, "engine": engine}
    run_script(tmp_path / "train.py", tmp_path, epochs=2, **options)
    (tmp_path / "again").mkdir()
    again = tmp_path / "again"
    run_script(
        tmp_path / "train.py", again, epochs=4, resume=str(tmp_path / "run"), **options
    )  # fmt: skip
    assert (tmp_path / "epochs").read_text().split() == ["1", "2", "3", "4"]


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_an_epochs_flag_is_refused_where_the_script_counts_epochs_itself(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("pace.epochs({epochs})", "range(5)"))
    options: dict[str, Any] = {"workers": 2, "engine": engine}
    with pytest.raises(ConfigError, match=r"--epochs 3: this script counts its epochs itself"):
        run_script(script, tmp_path, epochs=3, **options)
    wrote = tmp_path / "epochs"  # the first pass may be a warm-up before pace.epochs
    assert wrote.read_text().split() == ["0"]
    wrote.unlink()
    (tmp_path / "again").mkdir()
    run_script(script, tmp_path / "again", **options)
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "2", "3", "4"]


def test_a_batch_taken_before_the_loop_keeps_the_epochs_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    loop = "for epoch in pace.epochs(5)"
    script.write_text(SCRIPT.format(epochs=5).replace(loop, "next(iter(loader))\n" + loop))
    run_script(script, tmp_path, epochs=2, workers=2, engine="inline")
    assert (tmp_path / "epochs").read_text().split() == ["0", "1"]
