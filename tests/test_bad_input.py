"""Errors in a command, a script, its data or the machine give one clear message.

Each test uses the command line as a user does, and checks the exit code, the message, that there
is no traceback, and that no process is left behind.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import app as command
from paceline.config import NAMES
from paceline.data.catalogue import find
from paceline.data.sources import SourceError, ThisMachine
from paceline.store import memory
from runs import nothing_left

Say = Callable[..., tuple[int, str]]

SETUP = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)

def check(outputs, step):
    FAULT
    return outputs

for epoch in pace.epochs(2):
    for number, (inputs, targets) in enumerate(loader):
        with pace.step():
            optimizer.zero_grad()
            loss = ((check(model(inputs), number) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
        AFTER
print("all finite:", bool(torch.isfinite(model.weight).all()))
"""

TASK = """
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs, targets = torch.randn(3, 4), torch.randn(3, 1)
    return paceline.Splits(train=TensorDataset(inputs, targets), source="three samples")

few = paceline.Task(
    name="few", model=lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss, data=data,
    learning_rate=0.01, batch_size=8, epochs=1, metrics=lambda outputs, targets: {},
)
"""


def script(folder: Path, fault: str = "pass", after: str = "pass") -> str:
    """A training script with a fault in it."""
    path = folder / "train.py"
    path.write_text(SETUP.replace("FAULT", fault).replace("AFTER", after))
    return str(path)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty current folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    return tmp_path


