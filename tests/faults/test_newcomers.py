"""A worker that joins a run has the others' rates, schedules and epoch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dying import Fault, with_fault
from paceline.checkpoints.resumption import adopt
from paceline.config import resolve
from paceline.errors import WorkerError
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from runs import Run, assert_each_sample_once, run_script, train
from tiny import EPOCHS, NUM_SAMPLES, TASK

SCRIPT = """
import os, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
scheduler = torch.optim.lr_scheduler.{scheduler}
loader = DataLoader(data, batch_size=8)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
for epoch in pace.epochs(6):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
            {in_loop}
    {after_loop}
    total = pace.sum(1)
    rate = optimizer.param_groups[0]["lr"]
    with open(f"rates-{{epoch}}", "a") as file:
        file.write(f"{{pace.worker}} {{rate!r}} {{total}}\\n")
"""


@pytest.mark.parametrize("path", ["store", "peers"])
@pytest.mark.parametrize(
    ("scheduler", "in_loop", "after_loop"),
    [
        ("ExponentialLR(optimizer, 0.7)", "", "scheduler.step()"),
        ("CosineAnnealingLR(optimizer, 72)", "scheduler.step()", ""),
    ],
    ids=["an epoch", "a version"],
)
def test_a_newcomer_has_the_others_learning_rates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    scheduler: str,
    in_loop: str,
    after_loop: str,
) -> None:
    """Otherwise the run would end: pushes of one update with different rates are a conflict."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(scheduler=scheduler, in_loop=in_loop, after_loop=after_loop))
    run = run_script(
        script, tmp_path, workers=2, path=path, respawn=True, delay=("60ms",),
        fault=("kill worker 1 at update 20",),
    )  # fmt: skip
    assert run.num_epochs_ended() == 6
    assert run.summary.per_worker[1].members == 2
    lines = [line.split() for line in (tmp_path / "rates-5").read_text().splitlines()]
    assert sorted(worker for worker, _, _ in lines) == ["0", "1"]
    assert len({rate for _, rate, _ in lines}) == 1
    assert {total for _, _, total in lines} == {"2.0"}


ASKS = """
import os, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
if os.path.exists("was-here"):
    time.sleep(1.0)  # the epoch that it was told of ends meanwhile
if pace.worker == 1:
    open("was-here", "w").close()
total = pace.sum(1)
found = pace.evaluate(lambda batch: {"n": (len(batch[0]), len(batch[0]))}, loader.plain)
for epoch in pace.epochs(3):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
with open(f"asked-{pace.worker}", "w") as file:
    file.write(f"{total} {found['n'][0]}")
"""


def test_a_newcomers_requests_before_its_loop_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its first epoch is already over by then."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ASKS)
    run = run_script(
        script, tmp_path, workers=2, path="store", respawn=True, delay=("20ms",),
        fault=("kill worker 1 at update 2",),
    )  # fmt: skip
    assert run.summary.per_worker[1].members == 2
    assert (tmp_path / "asked-1").read_text() == "1.0 96.0"


def test_a_newcomer_joins_a_resumed_run_where_the_others_are(tmp_path: Path) -> None:
    """It arrives before the interrupted epoch is open again."""
    first = train(TASK, tmp_path, workers=3, path="store", updates=7)
    faults = (
        Fault(worker=1, point="before it arrives", call=1),
        Fault(worker=0, point="before it arrives", call=1, late_s=2.0),
    )
    program = TaskProgram(task=with_fault(TASK, *faults))
    settings = resolve({"resume": str(first.folder), "updates": 1000}, env={}, is_call=True)
    summary = launcher.launch_run(program, replace(adopt(settings), respawn=True), QuietObserver())
    assert summary is not None
    run = Run(folder=first.folder, summary=summary)
    assert run.left == ["killed by signal 9"]
    assert summary.per_worker[1].members == 3  # one of them before the run was cut off
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


def test_a_newcomer_does_not_read_the_checkpoint_that_its_run_began_with(tmp_path: Path) -> None:
    """Newer ones have replaced it by then."""
    every = {"workers": 2, "checkpoint_every": "2 updates"}
    first = train(TASK, tmp_path, updates=4, **every)
    settings = {
        "resume": str(first.folder), "updates": 500, "epochs": 120, "respawn": True,
        "fault": ["kill worker 1 at update 24"], **every,
    }  # fmt: skip
    run = train(TASK, tmp_path, **settings)
    assert run.left == ["killed by signal 9"]
    assert run.summary.updates == 500
    assert run.summary.per_worker[1].members == 3  # one of them before the run was resumed


SCALED = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
is_first = True
for epoch in pace.epochs(6):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            if pace.version == 2:
                loss = loss * float("inf")
            scaled = scaler.scale(loss)
            if is_first:
                with open("scales", "a") as file:
                    file.write(f"{pace.worker} {scaler.get_scale():g}\\n")
            is_first = False
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
    pace.sum(1)
"""


@pytest.mark.parametrize("path", ["store", "peers"])
def test_a_newcomer_begins_with_the_others_loss_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCALED)
    run = run_script(
        tmp_path / "train.py", tmp_path, workers=2, path=path, respawn=True,
        fault=["kill worker 1 at update 20"],
    )  # fmt: skip
    assert run.left == ["killed by signal 9"]
    assert run.summary.skipped_updates == 1
    assert sorted((tmp_path / "scales").read_text().splitlines()) == ["0 1024", "1 1024", "1 512"]


LATE = """
import os, signal, threading, time, torch, paceline
from paceline.store.parameter_store import SharedStore

