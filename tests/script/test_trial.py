"""``with pace.trial():``: several models trained one after another in one script.

One worker is plain PyTorch. Under full-sync a search equals one process's; under any protocol a
trial equals a separate run. Between trials, and after them, prepared objects are plain again.
"""

import json
import re
import signal
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import trialled
from meanwhile import meanwhile, stop
from paceline.checkpoints.resumption import has_checkpoint
from paceline.config import RunSettings
from paceline.context import Context
from paceline.errors import ConfigError, FileError, Interrupted, WorkerError
from paceline.exchange.solo import SoloExchange
from paceline.launch import launcher
from paceline.launch.lives import WRITTEN
from paceline.program import ScriptProgram
from paceline.report.live import QuietObserver
from paceline.report.trials import TrialsSummary
from paceline.run_dir import TRIALS as TRIALS_FILE
from paceline.script.trials import RUN_FILES, check_name, error_like
from paceline.script.worker import Pace
from paceline.wire.messages import TrialOver
from reference import differ
from runs import nothing_left, run_script

CLOSE = 1e-6
SCRIPT = Path(trialled.__file__)
Say = Callable[[str], tuple[int, str, str]]
TRIALS = [f"lr-{rate}" for rate in trialled.RATES]


class Found(NamedTuple):
    """The result of a search: its summary, each worker's notes, and the output."""

    summary: TrialsSummary
    each: list[dict[str, Any]]
    words: str
    folder: Path

    def of(self, number: int, worker: int = 0) -> dict[str, Tensor]:
        """The result of a trial."""
        result = self.each[worker]["found"]
        return {name: value for name, value in result.items() if name.startswith(f"{number} ")}

    @property
    def notes(self) -> list[str]:
        return [line for line in self.words.splitlines() if line.startswith("note: ")]


def search(folder: Path, case: str, what: str = "nothing", **settings: Any) -> Found:
    """Run a search; the launcher's error, where there is one, is raised."""
    folder.mkdir(exist_ok=True)
    words = StringIO()
    chosen = RunSettings(
        **{"run_dir": str(folder / "run"), "device": "cpu", "threads": 1, "workers": 2, **settings}
    )
    program = ScriptProgram(path=str(SCRIPT), args=(case, str(folder), what))
    with nothing_left():
        summary = launcher.launch_run(program, chosen, QuietObserver(words))
    assert isinstance(summary, TrialsSummary)
    return Found(summary, results(folder), words.getvalue(), folder / "run")


def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]


def twin_of(case: str) -> dict[str, Tensor]:
    return trialled.find(case, trialled.Plain())


def part(result: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: value for name, value in result.items() if name.startswith(f"{number} ")}


def launched(folder: Path, text: str, **settings: Any) -> str:
    """The output of a run of this script."""
    script, words = folder / "script.py", StringIO()
    script.write_text(PREPARED + text)
    chosen = {"run_dir": str(folder / "run"), "device": "cpu", "threads": 1, "workers": 2}
    program = ScriptProgram(path=str(script), args=(str(folder),))
    with nothing_left():
        launcher.launch_run(program, RunSettings(**{**chosen, **settings}), QuietObserver(words))
    return words.getvalue()


PREPARED = """\
import os, sys, torch
from pathlib import Path
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
folder = Path(sys.argv[1])
data = TensorDataset(torch.rand(32, 2), torch.rand(32, 1))

def prepared(rate=0.1):
    model = nn.Linear(2, 1)
    return pace.prepare(model, SGD(model.parameters(), lr=rate), DataLoader(data, batch_size=8))

def fn(batch):
    return {"acc": (float(len(batch[0])), len(batch[0]))}

def train(model, optimizer, loader, epochs=2):
    for epoch in pace.epochs(epochs):
        for x, y in loader:
            with pace.step():
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

"""


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", trialled.CASES)
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(case: str) -> None:
    result = trialled.find(case, Pace(SoloExchange(), Context()))
    assert differ(result, twin_of(case)) == 0.0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("case", trialled.CASES)
