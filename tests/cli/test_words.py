"""What peers' users type is understood or answered, and the script's words are left alone."""

import pytest

from paceline.cli.flags import translate
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["train", "lenet", "--nproc_per_node", "4"], ["train", "lenet", "--workers", "4"]),
        (["train", "lenet", "--learning-rate=0.1"], ["train", "lenet", "--lr=0.1"]),
    ],
)
def test_a_peers_flag_becomes_ours(given: list[str], ours: list[str]) -> None:
    assert translate(given) == (ours, [])


def test_everything_from_the_scripts_name_on_is_the_scripts() -> None:
    given = ["launch", "--np", "2", "train.py", "--learning-rate", "1"]
    ours, rest = translate(given)
    assert ours == ["launch", "--workers", "2"]
    assert rest == ["--", "train.py", "--learning-rate", "1"]


def test_a_module_is_told_from_a_file() -> None:
    assert translate(["launch", "-m", "pkg.train", "-n", "3"]) == (
        ["launch", "--module"],
        ["--", "pkg.train", "-n", "3"],
    )


def test_a_flag_that_means_something_else_here_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"--gpus.*--workers N"):
        translate(["train", "lenet", "--gpus", "2"])
    with pytest.raises(ConfigError, match="--wrokers"):
        translate(["launch", "--wrokers", "2", "train.py"])
