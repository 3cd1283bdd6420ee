"""A script that asks whether the run is stopped, inside an epoch.

    worker 0   step, step, the end comes
    worker 1   step: asks until it hears of the end, then ENDS: goes on, breaks, raises

The stop that it heard of still ends its epoch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from runs import nothing_left

Say = Callable[[str], tuple[int, str, str]]

SCRIPT = """\
import time, torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()

def train():
    loader = DataLoader(TensorDataset(torch.rand(64, 2)), batch_size=4)
    model = nn.Linear(2, 1)
    model, optimizer, loader = pace.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    for epoch in pace.epochs(2):
        for (x,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if pace.worker == 1:
                    while not pace.is_stopped:
                        time.sleep(0.01)
                    ENDS
                FAILS
                optimizer.step()
    pace.print("behind the epochs")

TRAINS
print("the script goes on")
"""
TRIAL = """\
try:
    with pace.trial():
        train()
except ArithmeticError as error:
    print(f"caught: {error}")
"""
RAISE = "raise ArithmeticError('too large')"


@pytest.mark.parametrize("ends", ["pass", "break"])
def test_the_run_ends_once_however_a_worker_ends(say: Say, tmp_path: Path, ends: str) -> None:
    text = SCRIPT.replace("ENDS", ends).replace("FAILS", "pass").replace("TRAINS", "train()")
    code, output = launch(say, tmp_path, text, "--updates 2")
    assert code == 0, output
    assert output.count("behind the epochs") == 1
    assert "2 updates are done" in output


def test_a_trial_that_fails_in_all_workers_ends_for_all(say: Say, tmp_path: Path) -> None:
    fails = f"if pace.version == 1: {RAISE}"
    text = SCRIPT.replace("ENDS", RAISE).replace("FAILS", fails).replace("TRAINS", TRIAL)
    code, output = launch(say, tmp_path, text, "")
    assert code == 0, output
    assert "caught: too large" in output
    assert "the script goes on" in output


@pytest.mark.parametrize("protocol", ["full-sync", "k-sync:1"])
@pytest.mark.parametrize("who", ["True", "pace.is_main"])
def test_a_stop_behind_a_loop_that_was_left_saves_the_end(
    say: Say, tmp_path: Path, protocol: str, who: str
) -> None:
    text = SCRIPT.replace("if pace.worker == 1", "if False").replace("ENDS", "pass")
    text = (
        text.replace("FAILS", "pass")
        .replace("TRAINS", "train()")
        .replace(
            '    pace.print("behind',
            f'        break\n    if {who}: pace.stop()\n    pace.print("behind',
        )
    )
    code, output = launch(say, tmp_path, text, f"--protocol {protocol}")
    assert code == 0, output
    assert "the script asked for it" in output
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


BETWEEN = """\
import time, torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.rand(32, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
some, more = (DataLoader(TensorDataset(torch.ones(size, 2)), batch_size=5) for size in (10, 20))

def count(batch):
    return {"n": (float(len(batch[0])), 1.0)}

seen = []
for epoch in pace.epochs(10):
    seen.append(epoch)
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    pace.evaluate(count, some)
    with pace.once():
        pass
    if epoch == 1:
        STOPS
pace.evaluate(count, more)
with open(f"seen-{pace.worker}", "w") as file:
    print(seen, pace.sum(1.0), file=file)
"""


@pytest.mark.parametrize(
    ("stops", "every"),
    [
        ("if pace.is_main: time.sleep(1); pace.stop()", "2min"),
        ("if pace.is_main: time.sleep(1); pace.stop()", "never"),
        ("if pace.is_main: pace.stop(); time.sleep(1)", "2min"),
        ("if not pace.is_main: pace.stop()", "2min"),
        ("pace.stop()", "2min"),
        ("pace.stop()", "never"),
    ],
)
def test_a_stop_between_epochs_finds_all_scripts_at_one_place(
    say: Say, tmp_path: Path, stops: str, every: str
) -> None:
    """One may have come to the next epoch before, where it hears of the stop."""
    text = BETWEEN.replace("STOPS", stops)
    code, output = launch(say, tmp_path, text, f"--protocol full-sync --checkpoint-every {every}")
    assert code == 0, output
    first, other = ((tmp_path / f"seen-{worker}").read_text() for worker in range(2))
    assert first == other
    assert first in ("[0, 1] 2.0\n", "[0, 1, 2] 2.0\n")


def launch(say: Say, tmp_path: Path, text: str, flags: str) -> tuple[int, str]:
    script = tmp_path / "asks.py"
    script.write_text(text)
    words = "--workers 2 --device cpu --threads 1 --run-dir run "
    words += flags if "--protocol" in flags else f"--protocol async {flags}"
    with nothing_left():
        code, out, err = say(f"launch {words} {script}")
    assert "Traceback" not in out + err
    return code, out + err