def test_full_sync_matches_plain_pytorch(tmp_path: Path, case: str, workers: int) -> None:
    result = search(tmp_path, case, workers=workers, engine="inline")
    assert len(result.each) == workers
    for worker in result.each:
        assert differ(worker["found"], twin_of(case)) < CLOSE
    assert [trial.summary.ended for trial in result.summary.trials] == ["finished"] * 3


@pytest.mark.parametrize("case", ["sgd", "later", "again", "stream"])
def test_processes_match_the_inline_engine(tmp_path: Path, case: str) -> None:
    result = search(tmp_path, case)
    assert [worker["is_main"] for worker in result.each] == [True, False]
    for worker in result.each:
        assert differ(worker["found"], twin_of(case)) < CLOSE


def test_a_process_group_carries_all_trials(tmp_path: Path) -> None:
    result = search(tmp_path, "later", path="collective")
    assert differ(result.each[1]["found"], twin_of("later")) < CLOSE


@pytest.mark.parametrize("protocol", ["async", "k-sync:1", "local-sgd:2", "adaptive"])
def test_every_protocol_leaves_equal_models_in_all_workers(tmp_path: Path, protocol: str) -> None:
    result = search(tmp_path, "again", protocol=protocol)
    weights = [
        {name: value for name, value in worker["found"].items() if "state" not in name}
        for worker in result.each
    ]
    assert differ(*weights) == 0.0
    assert [trial.summary.samples for trial in result.summary.trials] == [128] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_equals_a_separate_run_bit_for_bit(tmp_path: Path, workers: int) -> None:
    """Shuffled, with dropout, and seeded once at the script's top."""
    alone = {}
    for name in ("a", "b"):
        alone[name] = _drawn(tmp_path / f"alone-{name}", f"{name}-", workers)[name]
    among = _drawn(tmp_path / "among", "b-a-", workers)
    for name in ("a", "b"):
        assert torch.equal(alone[name], among[name])
    assert not torch.equal(among["a"], among["b"])


DRAWN = (
    PREPARED
    + """
from contextlib import nullcontext
torch.manual_seed(7)
names = [one for one in sys.argv[2].split("-") if one]
for name in names:
    with pace.trial(name) if len(names) > 1 else nullcontext():
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        rate = {"a": 0.1, "b": 0.2}[name]
        model, optimizer, loader = pace.prepare(
            model, SGD(model.parameters(), lr=rate), DataLoader(data, batch_size=8, shuffle=True)
        )
        train(model, optimizer, loader)
    if pace.is_main:
        torch.save(model[2].weight.detach().clone(), folder / f"{name}.pt")
"""
)


def _drawn(folder: Path, names: str, workers: int) -> dict[str, Tensor]:
    folder.mkdir()
    (folder / "script.py").write_text(DRAWN)
    run_script(folder / "script.py", folder, str(folder), names, workers=workers)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


# -- incidents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["1 dies", "0 dies", "1 dies between", "1 dies before prepare"])
def test_later_trials_run_with_the_workers_that_survive(tmp_path: Path, what: str) -> None:
    result = search(tmp_path, "sgd", what)
    (left,) = result.each
    assert left["is_main"]
    assert differ(left["found"], twin_of("sgd")) < CLOSE
    assert [trial.name for trial in result.summary.trials] == TRIALS
    assert [trial.summary.updates for trial in result.summary.trials] == [8, 8, 8]
    assert any("is gone (killed by signal 9)" in note for note in result.notes)
    assert "note: trial 'lr-0.03' begins with the 1 of 2 workers that are left" in result.notes


def test_joint_steps_are_refused_after_a_death(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"1 of 2 workers are left.*trial 'trial-2'"):
        launched(
            tmp_path,
            """
with pace.trial():
    train(*prepared())
if pace.worker == 1:
    os.kill(os.getpid(), 9)
with pace.trial():
    model = nn.Linear(2, 1)
    pace.prepare(
        model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8), sticky=True
    )
""",
        )


