"""Scripts that iterate their loader several times per value of ``pace.epochs`` can be resumed."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from meanwhile import stopped_at
from paceline.checkpoints.resumption import read
from paceline.report.summary import summarize
from runs import Run

Say = Callable[[str], tuple[int, str, str]]
Launch = Callable[..., tuple[int, str]]

SAMPLES, EPOCHS = 48, 6
SCRIPT = """
import os, signal, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

first, each, loops, dies = (int(one) for one in sys.argv[1:])
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(48, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in range(first):
    next(iter(loader))
for epoch in pace.epochs(6):
    for _ in range(each):
        next(iter(loader))
    for loop in range(loops):
        for number, (x,) in enumerate(loader):
            if pace.is_main and epoch == 3 and number == 2 and loop == loops - 1:
                open("is-there", "w").close()
            with pace.step():
                time.sleep(0.06 if dies else 0.01)
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            if dies and pace.worker == 1 and epoch == dies and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
    if pace.is_main:
        with open("epochs", "a") as file:
            print(epoch, file=file)
"""
HABITS = pytest.mark.parametrize(
    ("habits", "path"),
    [((0, 1, 1), "store"), ((2, 1, 2), "peers"), ((0, 0, 3), "store")],
    ids=str,
)
"""Looks before all epochs, looks in each, loops in each."""


SLEEPS_AT_3 = """\
    if epoch == 3:
        open("sleeps", "w").close()
        time.sleep(1.5)
"""


LOOKS_LONG_AT_4 = """\
        seen = iter(loader)
        next(seen)
        if epoch == 4 and pace.worker == int(os.environ["LONG"]):
            open("sleeps", "w").close()
            time.sleep(1.5)
        del seen
"""


TWO_LOOPS = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

cut = int(sys.argv[1])
pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
for is_frozen in (True, False):
    model[0].requires_grad_(not is_frozen)
    for epoch in pace.epochs(2):
        for (x,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
            if pace.version == cut:
                pace.stop()
        scheduler.step()
if pace.is_main:
    rate = optimizer.param_groups[0]["lr"]
    total = sum(float(one.detach().sum()) for one in model.parameters())
    with open("ends", "a") as file:
        print(pace.version, rate, total, file=file)
"""

OF_A_FILE = """
import os, signal, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

cut, dies = (int(one) for one in sys.argv[1:])
start = int(open("done").read()) + 1 if os.path.exists("done") else 0
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(48, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(range(start, 6)):
    for (x,) in loader:
        with pace.step():
            time.sleep(0.06 if dies else 0.0)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        if pace.version == cut:
            pace.stop()
        if dies and pace.worker == 1 and epoch == dies and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if pace.is_main and not pace.is_stopped:
        with open("epochs", "a") as file:
            print(epoch, file=file)
        with open("done.new", "w") as file:
            print(epoch, file=file)
        os.replace("done.new", "done")
"""
"""It goes on by a checkpoint of its own, too: six updates an epoch."""

LEFT = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

last = int(sys.argv[1])
pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
for epoch in pace.epochs(6):
    if BEFORE:
        break
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    scheduler.step()
    if BEHIND:
        break
with open(f"ends-{pace.worker}", "a") as file:
    print(pace.version, float(model.weight.detach().sum()), file=file)
"""
"""Six updates an epoch."""


def left(*, before: str = "False", behind: str = "epoch == last") -> str:
    """`LEFT`, with the conditions of its two breaks."""
    return LEFT.replace("BEFORE", before).replace("BEHIND", behind)


OF_ITS_OWN = OF_A_FILE.replace("pace.epochs(range(start, 6))", "range(6)")


@pytest.fixture
def launch(say: Say, tmp_path: Path) -> Launch:
    """Run the script from the command line: its exit code and output."""

    def run(words: str, habits: tuple[int, ...], *, script: str = SCRIPT) -> tuple[int, str]:
        (tmp_path / "train.py").write_text(script)
        code, out, err = say(f"launch --device cpu {words} train.py {' '.join(map(str, habits))}")
        assert "Traceback" not in out + err
        return code, out + err

    return run


def assert_all_was_trained(folder: Path, loops: int) -> None:
    """Each sample is used once in every loop, and every value of ``pace.epochs`` is completed."""
    values = (
        (folder / "epochs").read_text().split()
    )  # what follows a loop is done after a stop, too
    assert list(dict.fromkeys(values)) == [str(epoch) for epoch in range(EPOCHS)]
    run = Run(folder=folder / "run", summary=summarize(folder / "run"))
    trained = [used for used in run.used() if used]
    assert trained == [Counter(range(SAMPLES))] * (EPOCHS * loops)


@HABITS
def test_a_stopped_run_resumes_where_it_was(
    launch: Launch, tmp_path: Path, habits: tuple[int, int, int], path: str
) -> None:
    with stopped_at(tmp_path / "is-there"):
        code, output = launch(f"--workers 2 --run-dir run --path {path}", (*habits, 0))
    assert code == 143, output
    code, output = launch("--workers 2 --resume run", (*habits, 0))
    assert code == 0, output
    assert_all_was_trained(tmp_path, habits[2])


@HABITS
def test_a_respawned_worker_is_where_the_others_are(
    launch: Launch, tmp_path: Path, habits: tuple[int, int, int], path: str
) -> None:
    code, output = launch(f"--workers 2 --run-dir run --respawn --path {path}", (*habits, 2))
    assert code == 0, output
    assert "worker 1 is gone" in output
    assert "worker 1 is back" in output or path == "peers"
    assert_all_was_trained(tmp_path, habits[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_taking_a_batch_after_a_stop_is_no_failure(
    launch: Launch, tmp_path: Path, workers: int
) -> None:
    """The stop comes between the epoch's number and the batch."""
    slow = SCRIPT.replace("    for _ in range(each):", SLEEPS_AT_3 + "    for _ in range(each):")
    with stopped_at(tmp_path / "sleeps"):
        code, output = launch(f"--workers {workers} --run-dir run", (0, 1, 1, 0), script=slow)
    assert code == 143, output
    assert re.search(
        r"ended in <module> at train.py:\d+ \(StopIteration\): the run was stopped", output
    )
    code, output = launch(f"--workers {workers} --resume run", (0, 1, 1, 0))
    assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_batch_taken_before_a_stop_is_not_a_loop_after_it(
    launch: Launch, tmp_path: Path, path: str
) -> None:
    """The stop comes between the batch, taken from an otherwise unused pass, and the loop."""
    slow = SCRIPT.replace(
        "    for loop in range(loops):", SLEEPS_AT_3 + "    for loop in range(loops):"
    )
    with stopped_at(tmp_path / "sleeps"):
        code, output = launch(f"--workers 2 --run-dir run --path {path}", (2, 2, 2, 0), script=slow)
    assert code == 143, output
    code, output = launch("--workers 2 --resume run", (2, 2, 2, 0), script=slow)
    assert code == 0, output
    assert_all_was_trained(tmp_path, 2)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_batch_taken_by_one_worker_only_is_not_a_loop(
    launch: Launch, tmp_path: Path, path: str, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes while another worker still holds its batch, which belongs to no loop."""
    monkeypatch.setenv("LONG", str(slow))
    script = SCRIPT.replace(
        "        next(iter(loader))\n    for loop", LOOKS_LONG_AT_4 + "    for loop"
    )
    with stopped_at(tmp_path / "sleeps"):
        code, output = launch(
            f"--workers 2 --run-dir run --path {path}", (0, 1, 1, 0), script=script
        )
    assert code == 143, output
    code, output = launch("--workers 2 --resume run", (0, 1, 1, 0))
    assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


@pytest.mark.parametrize("cut", [10, 16, 20, 28])
def test_a_run_cut_in_a_second_loop_resumes_in_that_loop(
    launch: Launch, tmp_path: Path, cut: int
) -> None:
    """With a scheduler that was made after ``prepare``, and not given to it."""
    for words, at in (("--run-dir whole", 0), ("--run-dir run", cut), ("--resume run", 0)):
        code, output = launch(f"--workers 2 {words}", (at,), script=TWO_LOOPS)
        assert code == 0, output
    whole, cut_off, resumed = (tmp_path / "ends").read_text().splitlines()
    assert cut_off.startswith(f"{cut} ")
    assert resumed == whole


INDICES = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
data = TensorDataset(torch.arange(240.0)[:, None])
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=12))
with open(f"used-{sys.argv[1]}-{pace.worker}", "w") as file:
    for _ in pace.epochs(1):
        for (x,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                print(*x[:, 0].int().tolist(), file=file, flush=True)
"""


def test_leftover_parts_of_a_batch_are_trained_under_full_sync(
    launch: Launch, tmp_path: Path
) -> None:
    """Five updates of two of three parts end at 90, where no part of full-sync's begins."""
    first = "--workers 3 --protocol k-sync:2 --dropped skip --updates 5 --run-dir run"
    for words, name in ((first, 1), ("--workers 3 --protocol full-sync --resume run", 2)):
        code, output = launch(words, (name,), script=INDICES)
        assert code == 0, output
    used = " ".join(path.read_text() for path in tmp_path.glob("used-2-*")).split()
    assert sorted(map(int, used)) == list(range(90, 240))


def test_a_script_with_its_own_state_file_resumes_in_the_runs_epoch(
    launch: Launch, tmp_path: Path
) -> None:
    """Cut off in the third and the fifth epoch: the script starts there by itself."""
    for words, cut in (("--run-dir run", 15), ("--resume run", 27), ("--resume run", 0)):
        code, output = launch(f"--workers 2 {words}", (cut, 0), script=OF_A_FILE)
        assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


def test_a_state_file_newer_than_the_checkpoint_is_refused(launch: Launch, tmp_path: Path) -> None:
    launch("--workers 2 --run-dir run", (15, 0), script=OF_A_FILE)
    (tmp_path / "done").write_text("3")
    code, output = launch("--workers 2 --resume run", (0, 0), script=OF_A_FILE)
    assert code != 0
    assert "resumes at 2 of pace.epochs(), where its checkpoint was taken, but" in output
    assert "was given 4 to 5: the script begins later, by a file of its own" in output


def test_a_respawned_worker_with_a_state_file_trains_with_the_others(
    launch: Launch, tmp_path: Path
) -> None:
    code, output = launch("--workers 2 --run-dir run --respawn", (0, 2), script=OF_A_FILE)
    assert code == 0, output
    assert "worker 1 is gone" in output
    assert "script is over, and others train on" not in output
    assert_all_was_trained(tmp_path, 1)


def test_a_script_that_counts_epochs_itself_cannot_resume_after_the_first(
    launch: Launch, tmp_path: Path
) -> None:
    """With the loop that the refusal names it resumes where it was."""
    launch("--workers 2 --run-dir run", (15, 0), script=OF_ITS_OWN)
    code, output = launch("--workers 2 --resume run", (0, 0), script=OF_ITS_OWN)
    assert code != 0
    assert "resumes at pass 3 over the loader, but this script counts its epochs it" in output
    assert "for epoch in pace.epochs(range(10)) instead of for epoch in range(10)" in output
    mended = OF_ITS_OWN.replace("in range(6)", "in pace.epochs(range(6))")
    code, output = launch("--workers 2 --resume run", (0, 0), script=mended)
    assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


def test_a_script_that_counts_epochs_itself_resumes_within_the_first(
    launch: Launch, tmp_path: Path
) -> None:
    for words, cut in (("--run-dir run", 4), ("--resume run", 0)):
        code, output = launch(f"--workers 2 {words}", (cut, 0), script=OF_ITS_OWN)
        assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


def test_a_loop_over_versions_is_resumed(launch: Launch, tmp_path: Path) -> None:
    script = OF_ITS_OWN.replace(
        "for epoch in range(6):",
        "while pace.version < 36 and not pace.is_stopped:\n    epoch = pace.version // 6",
    )
    for words, cut in (("--run-dir run", 15), ("--resume run", 0)):
        code, output = launch(f"--workers 2 {words}", (cut, 0), script=script)
        assert code == 0, output
    assert_all_was_trained(tmp_path, 1)


@pytest.mark.parametrize("path", ["store", "peers"])
@pytest.mark.parametrize("epochs", ["pace.epochs(6)", "range(6)"])
def test_the_end_of_a_loop_that_was_left_is_saved(
    launch: Launch, tmp_path: Path, epochs: str, path: str
) -> None:
    script = left().replace("pace.epochs(6)", epochs)
    code, output = launch(f"--workers 2 --run-dir run --path {path}", (2,), script=script)
    assert code == 0, output
    assert read(tmp_path / "run").version == 18


@pytest.mark.parametrize("where", ["behind", "before"])
def test_a_run_whose_loop_was_left_goes_on_with_the_next_value(
    launch: Launch, tmp_path: Path, where: str
) -> None:
    """What the script did for the last value before it left, a scheduler's step, is not redone."""
    script = left() if where == "behind" else left(before="epoch == last + 1", behind="False")
    for words, last in (("--run-dir whole", 9), ("--run-dir run", 2), ("--resume run", 9)):
        code, output = launch(f"--workers 2 {words}", (last,), script=script)
        assert code == 0, output
    whole, cut_off, resumed = (tmp_path / "ends-0").read_text().splitlines()
    assert cut_off.startswith("18 ")
    assert resumed == whole


IN_ONCE = """    with pace.once() as is_first:
        if is_first:
            open(f"first-{epoch}-{pace.worker}", "x").close()
"""


@pytest.mark.parametrize(("worker", "calls"), [(1, ""), (0, ""), (0, IN_ONCE)])
def test_a_worker_that_leaves_its_loop_alone_is_not_waited_for(
    launch: Launch, tmp_path: Path, worker: int, calls: str
) -> None:
    """Also the main one, which would go first through a block that it never comes to."""
    script = left(behind=f"epoch == last and pace.worker == {worker}")
    script = script.replace("        break\nwith", f"        break\n{calls}with")
    code, output = launch("--workers 2 --run-dir run --protocol async", (2,), script=script)
    assert code == 0, output
    assert f"worker {worker}'s script is over, and others train on" in output
    end = (tmp_path / f"ends-{1 - worker}").read_text().split()[0]
    assert end == str(read(tmp_path / "run").version)
    assert not calls or (tmp_path / "first-2-1").exists()
