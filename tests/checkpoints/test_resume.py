"""A run that was cut off resumes as if it had not been: bit for bit, each sample once."""

import dataclasses
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.resumption import adopt
from paceline.config import RunSettings, resolve
from paceline.errors import ConfigError
from paceline.events import Apply
from paceline.launch import launcher
from paceline.program import Program, ScriptProgram, TaskProgram
from paceline.report.live import QuietObserver
from paceline.script.member_state import _read, _seats_of
from paceline.trace.records import Evaluated, Handed, Ordered, Resumed
from paceline.workloads.base import Task
from reference import differ
from runs import Run, assert_each_sample_once, nothing_left
from tiny import NUM_SAMPLES, TASK, Tied, with_optimizer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 4
UPDATES = 5 * EPOCHS


class Noisy(Tied):
    """With batch norm and dropout: buffers and random states count."""

    def __init__(self) -> None:
        super().__init__(has_batch_norm=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(nn.functional.dropout(inputs, 0.2, self.training))
        return outputs


ADAM = with_optimizer(torch.optim.Adam, 0.05)
NOISY = replace(with_optimizer(torch.optim.AdamW, 0.05), model=Noisy)


def go(
    program: Task | Program, folder: Path, observer: QuietObserver | None = None, **settings: Any
) -> Run:
    """Run, or with ``resume`` resume the run in ``folder``."""
    chosen = {"device": "cpu", "threads": 1, "epochs": EPOCHS, **settings}
    if "resume" not in chosen:
        chosen["run_dir"] = str(folder / "run")
    resolved = resolve(chosen, env={}, is_call=True)
    if isinstance(program, Task):
        program = TaskProgram(task=program)
    with nothing_left():
        summary = launcher.launch_run(program, adopt(resolved), observer or QuietObserver())
    assert summary is not None
    return Run(folder=folder / "run", summary=summary)


def cut_and_resumed(
    program: Task | Program, folder: Path, cuts: list[int], last: dict[str, Any], **settings: Any
) -> Run:
    """The run, cut off after each of these numbers of updates, and resumed with ``last``."""
    run = go(program, folder, updates=cuts[0], **settings)
    for cut in cuts[1:]:
        run = go(program, folder, resume=str(run.folder), updates=cut)
        assert run.summary.updates == cut
    return go(program, folder, resume=str(run.folder), updates=10**6, **last)


def is_same(run: Run, other: Run) -> bool:
    mine, others = run.state, other.state
    return mine.keys() == others.keys() and all(
        torch.equal(value, others[name]) for name, value in mine.items()
    )


def assert_one_whole_run(run: Run, epochs: int = EPOCHS) -> None:
    """The trace is of one run: dense versions, each sample once, all epochs."""
    assert run.used() == [Counter(range(NUM_SAMPLES))] * epochs
    assert run.num_epochs_ended() == epochs
    assert [record.epoch for record in run.records if isinstance(record, Evaluated)] == [
        *range(epochs)
    ]
    assert run.summary.ended == "finished"


# -- bit for bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [ADAM, NOISY], ids=["adam", "noisy"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_inline_run_cut_anywhere_resumes_bit_for_bit(
    tmp_path: Path, task: Task, workers: int
) -> None:
    whole = go(task, tmp_path / "whole", workers=workers, engine="inline")
    rng = random.Random(workers)
    cuts = sorted(rng.sample(range(1, UPDATES), 10))
    run = cut_and_resumed(task, tmp_path, cuts, {}, workers=workers, engine="inline")
    assert is_same(run, whole)
    assert_one_whole_run(run)


@pytest.mark.parametrize("path", ["peers", "store"])
def test_a_run_of_processes_resumes_bit_for_bit(tmp_path: Path, path: str) -> None:
    whole = go(NOISY, tmp_path / "whole", workers=2, path=path)
    run = cut_and_resumed(NOISY, tmp_path, [3, 5, 13], {}, workers=2, path=path)
    assert is_same(run, whole)
    assert_one_whole_run(run)