@pytest.mark.parametrize("protocol", ["full-sync", "async", "local-sgd:2"])
@pytest.mark.parametrize("what", ["all fail", "1 fails", "0 fails", "1 fails before prepare"])
def test_a_caught_failure_ends_its_trial_in_all_workers(
    tmp_path: Path, what: str, protocol: str
) -> None:
    engine = "inline" if protocol == "async" else "local"  # there each worker has its part
    result = search(tmp_path, "sgd", what, protocol=protocol, engine=engine)
    caught = [worker["said"] for worker in result.each]
    assert [len(note) for note in caught] == [1, 1]
    for (message,) in caught:
        assert message.startswith("Pruned: ")
        assert (
            message == "Pruned: no good"
            or "trial 'lr-0.1' is over in all workers: worker " in message
        )
    assert ["Pruned: no good"] in caught
    has_begun = what != "1 fails before prepare"
    by_name = {trial.name: trial for trial in result.summary.trials}
    assert [*by_name] == (TRIALS if has_begun else [TRIALS[0], TRIALS[2]])
    if has_begun:
        assert by_name["lr-0.1"].failure in by_name["lr-0.1"].summary.ended
        assert "Pruned: no good" in by_name["lr-0.1"].failure
    for name in (TRIALS[0], TRIALS[2]):
        assert by_name[name].summary.samples == 2 * trialled.SAMPLES
    if protocol == "full-sync":
        for worker in (0, 1):
            for number in (0, 2):
                assert differ(result.of(number, worker), part(twin_of("sgd"), number)) < CLOSE


def test_an_uncaught_failure_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"script.py:\d+|worker 1 failed"):
        launched(
            tmp_path,
            """
with pace.trial():
    train(*prepared())
with pace.trial("bad"):
    objects = prepared()
    if pace.worker == 1:
        raise ValueError("no such thing")
    train(*objects)
""",
        )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "bad", "logs", "trial-1", "trials.json",
    ]  # fmt: skip


def test_unsupported_models_are_config_errors_in_a_trial_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sparse"):
        launched(
            tmp_path,
            """
with pace.trial():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    pace.prepare(model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8))
""",
        )
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_fails_in_one_worker_ends_the_trial(tmp_path: Path) -> None:
    words = launched(
        tmp_path,
        """
def bad(batch):
    if pace.worker == 1:
        raise ZeroDivisionError("nothing in it")
    return fn(batch)

for number in range(2):
    try:
        with pace.trial():
            objects = prepared()
            train(*objects)
            pace.evaluate(fn if number else bad, DataLoader(data, batch_size=2))
            (folder / f"whole-{number}-{pace.worker}").touch()
    except ZeroDivisionError as error:
        (folder / f"caught-{pace.worker}").touch()
""",
    )
    names = {path.name for path in tmp_path.iterdir()}
    assert {"caught-0", "caught-1", "whole-1-0", "whole-1-1"} <= names
    assert "whole-0-1" not in names
    assert "ZeroDivisionError: nothing in it" in words


# -- ends ------------------------------------------------------------------------------------------

ENDLESS = """
for number in range(3):
    with pace.trial():
        objects = prepared()
        if number == 1:
            (folder / f"here-{pace.worker}").touch()
        train(*objects, epochs=2 if number == 0 else 10**9)
        found = pace.evaluate(fn, DataLoader(data, batch_size=8))
        torch.save([pace.version, found], folder / f"version-{number}-{pace.worker}.pt")
(folder / f"over-{pace.worker}").touch()
"""


def test_a_signal_ends_the_run_and_later_trials_do_not_train(tmp_path: Path) -> None:
    with (
        meanwhile(stop, tmp_path / "here-0", tmp_path / "here-1"),
        pytest.raises(Interrupted) as end,
    ):
        launched(tmp_path, ENDLESS)
    assert end.value.signal == signal.SIGTERM
    assert [trial.name for trial in end.value.summary.trials] == ["trial-1", "trial-2", "trial-3"]
    for worker in (0, 1):
        assert (tmp_path / f"over-{worker}").exists()
        versions = [torch.load(tmp_path / f"version-{n}-{worker}.pt")[0] for n in range(3)]
        assert (versions[0], versions[2]) == (8, 0)
        assert torch.load(tmp_path / f"version-2-{worker}.pt")[1] == {"acc": (32.0, 32.0)}


