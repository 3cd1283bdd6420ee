"""What a run reports about a script that workers do not share as the user may think."""

from pathlib import Path

import pytest

import one_script
from paceline.errors import PacelineError, WorkerError
from runs import Run, run_script


def _run(name: str, folder: Path, **settings: object) -> Run:
    return run_script(
        Path(one_script.__file__), folder, name, str(folder), **{"workers": 2, **settings}
    )


@pytest.mark.parametrize(
    ("engine", "path"), [("local", "store"), ("local", "peers"), ("inline", "store")]
)
def test_a_second_loader_in_the_loop_is_noted_once(tmp_path: Path, engine: str, path: str) -> None:
    run = _run("zipped", tmp_path, protocol="full-sync", engine=engine, path=path)
    [note] = [note for note in run.notes if "DataLoader" in note]
    assert note.startswith("a second DataLoader, of 80 samples, is used inside the loop")
    assert "other = pace.prepare(other)" in note


@pytest.mark.parametrize("name", ["by_hand", "nested", "sgd"])
def test_a_loader_that_trains_nothing_is_not_noted(tmp_path: Path, name: str) -> None:
    run = _run(name, tmp_path, protocol="full-sync")
    assert not [note for note in run.notes if "DataLoader" in note]


COUNTS = """
import torch, paceline
from torch.utils.data import DataLoader

pace = paceline.connect()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(24, 1), batch_size=12)
model, optimizer, loader = pace.prepare(model, optimizer, loader, batch="{batch}")
for _ in pace.epochs(1):
    for x in loader:
        with pace.step():
            optimizer.zero_grad()
            (model(x) * torch.arange(12.0)[:, None]).mean().backward()
            optimizer.step()
"""


def test_a_script_that_expects_the_whole_batch_is_told_of_the_mini_batch(tmp_path: Path) -> None:
    script = tmp_path / "counts.py"
    script.write_text(COUNTS.format(batch="global"))
    with pytest.raises(WorkerError, match=r"batch of 12 is shared by 2 .*batch='per-worker'"):
        run_script(script, tmp_path, workers=2, protocol="full-sync")
    script.write_text(COUNTS.format(batch="per-worker"))
    again = tmp_path / "again"
    again.mkdir()
    assert run_script(script, again, workers=2, protocol="full-sync").summary.updates == 1


RESIZING = """
import torch, paceline
from torch.utils.data import DataLoader

class Scaled(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros({size}))

    def forward(self, x):
        self.seen.resize_(4)
        return super().forward(x)

pace = paceline.connect()
model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(24, 1), batch_size=12)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for x in loader:
    with pace.step():
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("size", [0, 1])
def test_a_buffer_resized_by_forward_is_not_taken_for_a_batch(tmp_path: Path, size: int) -> None:
    script = tmp_path / "resizing.py"
    script.write_text(RESIZING.format(size=size))
    with pytest.raises(PacelineError, match="call the model once with a batch before") as caught:
        run_script(script, tmp_path, workers=2, protocol="full-sync")
    assert "is shared by" not in str(caught.value)


OWN_COUNT = """
import torch, paceline
from torch.utils.data import DataLoader

pace = paceline.connect()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(36, 1), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
batches, steps = iter(loader), 0
while steps < {steps}:
    try:
        x = next(batches)
    except StopIteration:
        if not {begins_anew}:
            raise
        batches = iter(loader)
        x = next(batches)
    with pace.step():
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    steps += 1
"""


def test_a_loop_that_asks_for_too_many_batches_is_told_why(tmp_path: Path) -> None:
    script = tmp_path / "counts.py"
    script.write_text(OWN_COUNT.format(steps=40, begins_anew=False))
    with pytest.raises(WorkerError, match=r"StopIteration:(.|\n)*for batch in loader"):
        run_script(script, tmp_path, workers=2, protocol="k-batch-async:2")


def test_a_generator_that_asks_for_too_many_batches_is_told_why(tmp_path: Path) -> None:
    text = OWN_COUNT.format(steps=40, begins_anew=False)
    text = text.replace(
        "batches, steps = iter(loader)",
        """
def each(batches):
    while True:
        yield next(batches)

batches, steps = each(iter(loader))""",
    )
    script = tmp_path / "counts.py"
    script.write_text(text)
    with pytest.raises(WorkerError, match=r"RuntimeError:(.|\n)*for batch in loader"):
        run_script(script, tmp_path, workers=2, protocol="k-batch-async:2")


BY_HAND = """
import torch, paceline
from torch.utils.data import DataLoader

pace = paceline.connect()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(36, 1), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
number = 0
for epoch in pace.epochs(3):
    for x in loader:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + COUNT)
        with pace.step():
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        number += 1
"""


@pytest.mark.parametrize(
    ("protocol", "count", "is_said"),
    [
        ("async", "number", True),
        ("k-sync:1", "number", True),
        ("async", "pace.version", False),
        ("async", "epoch", False),
        ("async", "0", False),
        ("full-sync", "number", False),
        ("local-sgd:2", "number", False),
    ],
)
def test_a_rate_set_by_a_per_worker_count_is_noted(
    tmp_path: Path, protocol: str, count: str, *, is_said: bool
) -> None:
    (tmp_path / "train.py").write_text(BY_HAND.replace("COUNT", count))
    run = run_script(tmp_path / "train.py", tmp_path, workers=2, protocol=protocol, engine="inline")
    notes = [note for note in run.notes if "changed by hand inside the loop" in note]
    assert len(notes) == is_said


def test_a_worker_that_ends_while_others_train_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "counts.py"
    script.write_text(OWN_COUNT.format(steps=24, begins_anew=True))
    run = run_script(
        script, tmp_path, workers=2, protocol="k-batch-async:2", slow=("1=5x",), delay=("20ms",)
    )
    [note] = [note for note in run.notes if "is over" in note]
    assert note.startswith("worker 0's script is over, and others train on")


SPAWNS = """
import torch, paceline

pace = paceline.connect()


def train(_):
    model = torch.nn.Linear(3, 1)
    model, optimizer = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in pace.updates(3):
        with pace.step():
            model(torch.ones(3)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train)
"""


def test_a_worker_that_spawns_training_processes_is_refused(tmp_path: Path) -> None:
    """Each would silently train the whole by itself."""
    (tmp_path / "train.py").write_text(SPAWNS)
    with pytest.raises(WorkerError, match="failed at"):
        run_script(tmp_path / "train.py", tmp_path, workers=2, has_ranks=False)
    [text] = [path.read_text() for path in (tmp_path / "run" / "logs").glob("worker-*.error")]
    assert "started by multiprocessing, which would train once more" in text