@pytest.mark.parametrize(
    "protocol",
    [
        "local-sgd:2", "local-sgd:1", "local-sgd:2+nesterov:0.7,0.9", "post-local-sgd:3,2",
        "local-sgd:3+nesterov:0.7,0.9+fragments:3", "local-sgd:4+fragments:2,1",
        "local-sgd:3+fragments:1,2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["peers", "store", "collective"])
def test_local_sgd_keeps_each_local_optimizer_and_the_outer_one(
    tmp_path: Path, protocol: str, path: str
) -> None:
    settings: dict[str, Any] = {"workers": 2, "protocol": protocol, "path": path}
    whole = go(ADAM, tmp_path / "whole", **settings)
    run = cut_and_resumed(ADAM, tmp_path, [2, 4], {}, **settings)
    if path == "store" and protocol.endswith("1,2"):  # where pushes are added up as they come
        assert differ(run.state, whole.state) < 1e-12
    else:
        assert is_same(run, whole)


def test_the_residual_of_a_pending_compressed_sum_is_kept(tmp_path: Path) -> None:
    """Every worker's, where the sum is awaited some steps later."""
    settings: dict[str, Any] = {
        "workers": 2, "protocol": "local-sgd:4+fragments:2,1", "path": "collective",
        "compress": "topk:20%",
    }  # fmt: skip
    whole = go(ADAM, tmp_path / "whole", **settings)
    run = cut_and_resumed(ADAM, tmp_path, [2, 4], {}, **settings)
    assert is_same(run, whole)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 4)])
def test_a_run_resumes_with_another_number_of_workers(
    tmp_path: Path, before: int, after: int
) -> None:
    whole = go(ADAM, tmp_path / "whole", workers=before, engine="inline")
    settings: dict[str, Any] = {"workers": before, "engine": "inline"}
    run = cut_and_resumed(ADAM, tmp_path, [7], {"workers": after}, **settings)
    assert differ(run.state, whole.state) < 1e-6
    assert_one_whole_run(run)


class Noted(QuietObserver):
    def __init__(self) -> None:
        super().__init__()
        self.notes = list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2)])
def test_local_steps_that_were_not_exchanged_are_left_out_with_other_workers(
    tmp_path: Path, before: int, after: int
) -> None:
    """Some would be lost or counted twice."""
    first = go(ADAM, tmp_path, workers=before, protocol="local-sgd:2+fragments:2", updates=1)
    settings = {"resume": str(first.folder), "updates": 10**6, "workers": after}
    run = go(ADAM, tmp_path, noted := Noted(), **settings)
    assert_one_whole_run(run)
    said = [note for note in noted.notes if "steps are left out" in note]
    assert len(said) == (before != after), noted.notes


def test_a_finished_run_can_be_given_more_epochs(tmp_path: Path) -> None:
    whole = go(ADAM, tmp_path / "whole", workers=2, engine="inline")
    first = go(ADAM, tmp_path, workers=2, engine="inline", epochs=2)
    run = go(ADAM, tmp_path, resume=str(first.folder), epochs=EPOCHS)
    assert is_same(run, whole)
    assert_one_whole_run(run)


# -- each sample once ------------------------------------------------------------------------------

PROTOCOLS = [
    "async", "k-sync:2", "k-async:2", "k-batch-sync:2", "k-batch-async:2", "stale-synchronous:1",
    "adaptive", "adaptive-local:2",
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 2)])
def test_every_protocol_uses_each_sample_once_across_a_cut(
    tmp_path: Path, protocol: str, before: int, after: int
) -> None:
    settings: dict[str, Any] = {"workers": before, "engine": "inline", "protocol": protocol}
    run = cut_and_resumed(ADAM, tmp_path, [3, 7], {"workers": after}, **settings)
    assert_one_whole_run(run)
    assert len([record for record in run.records if isinstance(record, Resumed)]) == 2