def test_a_stop_between_trials_is_reported_once(tmp_path: Path) -> None:
    words = launched(
        tmp_path,
        """
for number in range(4):
    with pace.trial():
        train(*prepared())
        torch.save(pace.version, folder / f"version-{number}-{pace.worker}.pt")
    if number == 1:
        pace.stop()
""",
    )
    assert words.count("do not train") == 1
    assert "note: trial 'trial-3' and those after it do not train: the script asked for it" in words
    assert [torch.load(tmp_path / f"version-{n}-0.pt") for n in range(4)] == [8, 8, 0, 0]


def test_settings_and_stop_rules_apply_to_each_trial(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
for number in range(3):
    with pace.trial():
        objects = prepared()
        if number == 0:
            pace.stop_when("acc", above=0.5)
        for epoch in pace.epochs(4):
            for x, y in objects[2]:
                with pace.step():
                    objects[1].zero_grad()
                    nn.functional.mse_loss(objects[0](x), y).backward()
                    objects[1].step()
            pace.evaluate(fn, DataLoader(data, batch_size=8))
        torch.save(pace.version, folder / f"version-{number}-{pace.worker}.pt")
""",
        updates=9,
        log="csv",
        keep_best=True,
    )
    results = [[torch.load(tmp_path / f"version-{n}-{k}.pt") for n in range(3)] for k in (0, 1)]
    assert results == [[4, 9, 9], [4, 9, 9]]
    for number in (1, 2, 3):
        names = {path.name for path in (tmp_path / "run" / f"trial-{number}").iterdir()}
        assert {"metrics.csv", "best.safetensors", "summary.json", "checkpoints"} <= names


def test_a_trial_may_train_nothing(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
for number in range(3):
    with pace.trial():
        if number == 1:
            continue
        train(*prepared())
        if number == 2:
            break
""",
    )
    rows = json.loads((tmp_path / "run" / "trials.json").read_text())["trials"]
    assert [row["name"] for row in rows] == ["trial-1", "trial-3"]


def test_an_unsplit_model_trains_in_trials_by_either_of_its_names(tmp_path: Path) -> None:
    text = """
with pace.trial():
    train(*prepared())
    torch.save(pace.version, folder / f"version-{pace.worker}.pt")
"""
    for name in ("none", " data "):
        (folder := tmp_path / name.strip()).mkdir()
        launched(folder, text, split=name)
        assert torch.load(folder / "version-0.pt") == 8


def test_a_run_whose_trials_train_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trial of the script called prepare\(\)"):
        launched(tmp_path, "with pace.trial():\n    pass\n")
    assert not (tmp_path / "run").exists()


def test_an_exit_inside_a_trial_ends_the_script(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
with pace.trial():
    train(*prepared())
    sys.exit(0)
""",
    )
    assert (tmp_path / "run" / "trial-1" / "summary.json").exists()


def test_a_worker_that_leaves_a_trial_early_is_not_awaited(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
with pace.trial():
    model, optimizer, loader = prepared()
    for epoch in pace.epochs(4):
        train_one = iter(loader)
        for x, y in train_one:
            with pace.step():
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        if pace.worker == 0 and epoch == 1:
            break
    torch.save(pace.version, folder / f"version-{pace.worker}.pt")
with pace.trial():
    train(*prepared())
""",
    )
    assert [torch.load(tmp_path / f"version-{k}.pt") for k in (0, 1)] == [8, 16]


# -- reports ---------------------------------------------------------------------------------------


def test_files_and_notes_belong_to_the_current_trial(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
for number in range(2):
    with pace.trial(f"size-{number}"):
        model, *others = prepared()
        train(model, *others)
        pace.save()
        with pace.once() as is_first:
            assert is_first == pace.is_main
    assert pace._prepared is None
    with pace.once() as is_first:
        assert is_first == pace.is_main
    pace.print("trial", number)
""",
    )
    for number in range(2):
        folder = tmp_path / "run" / f"size-{number}"
        assert has_checkpoint(folder)
        assert (folder / "model.safetensors").exists()
        assert (folder / "curve.svg").exists()


def test_draws_between_trials_advance_and_agree_in_all_workers(tmp_path: Path) -> None:
    launched(
        tmp_path,
        """
import random
rates = []
for number in range(3):
    rates.append(random.random() + float(torch.rand(())))
    with pace.trial():
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        train(*pace.prepare(
            model, SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=8, shuffle=True)
        ))
