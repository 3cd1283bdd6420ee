"""A hang is explained in one message: the worker, how long, what is usual, where, the decision."""

import re
from pathlib import Path

import pytest

from paceline.errors import WorkerError
from runs import run_script

SCRIPT = """
import ctypes, os, sys, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    calls = 0
    def __len__(self):
        return 240
    def __getitem__(self, index):
        Images.calls += 1
        if os.environ["RANK"] == "1" and Images.calls == 100:
            {hang}
        return torch.randn(4), torch.randn(1)

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Images(), batch_size=8, num_workers={loader_workers})
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
"""
SAYS = re.compile(
    r"worker 1 has not pushed for [0-9.]+ s \(usual: [0-9.e-]+ s\): it sleeps at "
    r"train\.py:(?P<line>\d+) in (?P<name>\S+); the others wait for update \d+; it is ended, and "
    r"the others do its work"
)


def explained(folder: Path, hang: str, loader_workers: int = 0, **settings: object) -> list[str]:
    """The notes of a run whose worker 1 hangs in its 100th sample."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(hang=hang, loader_workers=loader_workers))
    run = run_script(script, folder, workers=2, stall_after=1.0, delay=("20ms",), **settings)
    return [note for note in run.notes if "has not pushed" in note]


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("time.sleep(600)", id="asleep"),
        pytest.param("ctypes.PyDLL(None).sleep(600)", id="in C code that holds the lock"),
    ],
)
@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_hang_is_reported_with_its_line(tmp_path: Path, hang: str, path: str) -> None:
    (note,) = explained(tmp_path, hang, path=path)
    match = SAYS.fullmatch(note.replace(" (--respawn would begin a new one)", ""))
    assert match is not None, note
    line = (tmp_path / "train.py").read_text().splitlines()[int(match["line"]) - 1]
    assert line.strip() == hang
    assert match["name"] == "__getitem__"


COMPUTES = "end = time.time() + 4; [None for _ in iter(lambda: time.time() > end, True)]"
"""Nobody can tell it from a loop that never ends."""


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_computing_worker_is_named_with_its_line_and_never_ended(
    tmp_path: Path, path: str
) -> None:
    notes = explained(tmp_path, COMPUTES, path=path)
    assert notes
    for note in notes:
        assert re.search(r"it computes at train\.py:13 in .*; the others wait for update", note)
        assert re.search(r"left alone, since it computes \(kill -9 \d+ ends it\)", note)


def test_a_hanging_loader_worker_is_reported_at_the_line_that_waits(tmp_path: Path) -> None:
    (note,) = explained(tmp_path, "time.sleep(600)", loader_workers=1)
    match = SAYS.search(note)
    assert match is not None, note
    line = (tmp_path / "train.py").read_text().splitlines()[int(match["line"]) - 1]
    assert line == "    for inputs, targets in loader:"


def test_a_lone_worker_is_named_and_not_given_up(tmp_path: Path) -> None:
    """No other worker could continue without it; the note is all that can be done."""
    script = tmp_path / "train.py"
    hang = "time.sleep(2.5); sys.exit('enough')"
    script.write_text(SCRIPT.format(hang=hang, loader_workers=0).replace('"1"', '"0"'))
    with pytest.raises(WorkerError, match="enough"):
        run_script(script, tmp_path, workers=1, stall_after=1.0)
    trace = (tmp_path / "run" / "trace.jsonl").read_text()
    assert "worker 0 has not pushed for 1" in trace
    assert "nobody is left to go on without it" in trace