@pytest.mark.parametrize("protocol", ["async", "k-batch-sync:3"])
def test_checkpoints_of_processes_are_taken_while_all_work(tmp_path: Path, protocol: str) -> None:
    """Taken while all work, by a job among the updates' jobs."""
    every = {"checkpoint_every": "1 updates", "keep": 100, "workers": 3, "protocol": protocol}
    run = go(ADAM, tmp_path, **every, delay=("20ms",))
    versions = [
        CheckpointFolder(run.folder / "checkpoints")
        .check(int(path.name))
        .json("run.json")["version"]
        for path in sorted(
            (run.folder / "checkpoints").iterdir(), key=lambda path: path.name.zfill(9)
        )
        if path.name.isdigit()
    ]
    assert len(versions) >= 3
    assert versions == sorted(set(versions))
    for later in sorted((run.folder / "checkpoints").iterdir())[:]:
        if later.name.isdigit() and int(later.name) > 2:
            (later / "manifest.json").unlink()
    (run.folder / "checkpoints" / "latest").unlink()
    resumed = go(ADAM, tmp_path, resume=str(run.folder))
    assert_one_whole_run(resumed)


@pytest.mark.parametrize("path", ["peers", "store"])
def test_a_checkpoint_taken_during_training_is_of_one_version(tmp_path: Path, path: str) -> None:
    """Resuming from it ends as the uninterrupted run does."""
    every = {"checkpoint_every": "2 updates", "keep": 100, "workers": 2, "path": path}
    whole = go(NOISY, tmp_path, **every, delay=("120ms",))
    state = whole.state
    checkpoints = whole.folder / "checkpoints"
    numbers = sorted(int(one.name) for one in checkpoints.iterdir() if one.name.isdigit())
    inside = [
        n for n in numbers if CheckpointFolder(checkpoints).check(n).json("run.json")["version"] % 5
    ]
    assert inside
    (checkpoints / "latest").unlink()
    for number in numbers:
        if number > inside[-1]:
            (checkpoints / str(number) / "manifest.json").unlink()
    run = go(NOISY, tmp_path, resume=str(whole.folder))
    assert all(torch.equal(value, run.state[name]) for name, value in state.items())
    assert_one_whole_run(run)
    (resumed,) = [record for record in run.records if isinstance(record, Resumed)]
    assert resumed.lost == UPDATES - resumed.version


# -- what is said, and what is refused -------------------------------------------------------------


