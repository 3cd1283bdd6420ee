"""Tasks by name, including custom ones, and the errors if there is none."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.workloads import load_task
from paceline.workloads.base import Task

MODULE = """
import torch
from paceline import Task
from paceline.workloads.quadratic import samples, mean_of_values, Quadratic
from paceline.workloads.base import loss_metrics

def mine(**changes):
    wanted = dict(
        name="mine", model=Quadratic, loss=mean_of_values, data=samples, learning_rate=0.1,
        batch_size=8, epochs=1, metrics=loss_metrics(mean_of_values),
    )
    return Task(**(wanted | changes))

made = mine(name="made")
number = 5

def broken():
    return 1 / 0

def lazy():
    return mine(model=Quadratic())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_tasks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(("spec", "name"), [("own_tasks:mine", "mine"), ("own_tasks:made", "made")])
def test_task_or_function_in_the_current_folder_is_found(spec: str, name: str) -> None:
    assert load_task(spec).name == name


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "lennet",
            r"unknown task 'lennet'; did you mean 'lenet'\?.*own task use package.module",
        ),
        (
            "zzz",
            "unknown task 'zzz'. Known: alexnet, lenet, mlp, mlp488k, quadratic, resnet18",
        ),
        (":mine", "must have the form package.module:attribute"),
        ("own_tasks:", "must have the form package.module:attribute"),
        ("own_nothing:mine", "no module 'own_nothing' for task own_nothing:mine .looked in /"),
        ("own_nothing.deep:mine", "no module 'own_nothing'"),
        ("own_tasks:mne", "unknown attribute 'mne' .task own_tasks:mne.*did you mean 'mine'"),
        ("own_tasks:number", "must be a paceline.Task or a function.*got int"),
        ("own_tasks:broken", r"could not be created: ZeroDivisionError: .*own_tasks.py:\d+\)"),
        ("own_tasks:lazy", "model must be callable, got Quadratic.*pass the function"),
    ],
)
def test_invalid_task_name_is_reported(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_task(spec)


def test_failing_module_is_reported_with_its_line(folder: Path) -> None:
    (folder / "own_raises.py").write_text("x = 1\nraise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError, match=r"own_raises failed: RuntimeError: no licence .*py:2\)"):
        load_task("own_raises:task")


def test_invalid_python_module_is_reported_with_its_line(folder: Path) -> None:
    (folder / "own_typo.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r"own_typo failed: SyntaxError: .*own_typo.py:2\)"):
        load_task("own_typo:task")


def test_missing_dependency_is_not_reported_as_a_missing_task(folder: Path) -> None:
    (folder / "own_needs.py").write_text("import own_dependency\n")
    with pytest.raises(ConfigError, match=r"own_needs failed: ModuleNotFoundError.*own_dependency"):
        load_task("own_needs:task")


def test_init_for_a_custom_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'default' is set.*initialises its model itself"):
        load_task("own_tasks:mine", 1, "default")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be > 0, got nan"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"epochs": 1.5}, "epochs must be >= 1, got 1.5"),
        ({"loss": None}, "loss must be callable, got NoneType"),
    ],
)
def test_task_with_an_invalid_setting_is_refused(
    folder: Path, change: dict[str, object], said: str
) -> None:
    sys.path.insert(0, str(folder))
    import own_tasks  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=said):
        own_tasks.mine(**change)


def test_numpy_numbers_are_accepted(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    import own_tasks

    task = own_tasks.mine(batch_size=np.int64(8))
    assert (type(task.batch_size), task.batch_size) == (int, 8)


def test_paceline_task_is_the_same_class() -> None:
    import paceline

    assert paceline.Task is Task


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("./own_tasks.py:made", "names a file instead of a module; use own_tasks:made"),
        ("own_tasks.py:made", "names a file instead of a module; use own_tasks:made"),
        ("sub/own_tasks.py:made", "use own_tasks:made, in the folder sub"),
    ],
)
def test_file_name_gets_the_module_as_advice(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_task(spec)