UPDATES = 4
pace = paceline.connect()

def die_if_late():
    while not os.path.exists("is-late"):
        time.sleep(0.01)
    if open("is-late").read() != str(pace.worker):
        os.kill(os.getpid(), signal.SIGKILL)

def publish_late(self, go_on=SharedStore._publish, **options):
    if self.version == UPDATES - 1:
        with open("is-late.part", "w") as file:
            file.write(str(pace.worker))
        os.rename("is-late.part", "is-late")
        end_s = time.monotonic() + 60.0
        while not os.path.exists("is-back") and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(2.0)  # until it has described itself
    go_on(self, **options)

SharedStore._publish = publish_late
is_back = os.path.exists("is-late")
if not is_back:
    threading.Thread(target=die_if_late, daemon=True).start()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if is_back:
    open("is-back", "w").close()
model, optimizer = pace.prepare(model, optimizer)
for number in pace.updates(UPDATES):
    with pace.step():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
with open(f"ended-{pace.worker}", "w") as file:
    file.write(f"{pace.version} {is_back}")
"""


def test_a_newcomer_waits_for_the_last_update_that_another_still_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the version before it, its script would begin another pass, and the run would end."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(LATE)
    run = run_script(script, tmp_path, workers=2, path="store", respawn=True)
    assert run.left == ["killed by signal 9"]
    assert run.summary.updates == 4
    ends = sorted(path.read_text() for path in tmp_path.glob("ended-*"))
    assert ends == ["4 False", "4 True"]


ALONE = """
import os, time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dying import Fault, arm

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(960, 4), torch.randn(960, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
if os.path.exists("was-here"):
    open("is-back", "w").close()
    time.sleep(2.0)
if pace.worker == 1:
    open("was-here", "w").close()
is_armed = False
for epoch in pace.epochs(1):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            if os.path.exists("is-back") and not is_armed:
                is_armed = True
                arm(model, Fault(worker=0, point="before it publishes", call=1))
            optimizer.step()
"""


def test_a_newcomer_without_a_member_to_copy_from_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the others dies in an update, before it has entered."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    with pytest.raises(
        WorkerError, match=r"worker . ended: killed by signal 9(.|\n)*not restarted"
    ):
        run_script(
            script, tmp_path, workers=2, path="store", respawn=True, delay=("20ms",),
            fault=("kill worker 1 at update 2",),
        )  # fmt: skip


ACCUMULATES = """
import os, signal, torch, paceline
from torch.utils.data import DataLoader, TensorDataset
from paceline.exchange.peers import PeerRounds

def stop_first(self, go_on=PeerRounds._leave_with_work):
    if pace.worker == 0 and not os.path.exists("stopped"):
        open("stopped", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    go_on(self)

PeerRounds._leave_with_work = stop_first
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(48, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for number, (x,) in enumerate(loader):
        with pace.step():
            model(x).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_a_worker_that_stalls_as_peers_part_is_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers derive its work themselves, so no member reported its grant."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ACCUMULATES)
    run = run_script(script, tmp_path, workers=2, path="peers", respawn=True, stall_after=1.0)
    assert (tmp_path / "stopped").exists()
    assert run.num_epochs_ended() == 2


UNPREPARED = """
import os, signal, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)

def die_once():
    if pace.worker == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

for epoch in pace.epochs(5):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)
        if epoch == 1 and os.environ["DIES"] == "inside":
            die_once()
    scheduler.step()
    if epoch == 1:
        die_once()
        time.sleep(3 * (pace.worker == 0))  # the new life is at the border meanwhile
    with open(f"rates-{pace.worker}", "a") as file:
        print(epoch, optimizer.param_groups[0]["lr"], file=file)
"""


@pytest.mark.parametrize("dies", ["inside", "between"])
@pytest.mark.parametrize("protocol", ["full-sync", "k-sync:1"])
def test_a_newcomer_has_the_others_unprepared_schedulers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, dies: str
) -> None:
    monkeypatch.setenv("DIES", dies)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(UNPREPARED)
    run_script(tmp_path / "train.py", tmp_path, workers=2, protocol=protocol, respawn=True)
    first, second = ((tmp_path / f"rates-{seat}").read_text().splitlines() for seat in (0, 1))
    assert first[-1] == second[-1] == f"4 {0.1 * 0.5**5}"


SUMS_FIRST = """
import os, signal, time, torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(96, 4)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
if pace.worker == 1 and not os.path.exists("died"):
    open("died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3 * (pace.worker == 0))  # the new life is at its loop by then
with open(f"sum-{pace.worker}", "w") as file:
    print(pace.sum(1), file=file)
for epoch in pace.epochs(2):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


def test_a_sum_before_the_epochs_waits_for_no_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SUMS_FIRST)
    run = run_script(tmp_path / "train.py", tmp_path, workers=2, respawn=True)
    assert run.used() == [Counter(range(96))] * 2
    assert [(tmp_path / f"sum-{seat}").read_text() for seat in (0, 1)] == ["1.0\n", "1.0\n"]