class Listener(QuietObserver):
    """Remembers the notes to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def cut(tmp_path: Path) -> Run:
    return go(ADAM, tmp_path, workers=2, engine="inline", updates=7, protocol="k-sync:2")


def test_changed_settings_are_reported(cut: Run) -> None:
    listener = Listener()
    go(ADAM, cut.folder.parent, listener, resume=str(cut.folder), workers=3, protocol="async")
    assert "changed: workers: 2, now 3" in listener.said
    assert "changed: protocol: k-sync:2, now async" in listener.said
    assert f"going on with {cut.folder} at version 7" in listener.said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 3}, "cannot be resumed with seed = 3: it has 0"),
        ({"batch_size": 20}, "cannot be resumed with batch_size = 20: it has None"),
        ({"protocol": "local-sgd:2"}, "another kind of update: it has optimizer, this run mean"),
    ],
)
def test_unchangeable_settings_are_refused_by_name(
    cut: Run, settings: dict[str, Any], words: str
) -> None:
    before = (cut.folder / "trace.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=words):
        go(ADAM, cut.folder.parent, resume=str(cut.folder), **settings)
    assert (cut.folder / "trace.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (replace(ADAM, name="other"), "another task: it has tiny, this run other"),
        (TASK, "another model or optimizer"),
        (replace(ADAM, batch_size=10), "another batch size: it has 12, this run 10"),
    ],
)
def test_another_task_is_refused(cut: Run, task: Task, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        go(task, cut.folder.parent, resume=str(cut.folder))


def test_resume_auto_starts_a_new_run_or_resumes_one(tmp_path: Path) -> None:
    place: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    settings = {"workers": 2, "engine": "inline"}
    listener = Listener()
    first = go(ADAM, tmp_path, listener, **place, **settings, updates=7)
    assert "no run to resume yet: starting a new one" in listener.said
    assert first.summary.updates == 7
    run = go(ADAM, tmp_path, **place, updates=10**6)
    assert_one_whole_run(run)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run 'nowhere' to resume"):
        go(ADAM, tmp_path, resume="nowhere")


def test_a_new_run_does_not_go_on_with_checkpoints_that_lie_in_its_folder(cut: Run) -> None:
    (cut.folder / "trace.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"already holds a run's checkpoints; .* --resume"):
        go(ADAM, cut.folder.parent, workers=2, engine="inline")
    run = go(ADAM, cut.folder.parent, resume=str(cut.folder), updates=8)
    assert run.summary.updates == 8


def test_only_parts_of_workers_that_the_manifest_names_are_read(tmp_path: Path) -> None:
    names = ["worker-0.json", "worker-1.json", "worker-0 (1).json", "worker-3.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
    files = {name: [] for name in ("model.safetensors", *names[:2])}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    assert _seats_of(tmp_path) == [0, 1]


def test_checkpoint_every_never_writes_nothing(tmp_path: Path) -> None:
    run = go(ADAM, tmp_path, engine="inline", checkpoint_every="never")
    assert not (run.folder / "checkpoints").exists()
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        go(ADAM, tmp_path, resume=str(run.folder))


def test_a_damaged_newest_checkpoint_is_reported_in_one_line(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 2, "engine": "inline"}
    whole = go(ADAM, tmp_path / "whole", **settings)
    cut_run = cut_and_resumed(ADAM, tmp_path, [4, 8], {"epochs": 3}, **settings)
    checkpoints = cut_run.folder / "checkpoints"
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    path = checkpoints / str(newest) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    listener = Listener()
    run = go(ADAM, tmp_path, listener, resume=str(cut_run.folder), epochs=EPOCHS)
    (line,) = [note for note in listener.said if "checkpoint is damaged" in note]
    assert line.endswith(
        f"its sha256 does not match; checkpoint {newest - 1}, the one before, is used instead"
    )
    assert is_same(run, whole)
    assert_one_whole_run(run)


def test_a_full_disk_is_reported_in_one_line_and_the_run_continues(tmp_path: Path) -> None:
    """The folder of the checkpoints takes no file."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").mkdir(mode=0o500)
    if list(Path("/dev").glob("full")) and not _can_write(folder / "checkpoints"):
        listener = Listener()
        run = go(ADAM, tmp_path, listener, workers=2, engine="inline")
        assert run.summary.ended == "finished"
        (line,) = [note for note in listener.said if "checkpoint" in note]
        assert line.startswith(f"a checkpoint could not be written to {folder / 'checkpoints'}: ")


def _can_write(folder: Path) -> bool:
    try:
        (folder / "x").mkdir()
        (folder / "x").rmdir()
    except OSError:
        return False
    return True


# -- a user's own script ---------------------------------------------------------------------------

SCRIPT = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(1)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

class Counted(nn.Linear):
    num_calls = 0
    def forward(self, x):
        self.num_calls += 1
        return super().forward(x)
    def get_extra_state(self):
        return {"calls": self.num_calls}
    def set_extra_state(self, state):
        self.num_calls = state["calls"]

model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), Counted(8, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
by_epoch = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
by_step = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.06, step_size_up=3)
scheduler = by_step if "step" in sys.argv else by_epoch
loader = DataLoader(data, batch_size=12, shuffle=True)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)

class Mean:
    def __init__(self):
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
    def update(self):
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 0.1)
    def state_dict(self):
        return self.values
    def load_state_dict(self, values):
        self.values = values

mean = Mean()
pace.keep(mean=mean)
for epoch in pace.epochs(4):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            if "step" in sys.argv:
                scheduler.step()
    if "step" not in sys.argv:
        scheduler.step()
    mean.update()
pace.save()
if pace.is_main:
    from safetensors.torch import save_file
    mean.values["calls"] = torch.tensor(model[2].num_calls)
    save_file(mean.values, "mean.safetensors")