@pytest.fixture
def paceline(here: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run the command line; return exit code and output, and check that no process is left."""

    def say(*tokens: str) -> tuple[int, str]:
        with nothing_left():
            code = command.run(list(tokens))
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert "Traceback" not in said, said
        return code, said

    return say


# -- names and numbers: refused before anything starts -------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (
            ["train", "lenett"],
            ["unknown task 'lenett'", "did you mean 'lenet'", "Known: alexnet, lenet"],
        ),
        (["train", "lenet", "--protocol", "k-snc:2"], ["unknown protocol", "mean 'k-sync'"]),
        (["train", "lenet", "--engine", "locl"], ['"locl" for --engine', '"local", "inline"']),
        (["train", "lenet", "--wrkers", "2"], ["--wrkers", "Did you mean --workers?"]),
        (["train", "lenet", "--workers", "0"], ["workers must be >= 1, got 0 (--workers)"]),
        (["train", "lenet", "--protocol", "k-sync:0"], ["needs K >= 1", "try k-sync:1"]),
        (["train", "quadratic", "--run-dir", ""], ["run_dir is empty: is a variable not set?"]),
        (["plan", "lenet", "--workers", "9" * 20], ["must be <= 1024, got 999"]),
        (["partition", "lenet", "-n", "9" * 20], ["the number of workers must be <= 1024"]),
        (["tune", "batch-size", "lenet", "--workers", "5000"], ["--workers must be <= 1024"]),
        (["bench", "collectives", "--workers", "5000"], ["--workers must be <= 1024"]),
        (["bench", "links", "--mib", "9" * 20], ["--mib must be >= 1 and at most 1048576"]),
        (
            ["bench", "throughput", "lenet", "--images", "-5"],
            ["--images and --epochs must be >= 1, got -5 and 90"],
        ),
        (["bench", "throughput", "lenet", "--seconds", "nan"], ["must be > 0 and finite"]),
        (
            ["bench", "throughput", "lenet", "--precision", "fp16", "--device", "cpu"],
            ["fp16 training needs a GPU"],
        ),
        (["probe", "--serve", "29461", "--folder", "/"], ["--serve only answers probes"]),
        (
            ["launch", "--check", "--nodes", "2", "s.py"],
            ["--check only reads the script"],
        ),
        (
            [
                "simulate",
                "quadratic",
                "--workers",
                "2",
                "--delay",
                "1s",
                "--target-accuracy",
                "0.9",
            ],
            ["quadratic measures no test accuracy: leave out --target-accuracy"],
        ),
        (["train", "lenet", "--protocol", "k-sync:-1"], ["needs K >= 1", "got k-sync:-1"]),
        (["train", "lenet", "--protocol", "k-batch-sync:0"], ["needs K >= 1"]),
        (["train", "lenet", "--protocol", "k-sync"], ["needs a whole number K", "k-sync:2"]),
        (
            ["train", "lenet", "--workers", "2", "--protocol", "k-sync:3"],
            ["K <= 2, the number of workers", "try k-sync:2, or k-batch-sync:3"],
        ),
        (
            ["train", "lenet", "--workers", "2", "--protocol", "k-async:3"],
            ["K <= 2, the number of workers", "try k-async:2, or k-batch-async:3"],
        ),
        (
            ["train", "lenet", "--workers", "2", "--protocol", "full-sync:3"],
            ["full-sync takes no number, got 'full-sync:3'"],
        ),
        (["train", "lenet", "--slow", "2=5x", "--workers", "2"], ["there is no worker 2"]),
        (["train", "lenet", "--delay", "soon"], ["'soon' is not a time", "exp:20ms"]),
        (["config", "show", "--protocol", "k-snc:2"], ["unknown protocol", "mean 'k-sync'"]),
        (["config", "show", "--workers", "2", "--slow", "2=5x"], ["there is no worker 2"]),
        (["config", "show", "--delay", "soon"], ["'soon' is not a time", "exp:20ms"]),
        (["config", "show", "--fault", "soon"], ["soon"]),
        (["config", "show", "--checkpoint-every", "soon"], ["got 'soon'", "500 updates"]),
        (["config", "show", "--compress", "int5"], ["int5", "int4"]),
        (["config", "show", "--collective", "rnig"], ["unknown collective 'rnig'", "'ring'"]),
        (["config", "show", "--workers", "2", "--split", "3x3"], ["is for 9 workers"]),
        (["data", "get", "fashon-mnist"], ["unknown data set", "did you mean 'fashion-mnist'"]),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_wrong_name_or_number_gets_a_suggestion(
    tokens: list[str], words: list[str], paceline: Say, here: Path
) -> None:
    code, output = paceline(*tokens)
    assert code == 2
    assert output.startswith("error: ")
    for word in words:
        assert word in output
    assert not (here / "runs").exists()


def test_unknown_setting_is_named_with_its_file_or_variable(
    paceline: Say, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "paceline.toml").write_text("protocoll = 'async'\n")
    code, output = paceline("train", "lenet")
    assert code == 2
    assert "unknown setting 'protocoll' (paceline.toml); did you mean 'protocol'?" in output
    (here / "paceline.toml").unlink()
    monkeypatch.setenv("PACELINE_WRKERS", "2")
    code, output = paceline("train", "lenet")
    assert code == 2
    assert "unknown variable 'PACELINE_WRKERS'" in output
    assert "did you mean 'PACELINE_WORKERS'?" in output


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["train", "nosuch:task"], "no module 'nosuch' for task nosuch:task"),
        (["train", "mytasks:fwe"], "unknown attribute 'fwe'"),
        (["train", "mytasks:few", "--workers", "4"], "3 samples cannot be shared by 4"),
        (["train", "quadratic", "--device", "gpu"], "unknown device 'gpu'"),
        (["train", "quadratic", "--device", "gpu", "--run-dir", "new/run"], "unknown device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_run_refused_before_its_first_step_leaves_no_folder(
    tokens: list[str], words: str, paceline: Say, here: Path
) -> None:
    (here / "mytasks.py").write_text(TASK)
    code, output = paceline(*tokens)
    assert code == 2
    assert words in output
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == ["mytasks.py"]


def test_refused_run_removes_only_its_own_files(paceline: Say, here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("keep me")
    (here / "runs" / "before").mkdir(parents=True)
    (here / "runs" / "latest").symlink_to("before")
    assert paceline("train", "nosuch:task", "--run-dir", "mine")[0] == 2
    assert paceline("train", "nosuch:task")[0] == 2
    assert [path.name for path in (here / "mine").iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["before", "latest"]
    assert (here / "runs" / "latest").readlink() == Path("before")


# -- batches, data, memory: refused, or reported in the plan -----------------------------------


def test_uneven_batch_is_reported_and_weighted(paceline: Say, here: Path) -> None:
    tokens = ["--workers", "2", "--batch-size", "15", "--updates", "3", "--run-dir", "run"]
    code, output = paceline("train", "quadratic", *tokens)
    assert code == 0
    assert "15 samples make 2 mini-batches of 8 and 7; each is weighted by its samples" in output
    lines = [json.loads(line) for line in (here / "run" / "trace.jsonl").read_text().splitlines()]
    weights = [line["weights"] for line in lines if line["kind"] == "apply"]
    assert sorted(weights[0]) == [7 / 15, 8 / 15]


def test_more_workers_than_samples_are_refused(paceline: Say, here: Path) -> None:
    (here / "mytasks.py").write_text(TASK)
    code, output = paceline("train", "mytasks:few", "--workers", "4")
    assert code == 2
    assert "3 samples cannot be shared by 4 mini-batches; use fewer workers or a small" in output
    assert "--batch-size" not in output  # a larger batch would not help


def test_batch_smaller_than_the_workers_is_refused_with_remedies(paceline: Say) -> None:
    code, output = paceline("train", "quadratic", "--workers", "4", "--batch-size", "3")
    assert code == 2
    assert "3 samples an update cannot be shared by 4 mini-batches; use fewer workers" in output
    assert "or a larger --batch-size" in output


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network."""

    def fail(*_: object) -> None:
        raise SourceError("no network in this test")

    monkeypatch.setattr(ThisMachine, "has", lambda *_: False)
    monkeypatch.setattr(ThisMachine, "run", fail)
    monkeypatch.setattr(ThisMachine, "download", fail)


@pytest.mark.usefixtures("offline")
def test_damaged_data_file_is_named_and_never_skipped(
    paceline: Say, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set = find("fashion-mnist")
    folder = here / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    for file in data_set.files:
        (folder / file.name).write_bytes(b"not what it says")
    monkeypatch.setenv("PACELINE_DATA", str(here / "data"))
    code, output = paceline("train", "lenet")
    assert code == 2
    assert f"{folder / data_set.files[0].name} is damaged" in output
    assert data_set.files[0].md5 in output
    assert "paceline data get fashion-mnist" in output


@pytest.mark.skipif(
    any(Path(folder).exists() for folder in find("fashion-mnist").system_folders),
    reason="this machine's distribution has the data set: it cannot be missing",
)
@pytest.mark.usefixtures("offline")
def test_missing_data_is_replaced_by_the_digits_and_reported(
    paceline: Say, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    code, output = paceline("train", "softmax", "--dry-run")
    assert code == 0
    assert "Fashion-MNIST could not be fetched" in output
    assert "real images that ship with paceline" in output


def test_too_little_shared_memory_is_reported_before_the_start(
    paceline: Say, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 256)
    code, output = paceline("launch", "--workers", "2", script(here, "print('a step was made')"))
    assert code == 1
    assert "shared memory: " in output
    assert "are needed" in output
    assert "use fewer workers or a smaller model" in output
    assert "a step was made" not in output


# -- scripts ------------------------------------------------------------------------------------


def message_of(said: str) -> list[str]:
    """The lines of the error, which ends the output."""
    return said[said.index("error: ") :].splitlines()


def test_script_error_message_has_at_most_twelve_lines(paceline: Say, here: Path) -> None:
    fault = "if pace.worker == 1: {}['no such key']"
    code, output = paceline("launch", "--workers", "2", script(here, fault))
    assert code == 1
    lines = message_of(output)
    line = 1 + SETUP.splitlines().index("    FAULT")
    assert len(lines) <= 12
    assert lines[0].startswith("error: worker 1 failed at ")
    assert lines[0].endswith(f"train.py:{line} in check:")
    assert "KeyError: 'no such key'" in lines
    assert fault in output  # the user's own frame, with its line
    assert "site-packages" not in output
    log = Path(lines[-1].rpartition(": ")[2])
    assert "Traceback" in log.read_text()


SPAWNS = """
import sys, time
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

class Data:
    def __len__(self): return 4
    def __getitem__(self, number): return {}["no such\\nsample"]

def train(rank, how):
    if how == "settings":
        import paceline
        model = torch.nn.Linear(1, 1)
        paceline.connect().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    {}["no such key"]

if __name__ == "__main__":
    if sys.argv[1] == "loader":
        next(iter(DataLoader(Data(), num_workers=1)))
    mp.spawn(train, args=(sys.argv[1],), nprocs=1)
"""


@pytest.mark.parametrize(
    ("how", "workers", "which", "place", "last"),
    [
        ("key", "1", "-- Process 0 terminated", "train.py:16 in train", "KeyError: 'no such key'"),
        (
            "settings",
            "2",
            "-- Process 0 terminated",
            "train.py:15 in train",
            "prepare() was called",
        ),
        ("loader", "1", "Caught KeyError in Data", "train.py:9 in __getitem__", "KeyError: 'no "),
    ],
)
def test_last_error_of_a_child_process_is_reported(
    paceline: Say, here: Path, how: str, workers: str, which: str, place: str, last: str
) -> None:
    (here / "train.py").write_text(SPAWNS)
    code, output = paceline("launch", "--workers", workers, "train.py", how)
    assert code == 1
    lines = message_of(output)
    assert len(lines) <= 12
    (at,) = (number for number, line in enumerate(lines) if which in line)
    assert lines[at + 1].strip().startswith("at ")
    assert lines[at + 1].endswith(place)
    assert last in lines[at + 2]


def test_report_of_a_failed_run_says_why_it_ended(paceline: Say, here: Path) -> None:
    path = script(here, "if pace.worker == 1 and step == 3: {}['no such key']")
    assert paceline("launch", "--workers", "2", "--run-dir", "run", path)[0] == 1
    code, output = paceline("report", "run")
    assert code == 0
    assert "ended failed: worker 1 failed at " in " ".join(output.split())
    assert (here / "run" / "summary.json").exists()


def test_invalid_python_script_is_refused_with_its_line(paceline: Say, here: Path) -> None:
    (here / "train.py").write_text("import paceline\ndef f(:\n")
    code, output = paceline("launch", "--workers", "2", "train.py")
    assert code == 2
    assert "train.py:2 is not valid Python (invalid syntax): def f(:" in output
    assert not (here / "runs").exists()


def test_invalid_python_module_of_the_user_is_named(paceline: Say, here: Path) -> None:
    (here / "model.py").write_text("x = 1\ndef f(:\n")
    (here / "train.py").write_text("import model\n")
    code, output = paceline("launch", "--workers", "2", "train.py")
    assert code == 1
    lines = message_of(output)
    assert lines[0].endswith("model.py:2 in its text:")
    assert "runpy" not in output
    assert len(lines) <= 12


def test_code_without_source_leaves_no_empty_line(paceline: Say, here: Path) -> None:
    cell = "exec(compile('def cell(): {}[1]', '<cell 3>', 'exec'), globals()) or cell()"
    code, output = paceline("launch", "--workers", "2", script(here, cell))
    assert code == 1
    assert "  <cell 3>:1 cell" in message_of(output)
    assert all(line.strip() for line in message_of(output))


def test_script_that_exits_is_reported_with_line_and_log(paceline: Say, here: Path) -> None:
    path = script(here, "if pace.worker == 1: raise SystemExit('no data today')")
    code, output = paceline("launch", "--workers", "2", path)
    assert code == 1
    line = 1 + SETUP.splitlines().index("    FAULT")
    first, last = message_of(output)
    assert first.endswith(f"train.py:{line}: no data today")
    assert Path(last.rpartition(": ")[2]).name == "worker-1.log"


def test_script_that_never_connects_is_shown_the_four_lines(paceline: Say, here: Path) -> None:
    """And the output of one worker, even if the others print later."""
    (here / "alone.py").write_text(
        "import os, time\ntime.sleep(int(os.environ['RANK']) / 2)\nprint('trained alone')\n"
    )
    code, output = paceline("launch", "--workers", "2", "alone.py")
    assert code == 2
    assert output.count("trained alone") == 1
    for line in ("paceline.connect()", "pace.prepare(", "pace.epochs(", "pace.step()"):
        assert line in output


def test_break_in_one_worker_ends_the_epoch_for_all(paceline: Say, here: Path) -> None:
    early = script(here, after="if pace.worker == 1: break")
    code, output = paceline("launch", "--workers", "2", "--protocol", "async", early)
    assert code == 0
    assert "samples dropped" in output


INF = "if step == 2 and pace.worker == 1: outputs = outputs * float('inf')"


@pytest.mark.parametrize(("protocol", "step"), [("full-sync", 2), ("async", 0)])
def test_nonfinite_gradient_is_named(protocol: str, step: int, paceline: Say, here: Path) -> None:
    # async guarantees one step each
    path = script(here, INF.replace("step == 2", f"step == {step}"))
    code, output = paceline("launch", "--workers", "2", "--protocol", protocol, path)
    assert code == 1
    assert f"worker 1: the gradient of 'weight' is not finite at step {step}" in output
    assert "loss inf" in output
    assert "--nonfinite skip" in output


def test_nonfinite_updates_can_be_skipped(paceline: Say, here: Path) -> None:
    path = script(here, INF)
    code, output = paceline(
        "launch", "--workers", "2", "--nonfinite", "skip", "--run-dir", "run", path
    )
    assert code == 0
    assert "all finite: True" in output
    assert "updates           16" in output
    assert "skipped           2 updates: a gradient was not finite" in output
