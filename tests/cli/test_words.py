"""Flags of other launchers are translated or refused; arguments of the script stay."""

import ast
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.cli
from paceline.cli.flags import translate
from paceline.config import NAMES, flag_of, help_of
from paceline.errors import ConfigError

FRAGMENTS = {"Of", "That", "They", "From", "For", "Instead:", "There,", "On", "n,", "n:", "cpu,"}
"""First words of a help text that only makes sense after the name of its flag."""


def helps() -> Iterator[tuple[str, str]]:
    """Each flag and what its help says."""
    yield from ((flag_of(name), help_of(name)) for name in NAMES)
    for path in sorted(Path(str(paceline.cli.__file__)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Parameter":
                texts = [one.value for one in node.keywords if one.arg == "help"]
                yield from ((path.name, str(ast.literal_eval(one))) for one in texts
                            if isinstance(one, ast.Constant))  # fmt: skip
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            _, _, listed = (ast.get_docstring(node) or "").partition("Parameters\n----------\n")
            lines = listed.splitlines()
            for name, text in itertools.pairwise(lines):
                if not name.startswith(" ") and text.startswith(" "):
                    yield f"{path.name}, {node.name}, {name}", inspect.cleandoc(text)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["train", "lenet", "--nproc_per_node", "4"], ["train", "lenet", "--workers", "4"]),
        (["train", "lenet", "--learning-rate=0.1"], ["train", "lenet", "--lr=0.1"]),
    ],
)
def test_other_launchers_flag_is_translated(given: list[str], ours: list[str]) -> None:
    assert translate(given) == (ours, [])


def test_help_of_each_flag_is_a_complete_sentence() -> None:
    results = list(helps())
    assert len(results) > 150  # fails if this test no longer finds them
    fragments = [result for result in results if result[1].split()[0] in FRAGMENTS]
    assert fragments == []


def test_all_arguments_from_the_script_on_belong_to_it() -> None:
    given = ["launch", "--np", "2", "train.py", "--learning-rate", "1"]
    ours, rest = translate(given)
    assert ours == ["launch", "--workers", "2"]
    assert rest == ["--", "train.py", "--learning-rate", "1"]


def test_module_and_file_are_distinguished() -> None:
    assert translate(["launch", "-m", "pkg.train", "-n", "3"]) == (
        ["launch", "--module"],
        ["--", "pkg.train", "-n", "3"],
    )


def test_flag_with_another_meaning_gets_advice() -> None:
    with pytest.raises(ConfigError, match=r"--gpus.*--workers N"):
        translate(["train", "lenet", "--gpus", "2"])
    with pytest.raises(ConfigError, match="--wrokers"):
        translate(["launch", "--wrokers", "2", "train.py"])