"""


@pytest.mark.parametrize("kind", ["epoch", "step"])
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_script_resumes_bit_for_bit(
    tmp_path: Path, kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    program = ScriptProgram(path=str(path), args=(kind,))
    settings: dict[str, Any] = {"workers": 2, "engine": engine}
    whole = go(program, tmp_path / "whole", **settings)
    mean = load_file(tmp_path / "mean.safetensors")
    run = cut_and_resumed(program, tmp_path, [5, 8], {}, **settings)
    assert is_same(run, whole)
    again = load_file(tmp_path / "mean.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in mean.items())


DRAWS = (
    SCRIPT.replace(
        "loader = DataLoader(data, batch_size=12, shuffle=True)",
        """class Own:
    def __init__(self):
        self.rng = random.Random(7)
    def __len__(self):
        return 60
    def __iter__(self):
        order = list(range(60))
        self.rng.shuffle(order)
        return iter(order)
    def state_dict(self):
        return {"rng": self.rng.getstate()}
    def load_state_dict(self, state):
        self.rng.setstate(state["rng"])

sampler = Own()
loader = DataLoader(data, batch_size=12, sampler=sampler)""",
    )
    .replace("keep(mean=mean", "keep(mean=mean, sampler=sampler")
    .replace("import sys,", "import random, sys,")
)
"""Its sampler has random numbers of its own, so each order follows from the one before."""


@pytest.mark.parametrize("cuts", [[8], [5, 13], [5, 10]], ids=str)
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_kept_sampler_draws_the_interrupted_order_again(
    tmp_path: Path, cuts: list[int], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(DRAWS)
    program = ScriptProgram(path=str(path), args=("epoch",))
    settings: dict[str, Any] = {"workers": 2, "engine": engine}
    whole = go(program, tmp_path / "whole", **settings)
    run = cut_and_resumed(program, tmp_path, cuts, {}, **settings)
    assert is_same(run, whole)


def test_a_kept_sampler_continues_after_the_last_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More epochs are requested than before: nothing was drawn of the next one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(DRAWS)
    program = ScriptProgram(path=str(path), args=("epoch",))
    settings: dict[str, Any] = {"workers": 2, "engine": "inline"}
    whole = go(program, tmp_path / "whole", **settings)
    run = go(program, tmp_path, epochs=2, **settings)
    run = go(program, tmp_path, resume=str(run.folder), epochs=4)
    assert is_same(run, whole)


LOADS = SCRIPT.replace(
    "class Mean:",
    """if not Path("before.pt").exists() and pace.is_main:
    states = optimizer.state_dict(), scheduler.state_dict(), model.state_dict()
    states[0]["param_groups"][0]["lr"] = 0.02
    torch.save(states, "before.pt")
with pace.once():
    states = torch.load("before.pt")
optimizer.load_state_dict(states[0])
scheduler.load_state_dict(states[1])
model.load_state_dict(states[2])

