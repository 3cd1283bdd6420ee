"""``paceline plan``: profile, forecasts, race, advice and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import app as command
from paceline.config import RunSettings
from paceline.errors import ConfigError
from paceline.predict import advice, splitting
from paceline.predict.profiles import read_profile
from paceline.run_dir import make_folder

Say = Callable[[str], tuple[int, str, str]]
PROFILE = "train quadratic --engine inline --workers 2 --protocol async --updates 60 --name profile"


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile of two workers."""
    folder = tmp_path_factory.mktemp("profiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert command.run(PROFILE.split()) == 0
    return folder


@pytest.fixture(autouse=True)
def _profile(profiled: Path, tmp_path: Path) -> None:
    shutil.copytree(profiled / "runs", tmp_path / "runs", symlinks=True)


def plan_of(say: Say, flags: str) -> str:
    size = read_profile(Path("runs/profile")).mini_batch_size
    return f"plan quadratic --workers 4 --profile runs/profile --mini-batch-size {size} {flags}"


def test_protocol_that_does_not_wait_for_a_straggler_is_advised(say: Say) -> None:
    line = plan_of(say, "--slow 0=300x --seconds 2 --protocols full-sync,k-sync:3,k-batch-async:3")
    code, out, err = say(f"{line} --json")
    assert code == 0, err
    report = json.loads(out)
    rows = {candidate["protocol"]: candidate for candidate in report["candidates"]}
    assert set(rows) == {"full-sync", "k-sync:3", "k-batch-async:3"}
    assert report["advised"] != "full-sync"
    assert report["candidates"][0]["protocol"] == report["advised"]
    assert [candidate["rank"] for candidate in report["candidates"]] == [1, 2, 3]
    slow, fast = rows["full-sync"], rows["k-sync:3"]
    assert slow["time_per_update_s"] > 10 * fast["time_per_update_s"]
    assert rows["k-batch-async:3"]["thrown_away"] == 0.0 < fast["thrown_away"]
    assert sum(candidate["race_wins"] for candidate in report["candidates"][:2]) <= 3


def test_every_json_field_is_documented_and_the_text_gives_reasons(say: Say) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline plan`")[1].split("\n## ")[0]
    line = plan_of(say, "--seconds 1 --protocols full-sync,async")
    _, out, _ = say(f"{line} --json")
    report = json.loads(out)
    names = [*report, *report["candidates"][0]]
    assert [name for name in names if f"| `{name}` |" not in section] == []
    _, out, _ = say(line)
    for word in ("advice: --protocol", "why: ", "how sure: ", "batches/s", "profile: "):
        assert word in out


def test_first_protocol_to_reach_the_target_is_advised(say: Say) -> None:
    line = plan_of(
        say, "--slow 0=300x --seconds 2 --protocols full-sync,k-sync:3,async --target-loss 0.6"
    )
    code, out, err = say(f"{line} --json")
    assert code == 0, err
    report = json.loads(out)
    first, *_, last = report["candidates"]
    assert last["protocol"] == "full-sync"
    assert last["target_s"] is None or last["target_s"] > 10 * first["target_s"]
    assert report["target"]["name"] == "loss"
    assert report["target"]["is_reached"]
    assert report["target"]["virtual_s"] == first["target_s"]
    assert report["target"]["best"] <= 0.6
    _, out, _ = say(line)
    assert "to target" in out
    assert "loss 0.6: after about" in out
    assert "how sure: " in out


def test_unreached_target_is_reported_with_the_best_loss(say: Say) -> None:
    line = plan_of(say, "--seconds 0.4 --protocols full-sync,async --target-loss=-1")
    code, out, _ = say(line)
    assert code == 0
    assert "loss -1: not reached in" in out
    assert "give the race more --seconds" in out


def test_unreached_target_has_no_best_if_all_diverge(say: Say) -> None:
    line = plan_of(say, "--seconds 0.4 --protocols full-sync,async --target-loss 0.1 --lr 1e6")
    code, out, err = say(f"{line} --json")
    assert (code, "Traceback" in err) == (0, False)
    assert json.loads(out)["target"]["best"] is None
    assert "no value was finite; lower --lr" in say(line)[1]


def test_each_local_step_counts_as_a_mini_batch(say: Say) -> None:
    line = plan_of(say, "--seconds 1 --protocols full-sync,local-sgd:4 --json")
    rows = {
        candidate["protocol"]: candidate for candidate in json.loads(say(line)[1])["candidates"]
    }
    assert rows["local-sgd:4"]["pushes_per_s"] > rows["full-sync"]["pushes_per_s"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan quadratic --workers 1", "at least 2 workers"),
        ("plan quadratic --workers 4 --protocols full-snc", "did you mean 'full-sync'"),
        ("plan quadratic --workers 4 --protocols k-sync:5", "K <= 4"),
        ("plan quadratic --workers 4 --profile nowhere", "cannot be read"),
        (
            "plan softmax --workers 4 --profile runs/profile",
            "task quadratic in the profile, softmax here",
        ),
        ("plan quadratic --workers 4 --slow 9=2x", "there is no worker 9"),
        ("plan quadratic --workers 4 --cores 0", "cores must be >= 1"),
        ("plan quadratic --workers 4 --target-loss 1 --target-accuracy 0.5", "give one target"),
        ("plan quadratic --workers 4 --target-accuracy 5", "at most 1, got 5"),
        ("plan quadratic --workers 4 --lr -1", "lr must be"),
        ("plan quadratic --workers 4 --seconds nan", "seconds must be"),
        ("plan quadratic --workers 4 --seed -1", "seed must be >= 0, got -1 (--seed)"),
        ("plan quadratic --workers 4 --mini-batch-size 0", "mini-batch-size must be"),
        ("plan quadratic --workers 4 --protocols async,async", "async appears twice"),
        ("plan quadratic --workers 4 --slow 1=3x@1s/1s", "does not support slow phases"),
        (
            "plan quadratic --workers 4 --memory 8GiB --protocols async --target-accuracy 0.5",
            "--protocols, --target-accuracy: no effect with --memory",
        ),
        (
            "plan quadratic --workers 4 --batch-size 4 --input 1,3",
            "--batch-size, --input: only for the table of splits; add --memory",
        ),
        ("plan '' --workers 4 --memory 8GiB", "package.module:function is required, got ''"),
        (
            "plan quadratic --workers 4 --profile runs/profile --mini-batch-size 64 "
            "--target-accuracy 0.5",
            "measures no test accuracy",
        ),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_options_without_effect_for_a_large_model_are_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "wants_splits", lambda question: True)
    code, out, err = say("plan quadratic --workers 4 --protocols async --lr 0.1")
    assert (code, out) == (2, "")
    assert "--protocols, --lr: no effect for a model as large as quadratic" in err


def test_profile_of_too_few_steps_is_refused(say: Say) -> None:
    assert say(PROFILE.replace("60", "4").replace("name profile", "name short"))[0] == 0
    with pytest.raises(ConfigError, match="at least 10 are needed for a profile"):
        read_profile(Path("runs/short"))


def test_profile_run_does_not_become_the_latest_run(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def measured(program: object, settings: RunSettings, observer: object) -> None:
        folders.append(make_folder(settings, "quadratic").path)
        raise ConfigError("measured")

    monkeypatch.setattr(advice, "launch_run", measured)
    assert say("plan quadratic --workers 2")[0] == 2
    assert Path("runs/latest").readlink() == Path("profile")
    assert [folder.name.startswith("profile-quadratic-") for folder in folders] == [True]
    assert not folders[0].exists()  # a run that wrote nothing leaves no folder


def test_profile_applies_the_delays_of_the_workers_but_limits_them(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, ...]] = []

    def measured(program: object, settings: RunSettings, observer: object) -> None:
        requests.append(settings.delay[:2])
        raise ConfigError("measured")

    monkeypatch.setattr(advice, "launch_run", measured)
    say("plan quadratic --workers 4 --delay exp:40ms --delay 1=exp:3s --delay 3=5ms")
    say("plan quadratic --workers 4")
    assert requests == [("0=exp:40ms", "1=0.2s"), ()]


def test_profile_uses_the_threads_of_workers_on_the_given_cores(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int | None] = []

    def measured(program: object, settings: RunSettings, observer: object) -> None:
        requests.append(settings.threads)
        raise ConfigError("measured")

    monkeypatch.setattr(advice, "launch_run", measured)
    monkeypatch.setattr(advice, "num_cores", lambda: 16)
    for cores in ("", " --cores 4", " --cores 12", " --cores 64"):
        say(f"plan quadratic --workers 4{cores}")
    assert requests == [None, 1, 3, 4]


def test_profile_without_the_requested_delays_is_reported(say: Say) -> None:
    line = plan_of(say, "--seconds 0.4 --protocols full-sync,async")
    assert "had no --delay" in say(f"{line} --delay 5ms")[2]
    assert "had no --delay" not in say(line)[2]
