"""Settings: priority of sources, refusals, and helpful messages."""

import os
from pathlib import Path

import pytest

from paceline.compression import COMPRESSORS
from paceline.config import NAMES, RunSettings, help_of, resolve
from paceline.errors import ConfigError
from paceline.fields import spelled
from paceline.protocols import PROTOCOLS, spelling
from paceline.protocols.outer import SPELLINGS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide settings files of the developer."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_setting_has_a_default_and_a_help_text() -> None:
    assert resolve({}, None, {}).settings == RunSettings()
    assert all(field.metadata["help"] for field in RunSettings.__dataclass_fields__.values())


def test_higher_priority_source_wins_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('workers = 2\nseed = 2\nprotocol = "async"\nslow = ["1=5x"]\n')
    env = {"PACELINE_SEED": "3", "PACELINE_PROTOCOL": "k-sync:1", "HOME": "/nowhere"}
    resolved = resolve({"protocol": "k-sync:2"}, file, env)
    assert resolved.settings.workers == 2
    assert resolved.settings.seed == 3
    assert resolved.settings.protocol == "k-sync:2"
    assert resolved.settings.slow == ("1=5x",)
    assert resolved.origins["workers"] == str(file)
    assert resolved.origins["seed"] == "PACELINE_SEED"
    assert resolved.origins["protocol"] == "--protocol"
    assert resolved.origins["engine"] == "default"
    assert set(resolved.origins) == set(NAMES)


FAULTS = ("kill worker 1 at update 100", "stop worker 0 at 5s for 2s")


@pytest.mark.parametrize(
    ("text", "found"),
    [(FAULTS[0], FAULTS[:1]), ("; ".join(FAULTS), FAULTS), (f" {FAULTS[1]} ;", FAULTS[1:])],
)
def test_fault_is_a_sentence_with_spaces(text: str, found: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'fault = "{text}"\n')
    assert resolve({}, file, {}).settings.fault == found
    assert resolve({}, None, {"PACELINE_FAULT": text}).settings.fault == found
    assert resolve({"fault": text}, None, {}, is_call=True).settings.fault == found


@pytest.mark.parametrize("name", ["paceline.toml", "paceline.yaml"])
def test_settings_file_in_the_current_folder_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("workers = 3\n" if name.endswith("toml") else "workers: 3\n")
    resolved = resolve({}, None, {})
    assert resolved.settings.workers == 3
    assert resolved.origins["workers"] == name


def test_keys_of_a_file_may_be_spelled_like_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch-size: 512\nkeep-best: true\n")
    settings = resolve({}, file, {}).settings
    assert settings.batch_size == 512
    assert settings.keep_best is True


def test_unknown_key_gets_a_suggestion_and_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("wokers = 2\n")
    with pytest.raises(ConfigError, match=r"'wokers' \(.*run\.toml\); did you mean 'workers'\?"):
        resolve({}, file, {})


def test_unknown_variable_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'PACELINE_WORKERS'"):
        resolve({}, None, {"PACELINE_WORKER": "2"})


def test_unrelated_and_empty_variables_are_ignored() -> None:
    env = {"PACELINE_DATA": "/data", "PACELINE_WORKERS": "", "OTHER": "x"}
    assert resolve({}, None, env).settings == RunSettings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workers": 0}, r"workers must be >= 1, got 0 \(--workers\); one worker is the least"),
        ({"workers": 1.5}, "workers must be a whole number, got 1.5"),
        ({"workers": True}, "workers must be a whole number, got True"),
        ({"lr": 0}, "lr must be > 0, got 0"),
        ({"lr": float("nan")}, "lr must be > 0, got nan"),
        ({"lr": float("inf")}, "lr must be finite, got inf"),
        ({"target_accuracy": 85}, "must be <= 1, got 85.*; write 0.85 for 85 %"),
        ({"engine": "cluster"}, "engine must be one of local, inline, torchrun, got 'cluster'"),
        ({"log": "comet"}, "log must be one of csv, tensorboard, wandb, mlflow, got 'comet'"),
        ({"name": "a/b"}, "name must be a plain folder name"),
        ({"name": "latest"}, "other than 'latest'"),
        ({"protocol": 3}, "protocol must be a text in UTF-8, got 3"),
    ],
)
def test_out_of_range_values_are_refused_with_a_hint(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(flags, None, {})


def test_keyword_argument_is_named_as_an_argument() -> None:
    with pytest.raises(ConfigError, match=r"got 0 \(argument workers\)"):
        resolve({"workers": 0}, None, {}, is_call=True)


def test_batch_size_and_mini_batch_size_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve({"batch_size": 512, "mini_batch_size": 64}, None, {})
    with pytest.raises(ConfigError, match="exclude each other"):
        RunSettings(batch_size=512, mini_batch_size=64)


def test_higher_priority_source_chooses_the_batch_convention() -> None:
    resolved = resolve({"mini_batch_size": 64}, None, {"PACELINE_BATCH_SIZE": "512"})
    assert resolved.settings.batch_size is None
    assert resolved.settings.mini_batch_size == 64
    assert resolved.origins["batch_size"] == "default"


def test_environment_text_is_converted() -> None:
    env = {
        "PACELINE_KEEP_BEST": "yes",
        "PACELINE_LR": "2e-1",
        "PACELINE_DELAY": "0=exp:20ms pareto:2,10ms",
    }
    settings = resolve({}, None, env).settings
    assert (settings.keep_best, settings.lr) == (True, 0.2)
    assert settings.delay == ("0=exp:20ms", "pareto:2,10ms")
    with pytest.raises(ConfigError, match=r"true or false, got 'maybe' \(PACELINE_KEEP_BEST\)"):
        resolve({}, None, {"PACELINE_KEEP_BEST": "maybe"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "workers = \n", "not valid TOML"),
        ("run.yaml", "workers: [1\n", "not valid YAML"),
        ("run.yaml", "- 1\n", "must hold lines like 'workers: 4', got list"),
        ("run.ini", "workers = 2\n", "must end in .toml, .yaml or .yml"),
    ],
)
def test_broken_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve({}, file, {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml cannot be read: No such file"):
        resolve({}, tmp_path / "gone.toml", {})


def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"pipe\.toml cannot be read: it is not a regular file"):
        resolve({}, tmp_path / "pipe.toml", {})


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("protocol", [spelling(one) for one in PROTOCOLS]),
        ("outer", list(SPELLINGS.values())),
        ("compress", [spelled(name, one.arguments) for name, one in COMPRESSORS.items()]),
    ],
)
def test_help_of_a_family_names_all_its_members(name: str, members: list[str]) -> None:
    assert [member for member in members if member not in help_of(name)] == []