class Mean:""",
).replace("import sys,", "from pathlib import Path; import sys,")
"""What it loads at each start comes from before the first."""


@pytest.mark.parametrize("kind", ["epoch", "step"])
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2"])
def test_state_loaded_after_prepare_is_ignored_in_a_resumed_run(
    tmp_path: Path, kind: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and rates: the loaded ones are those of the start."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(LOADS)
    program = ScriptProgram(path=str(path), args=(kind,))
    settings: dict[str, Any] = {"workers": 2, "engine": "inline", "protocol": protocol}
    whole = go(program, tmp_path / "whole", **settings)
    run = cut_and_resumed(program, tmp_path, [5, 8], {}, **settings)
    assert is_same(run, whole)
    assert any("after prepare() is ignored" in note for note in run.notes)
    assert not any("after prepare() is ignored" in note for note in whole.notes)


def test_a_resumed_run_adopts_the_old_settings(cut: Run) -> None:
    resolved = resolve({"resume": str(cut.folder), "lr": 0.01}, env={}, is_call=True)
    settings = adopt(resolved)
    assert (settings.workers, settings.protocol, settings.lr) == (2, "k-sync:2", 0.01)
    assert dataclasses.asdict(RunSettings())["resume"] is None


def test_times_continue_in_a_resumed_run(cut: Run) -> None:
    before = [record.fact.at_s for record in cut.records if isinstance(record, Handed)]
    run = go(ADAM, cut.folder.parent, resume=str(cut.folder), updates=12)
    times = [record.fact.at_s for record in run.records if isinstance(record, Handed)]
    assert times[: len(before)] == before
    assert times == sorted(times)
    assert times[len(before)] - before[-1] < 5.0


# -- a trace that is not what was written ----------------------------------------------------------


def damage_trace(run: Run, share: float) -> None:
    path = run.folder / "trace.jsonl"
    data = bytearray(path.read_bytes())
    data[int(share * len(data)) + 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("share", [0.0, 0.5, None], ids=["header", "midway", "gone"])
def test_a_damaged_trace_is_cut_off_and_the_run_resumes(
    tmp_path: Path, share: float | None
) -> None:
    settings: dict[str, Any] = {"workers": 2, "engine": "inline"}
    whole = go(ADAM, tmp_path / "whole", **settings)
    run = go(ADAM, tmp_path, updates=9, **settings)
    if share is None:
        (run.folder / "trace.jsonl").unlink()
    else:
        damage_trace(run, share)
    run = go(ADAM, tmp_path, resume=str(run.folder), updates=10**6)
    assert is_same(run, whole)
    assert run.summary.updates == UPDATES
    assert any("the trace was damaged" in note for note in run.notes)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_run_with_a_damaged_trace_can_be_cut_off_repeatedly(tmp_path: Path, share: float) -> None:
    """Cut off before its next checkpoint: the trace is shorter or longer than at the last one.

    What was made in between is in the trace once, as in the run.
    """
    settings: dict[str, Any] = {"workers": 2, "engine": "inline"}
    whole = go(ADAM, tmp_path / "whole", **settings)
    run = go(ADAM, tmp_path, updates=9, **settings)
    damage_trace(run, share)
    for updates in (10, UPDATES - 1, 11):
        never: dict[str, Any] = {"checkpoint_every": "never", "updates": updates}
        run = go(ADAM, tmp_path, resume=str(run.folder), **never)
        assert run.summary.updates == updates
    for updates in (15, 10**6):  # the first one's end is a checkpoint, from which the other goes on
        run = go(ADAM, tmp_path, resume=str(run.folder), updates=updates)
    assert is_same(run, whole)
    assert sum("the trace was damaged" in note for note in run.notes) == 1
    records = run.records
    resumed = [number for number, record in enumerate(records) if isinstance(record, Resumed)]
    assert [record.version for record in records if isinstance(record, Resumed)] == [9, 15]
    made = [record for record in records[resumed[0] :] if isinstance(record, Ordered)]
    assert sum(isinstance(one.order, Apply) for one in made) == UPDATES - 9


def test_a_trace_of_another_format_is_refused_and_kept(tmp_path: Path) -> None:
    run = go(ADAM, tmp_path, updates=9, workers=2, engine="inline")
    path = run.folder / "trace.jsonl"
    path.write_text(path.read_text().replace('"format":3', '"format":1', 1))
    before = sorted(path.name for path in run.folder.rglob("*"))
    with pytest.raises(ConfigError, match="has format 1, this paceline reads 3"):
        go(ADAM, tmp_path, resume=str(run.folder), updates=10**6)
    assert sorted(path.name for path in run.folder.rglob("*")) == before


def test_a_run_with_the_largest_seed_has_a_report_and_resumes(tmp_path: Path) -> None:
    run = go(ADAM, tmp_path, updates=3, engine="inline", seed=2**63 - 1)
    assert go(ADAM, tmp_path, resume=str(run.folder), updates=5).summary.updates == 5


STOPPED = """
import sys, time, torch, paceline
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

where = sys.argv[1]
pace = paceline.connect()

