"""``pace.once()``: the main worker enters a block first, all others after it."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError, ScriptLost, WorkerError
from runs import run_script

LOOP = """\
import os, sys, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
folder = sys.argv[1]

def note(text):
    with open(os.path.join(folder, "notes.txt"), "a") as file:
        file.write(text + "\\n")

{before}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        {inside}
    {between}
"""
MAKE_FOLDER = """
with pace.once() as is_first:
    there = os.path.join(folder, "cache")
    if not os.path.exists(there):
        time.sleep(0.2)  # long enough for all others to come by
        os.mkdir(there)
        note("made")
    note(f"{is_first}")
"""
DIES = """
    if epoch == 0:
        with pace.once() as is_first:
            note(f"{pace.worker} {is_first}")
            if pace.worker == 0:
                time.sleep(0.2)
                os.kill(os.getpid(), 9)
"""


def notes(
    folder: Path, before: str = "", between: str = "", inside: str = "", **settings: object
) -> list[str]:
    """The notes of a run of such a script."""
    script = folder / "train.py"
    lines = {"before": before, "between": between or "pass", "inside": inside or "pass"}
    script.write_text(LOOP.format(**lines))
    run_script(script, folder, str(folder), **{"workers": 3, **settings})
    return (folder / "notes.txt").read_text().split("\n")[:-1]


def test_other_workers_enter_after_the_first(tmp_path: Path) -> None:
    assert notes(tmp_path, before=MAKE_FOLDER) == ["made", "True", "False", "False"]


def test_inline_members_take_turns_too(tmp_path: Path) -> None:
    lines = notes(tmp_path, before=MAKE_FOLDER, engine="inline")
    assert lines == ["made", "True", "False", "False"]


def test_a_lone_worker_goes_first(tmp_path: Path) -> None:
    assert notes(tmp_path, before=MAKE_FOLDER, workers=1) == ["made", "True"]


def test_another_worker_becomes_first_when_the_first_dies_inside(tmp_path: Path) -> None:
    assert notes(tmp_path, between=DIES.strip()) == ["0 True", "1 True", "2 False"]


LONG = """
    if epoch == 0:
        with pace.once() as is_first:
            note(f"{pace.worker} {is_first}")
            time.sleep(1.5 * is_first)
"""


def test_a_slow_first_worker_is_not_taken_for_stalled(tmp_path: Path) -> None:
    """Silence is not a stall here: the script makes the others wait."""
    lines = notes(tmp_path, between=LONG.strip(), workers=2, stall_after=0.4)
    assert lines == ["0 True", "1 False"]


def test_a_death_inside_a_block_before_the_run_ends_it_for_all(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="worker 0 ended: killed by signal 9"):
        notes(tmp_path, before="with pace.once() as is_first:\n"
              "    os.kill(os.getpid(), 9) if is_first else None")  # fmt: skip


def test_a_respawned_worker_enters_blocks_that_others_have_left(tmp_path: Path) -> None:
    lines = notes(
        tmp_path, before="with pace.once() as is_first:\n    note(f'{is_first}')", workers=2,
        fault=("kill worker 1 at update 2",), respawn=True, delay=("100ms",),
    )  # fmt: skip
    assert lines == ["True", "False", "False"]


COMES_BACK = """
    if epoch == 1:
        if pace.worker == 0 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(1.0)  # the new life is there, and has no more epochs
        if pace.worker == 1:
            os.kill(os.getpid(), 9)
    with pace.once() as is_first:
        note(f"{epoch} {pace.worker} {is_first}")
with pace.once() as is_first:
    note(f"end {pace.worker} {is_first}")
    time.sleep(0.3 * is_first)
"""


def test_a_respawned_worker_is_not_awaited_at_a_block_it_never_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main worker dies after the last epoch and returns; then the next main worker dies.

    A worker that takes part becomes the main one; after the loop all enter one block again.
    """
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptLost):  # what a main worker alone does there is said to be lost
        notes(tmp_path, between=COMES_BACK.strip(), workers=4, respawn=True)
    text = (tmp_path / "notes.txt").read_text().split("\n")[:-1]
    inside = [line for line in text if not line.startswith("end")]
    assert sorted(inside[:4]) == ["0 0 True", "0 1 False", "0 2 False", "0 3 False"]
    assert inside[4:] == ["1 2 True", "1 3 False"]
    assert next(line for line in text if line.startswith("end")) == "end 2 True"


AWAITS_IT = """
        is_long = epoch == 1 and pace.worker == 0
        while is_long and open(folder + "/notes.txt").read().count("here 1") < 2:
            time.sleep(0.05)
        time.sleep(0.7 * is_long)  # and it has time to enter
"""
SLOW_BLOCK = """
    with pace.once() as is_first:
        time.sleep(0.3 * is_first)
        note(f"{epoch} {pace.worker} {is_first}")
"""


def test_a_newcomer_joins_the_blocks_of_its_first_epoch(
    tmp_path: Path,
) -> None:
    """It begins in epoch 2, after a block between epochs that it never saw."""
    lines = notes(
        tmp_path, before="note(f'here {pace.worker}')", inside=AWAITS_IT.strip(),
        between=SLOW_BLOCK.strip(), workers=2, path="store", respawn=True,
        fault=("kill worker 1 at update 4",),
    )  # fmt: skip
    blocks = [line for line in lines if not line.startswith("here")]
    assert blocks == ["0 0 True", "0 1 False", "1 0 True", "1 1 False"]


BEHIND = """
pass
with pace.once() as is_first:
    time.sleep(0.3 * is_first)
    note(f"{pace.worker} {is_first}")
"""


def test_after_a_stopped_run_one_worker_goes_first(tmp_path: Path) -> None:
    lines = notes(tmp_path, between=BEHIND.strip(), workers=3, updates=2)
    assert (lines[0], sorted(lines[1:])) == ("0 True", ["1 False", "2 False"])


def test_a_block_inside_the_loader_loop_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pace\.once\(\) is inside the loader's loop.*is_main"):
        notes(tmp_path, inside="with pace.once(): pass")