torch.save(rates, folder / f"rates-{pace.worker}.pt")
""",
        protocol="async",
    )
    first, second = (torch.load(tmp_path / f"rates-{k}.pt") for k in (0, 1))
    assert first == second
    assert len(set(first)) == 3


def test_a_lone_workers_trial_leaves_the_outer_generator_unchanged() -> None:
    pace = Pace(SoloExchange(), Context())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pace.trial():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with pace.trial():
        assert torch.equal(torch.rand(3), first)


def test_a_lone_worker_can_go_on_after_an_error_in_a_trial() -> None:
    pace = Pace(SoloExchange(), Context())

    def failing(kind: type[BaseException]) -> None:
        with pace.trial():
            _prepare(pace)
            raise kind

    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind):
            failing(kind)
    with pace.trial():
        _prepare(pace)


def test_a_lone_worker_saves_into_a_folder_per_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pace = Pace(SoloExchange(), Context())
    for name in ("a", "b"):
        with pace.trial(name):
            model, _, loader = _prepare(pace)
            pace.keep_best("loss")
            pace.save()
            pace.evaluate(trialled.count(model), loader)
    for name in ("a", "b"):
        assert {path.name for path in (tmp_path / name).iterdir()} >= {
            "model.safetensors", "best.safetensors",
        }  # fmt: skip


def _prepare(pace: Pace) -> Any:
    model = trialled.network()
    loader = DataLoader(trialled.points(), batch_size=4)
    return pace.prepare(model, SGD(model.parameters(), lr=0.1), loader)


def test_a_report_compares_the_trials(tmp_path: Path, say: Say) -> None:
    result = search(tmp_path / "search", "sgd", engine="inline")
    assert "trial    test accuracy" in result.words
    code, out, _ = say(f"report {result.folder}")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["trial", *TRIALS, "files:"]
    code, out, _ = say(f"report {result.folder} --json")
    rows = json.loads(out)["trials"]
    assert [(row["name"], row["updates"], row["failure"]) for row in rows] == [
        (name, 8, None) for name in TRIALS
    ]
    assert json.loads(out) == json.loads(json.dumps(result.summary.to_json()))
    code, out, _ = say(f"report {result.folder / TRIALS[0]}")
    assert code == 0
    assert re.search(r"^updates +8, ", out, re.MULTILINE)


def test_a_dry_run_shows_the_plan_of_the_first_trial(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREPARED + "for _ in range(2):\n    with pace.trial():\n        prepared()\n")
    observer = QuietObserver(StringIO())
    chosen = RunSettings(workers=2, dry_run=True, device="cpu")
    program = ScriptProgram(path=str(script), args=(str(tmp_path),))
    with nothing_left():
        assert launcher.launch_run(program, chosen, observer) is None
    assert observer.shown_plan is not None
    assert observer.shown_plan.task == "script trial-1"


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "trial 'a' and then prepare": (
        "with pace.trial('a'):\n    train(*prepared())\nprepared()\n",
        r"prepare\(\) is called outside of pace.trial\(\), after trial 'a'",
    ),
    "prepare and then a trial": (
        "train(*prepared())\nwith pace.trial():\n    prepared()\n",
        r"pace.trial\(\) comes after a prepare\(\) outside of any trial",
    ),
    "nested": (
        "with pace.trial('a'):\n    with pace.trial('b'):\n        prepared()\n",
        r"pace.trial\(\) is inside trial 'a'",
    ),
    "twice": (
        "for _ in range(2):\n    with pace.trial('a'):\n        train(*prepared())\n",
        r"pace.trial\('a'\) was entered before",
    ),
    "a path": ("with pace.trial('../a'):\n    prepared()\n", "the name must fit a folder"),
    "a file of the run": (
        "with pace.trial('Trials.json'):\n    prepared()\n",
        r"pace.trial\('Trials.json'\): the run itself writes trials.json into its folder",
    ),
    "a name that is taken": (
        "(folder / 'run' / 'mine').mkdir(exist_ok=True)\n"
        "with pace.trial('mine'):\n    prepared()\n",
        r"pace.trial\('mine'\): .*already has an entry of that name",
    ),
    "others": (
        "with pace.trial(f'of-{pace.worker}'):\n    prepared()\n",
        r"worker \d waits in pace.trial\('of-\d'\), and worker \d enters pace.trial\('of-\d'\)",
    ),
    "by one": (
        "if pace.is_main:\n    with pace.trial('a'):\n        prepared()\n",
        r"worker 1's script ended without pace.trial\('a'\), in which worker 0 waits",
    ),
    "by one, others prepare": (
        "if pace.is_main:\n    with pace.trial('a'):\n        prepared()\nelse:\n    prepared()\n",
        r"another worker calls prepare\(\) without pace.trial\('a'\), in which worker 0 waits",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_uses_are_refused_by_name(tmp_path: Path, what: str) -> None:
    text, says = REFUSED[what]
    with pytest.raises(ConfigError, match=says):
        launched(tmp_path, text)


ALONE = ["trial 'a' and then prepare", "nested", "twice", "a path", "a file of the run"]


@pytest.mark.parametrize("what", ALONE)
def test_a_lone_worker_refuses_the_same_uses(tmp_path: Path, what: str) -> None:
    text, says = REFUSED[what]
    pace = Pace(SoloExchange(), Context())
    names = {"pace": pace, "prepared": lambda: _prepare(pace), "train": lambda *_: None}
    with pytest.raises(ConfigError, match=says):
        exec(text, names)


def test_a_trial_cannot_have_the_name_of_a_run_file() -> None:
    assert {*WRITTEN, TRIALS_FILE} <= RUN_FILES


def test_trials_refuse_respawn_and_resume(tmp_path: Path) -> None:
    text = "with pace.trial():\n    train(*prepared())\n"
    with pytest.raises(ConfigError, match="--respawn is for a script that trains once"):
        launched(tmp_path, text, respawn=True)
    launched(tmp_path, text)
    with pytest.raises(ConfigError, match=r"holds the trials of a script"):
        launched(tmp_path, text, resume=str(tmp_path / "run"), run_dir=None)
    with pytest.raises(ConfigError, match="already holds a run"):
        launched(tmp_path, text)


def test_a_trial_leaves_nothing_on_its_model() -> None:
    pace = Pace(SoloExchange(), Context())
    model = nn.Linear(3, 1).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    plain = {name: {*vars(one)} for name, one in (("model", model), ("optimizer", optimizer))}
    with pace.trial():
        pace.prepare(model, optimizer, DataLoader(trialled.points(), batch_size=4))
        assert {*vars(optimizer)} > plain["optimizer"]
    assert {*vars(model)} == plain["model"]
    assert {*vars(optimizer)} == plain["optimizer"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FileNotFoundError, FileNotFoundError), (MemoryError, MemoryError), (KeyError, KeyError),
        (json.JSONDecodeError, json.JSONDecodeError), (FileError, ConfigError),
        (ExceptionGroup, WorkerError), (WorkerError, WorkerError), (SystemExit, WorkerError),
        (subprocess.CalledProcessError, WorkerError), (UnicodeDecodeError, WorkerError),
    ],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_other_workers_raise_an_error_of_the_same_class(
    kind: type[BaseException], expected: type[Exception]
) -> None:
    over = TrialOver("worker 1 failed", f"{kind.__module__}:{kind.__qualname__}", is_main=False)
    error = error_like(over, "lr-1")
    assert type(error) is expected
    assert "trial 'lr-1' is over in all workers: worker 1 failed" in str(error)


def test_names_differ_by_more_than_the_case_of_letters() -> None:
    """Some file systems have one folder for both."""
    assert check_name("adam", ["Adamw"]) == "adam"
    with pytest.raises(ConfigError, match="entered before, be it in other letters' case"):
        check_name("adam", ["Adam"])