class Kept:
    def state_dict(self):
        if where == "while it is copied":
            pace.stop()
        return {}
    def load_state_dict(self, state):
        pass

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
pace.keep(kept=Kept())
stopping = Path("stopping")
for epoch in pace.epochs(2):
    if epoch == 1 and where == "in the last epoch" and not stopping.exists():
        pace.stop()
        stopping.touch()
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    while where == "in the last epoch" and pace.worker == 1 and not stopping.exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("where", ["in the last epoch", "while it is copied"])
def test_a_stop_at_an_epochs_end_resumes_from_there(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is already in the last epoch finds nothing in it, and ends."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "stopped.py"
    path.write_text(STOPPED)
    every = "1 epoch" if where == "while it is copied" else "5min"
    program = ScriptProgram(path=str(path), args=(where,))
    run = go(program, tmp_path, workers=2, epochs=2, checkpoint_every=every)
    assert run.num_epochs_ended() == 1
    program = ScriptProgram(path=str(path), args=("nowhere",))
    run = go(program, tmp_path, epochs=2, resume=str(run.folder))
    assert_each_sample_once(run, 24, 2)


def test_ranks_drop_resumed_settings_that_only_a_launcher_supports(tmp_path: Path) -> None:
    run = go(ADAM, tmp_path, workers=2, engine="local", respawn=True, updates=3)
    resolved = resolve({"resume": str(run.folder)}, env={}, is_call=True)
    assert adopt(resolved).respawn
    ranks = dataclasses.replace(resolved.settings, engine="torchrun")
    assert not adopt(dataclasses.replace(resolved, settings=ranks)).respawn


def test_a_newly_split_run_drops_settings_that_a_split_cannot_have(
    tmp_path: Path,
) -> None:
    had: dict[str, Any] = {"channels_last": True, "collective": "shared", "fused_optimizer": True}
    run = go(ADAM, tmp_path, workers=2, engine="local", updates=3, **had)
    whole = resolve({"resume": str(run.folder)}, env={}, is_call=True)
    adopted = adopt(whole)
    assert (adopted.channels_last, adopted.collective, adopted.fused_optimizer) == (
        True, "shared", True,
    )  # fmt: skip
    divided = resolve({"resume": str(run.folder), "split": "shard"}, env={}, is_call=True)
    ranks = dataclasses.replace(divided.settings, engine="torchrun")
    adopted = adopt(dataclasses.replace(divided, settings=ranks))
    assert (adopted.channels_last, adopted.collective, adopted.fused_optimizer) == (
        False, RunSettings().collective, True,
    )  # fmt: skip


OF_MAIN = """
import sys, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()


class Best:
    value = -1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


best = Best()
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(240, 2)), batch_size=4, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
pace.keep(best=best)
with open("begins", "a") as file:
    file.write(f"{pace.worker} {best.value}\\n")
for epoch in pace.epochs(2):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        if pace.is_main:
            best.value += 1
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "async"}, {"protocol": "k-sync:2"}, {"path": "peers"},
        {"protocol": "local-sgd:2"}, {"protocol": "async", "engine": "inline"},
        {"path": "peers", "respawn": True, "fault": ["kill worker 0 at update 9"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_main_worker_keeps_is_restored_in_all(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "best.py"
    path.write_text(OF_MAIN)
    program = ScriptProgram(path=str(path))
    chosen = {"workers": 3, "checkpoint_every": "2 updates", "epochs": 2, **settings}
    run = go(program, tmp_path, updates=50, **chosen)
    begun = (tmp_path / "begins").read_text().splitlines()
    assert {line.split()[1] for line in begun} == {"-1"}
    for kept in (run.folder / "checkpoints").glob("[0-9]*/main.json"):
        assert _read(kept.parent, "main")["own best"]["value"] > -1
    (name, *_) = (run.folder / "checkpoints").glob("[0-9]*/manifest.json")
    assert "main.json" in json.loads(name.read_text())["files"]
    go(program, tmp_path, resume=str(run.folder), updates=55)
    again = (tmp_path / "begins").read_text().splitlines()[len(begun) :]
    assert len(again) == 3
    values = {int(line.split()[1]) for line in again}
    assert len(values) == 1
    assert values.pop() > 2
