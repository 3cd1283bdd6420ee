"""Scripts among the ranks of torchrun, over real gloo: equal to the local engine, or refused.

Ranks are forked (see tests/support/forked.py), except for one run that succeeds and one that fails,
which python starts. A test makes several claims about one run. The script has all that an
equivalence must cover: tied weights, a frozen one, batch norm, two groups, a clip, a scheduler
stepped in the loop, a last batch with fewer samples than ranks, or batch norm, which needs more.
"""

import atexit
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.engines.torchrun import group, place
from paceline.engines.torchrun.life import RankLife, unseeded
from paceline.engines.torchrun.member import GatheredLines, RankControl
from paceline.engines.torchrun.post import _SEAT, UP, Bye, ControllerPost, EndAsked, StoreChannel
from paceline.engines.torchrun.world import RankOfWorld, find_left_alone, find_rank
from paceline.errors import ConfigError, LinkError
from paceline.exchange.base import Clock
from paceline.store.control import ALARM, ARGUMENTS, COUNTS, NUMBERS, RHYTHMS, control_bytes
from paceline.store.memory import SharedMemory
from paceline.system.signals import REASONS
from paceline.trace.records import Ended as EndedRecord
from paceline.wire.channel import HungUp
from paceline.wire.codec import WIRE
from paceline.wire.messages import Failed, Whose
from ranks import (
    SCRIPT,
    Ended,
    begin,
    end,
    free_port,
    interrupt,
    run_alone,
    run_by_mpirun,
    run_ranks,
)
from reference import differ
from runs import Run, assert_each_sample_once, run_script

NUM_SAMPLES = 61
CLOSE = 1e-9
DILOCO = "local-sgd:2+nesterov:0.7,0.9"


def on_local(folder: Path, workers: int, **settings: Any) -> Run:
    """The same script by ``paceline launch``."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return run_script(folder / "train.py", folder, workers=workers, path="peers", **settings)


def assert_one_cause(ended: Ended, *words: str) -> None:
    """It is reported once, in at most 12 lines, and torchrun sees a failure."""
    assert ended.code != 0
    assert len(ended.errors) == 1, ended.said
    for word in words:
        assert word in ended.said
    cause = ended.said[ended.said.index("error: ") :].splitlines()
    own = [line for line in cause if not line.startswith(("W1", "E1"))]
    after = next((n for n, line in enumerate(own) if line.startswith("Traceback")), len(own))
    assert after <= 12, ended.said


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("num_ranks", "protocol", "chosen"),
    [
        (2, "full-sync", {"NORM": "1"}),
        (2, "full-sync", {"MODE": "twice"}),
        (2, "full-sync", {"MODE": "twice", "PACELINE_COLLECTIVE": "native"}),
        (3, "full-sync", {}),
        (3, "full-sync", {"PACELINE_COLLECTIVE": "native"}),
        (2, "local-sgd:2", {}),
        (2, "local-sgd:2", {"PACELINE_COLLECTIVE": "native"}),
        (2, "post-local-sgd:3,2", {}),
        (3, "local-sgd:4+nesterov:0.7,0.9+fragments:2,1", {}),
    ],
)
def test_a_script_matches_the_local_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    protocol: str,
    chosen: dict[str, str],
) -> None:
    chosen = {"PACELINE_PROTOCOL": protocol, **chosen}
    if "NORM" in chosen:  # one of them is enough by torchrun, and by python
        ended = run_ranks(tmp_path, num_ranks, by_python=True, **chosen)
    else:
        ended = run_by_mpirun(tmp_path, num_ranks, **chosen)
    assert ended.code == 0, ended.said
    run = ended.run
    assert (run.path, run.num_epochs_ended()) == ("collective", 2)
    assert_each_sample_once(run, 64 if "NORM" in chosen else NUM_SAMPLES, 2)
    for name, value in chosen.items():
        if name != "PACELINE_COLLECTIVE":
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    expected = on_local(tmp_path / "local", num_ranks, protocol=protocol)
    assert differ(run.state, expected.state) < CLOSE
    assert [push.ticket.member for push in run.pushes] == [
        push.ticket.member for push in expected.pushes
    ]
    assert ended.said.count("epoch 1 version") == 1  # only one of them prints
    assert "of 17" in ended.said
    if protocol == "full-sync":
        assert f"rate {0.05 * 0.7 ** (run.summary.updates // 4):.6f}" in ended.said
    assert (tmp_path / "first").read_text().splitlines()[0] == "0"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("protocol", ["full-sync", DILOCO])
def test_a_killed_rank_resumes_inside_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    chosen = {
        "PACELINE_PROTOCOL": protocol,
        "PACELINE_CHECKPOINT_EVERY": "1 updates",
        "EPOCHS": "4",
    }
    ended = run_ranks(tmp_path, 2, "--max-restarts", "2", MODE="kill 1", **chosen)
    assert ended.code == 0, ended.said
    assert "going on with" in ended.said
    assert len(ended.errors) == 1
    assert "worker 1 ended: process" in ended.errors[0]
    assert_each_sample_once(ended.run, NUM_SAMPLES, 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPOCHS", "4")
    expected = on_local(tmp_path / "local", 2, protocol=protocol)
    assert differ(ended.run.state, expected.state) < CLOSE


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("raise", ("worker 1 failed at", "ValueError: oh no")),
        ("kill 0", ("worker 0 ended: its process is gone", "--max-restarts")),
        ("kill 2", ("worker 2 ended: process", "--max-restarts")),
        ("skip", ("step.skip()", "paceline launch --workers 3")),
        ("one leaves", ("another worker left its loop", "pace.stop()")),
        ("other models", ("different models",)),
        ("other devices", ("worker 0 computes on cpu and worker 1 on cuda", "PACELINE_DEVICE=cpu")),
    ],
)
def test_a_failed_run_has_one_cause(tmp_path: Path, mode: str, words: tuple[str, ...]) -> None:
    ended = run_ranks(tmp_path, 3, by_python=mode == "raise", MODE=mode)
    assert_one_cause(ended, *words)
    assert ended.took_s < 60


@pytest.mark.timeout(100)
@pytest.mark.parametrize("collective", ["native", "ring"])
def test_a_death_while_ranks_send_has_one_cause(tmp_path: Path, collective: str) -> None:
    ended = run_ranks(tmp_path, 3, MODE="kill 2", PACELINE_COLLECTIVE=collective)
    assert_one_cause(ended, "worker 2 ended: process", "--max-restarts")
    assert ended.took_s < 60


FAILS_WHERE_RANKS_MEET = """
import os
import paceline
from paceline.engines.torchrun import life

def fail(*arguments, **options):
    raise RuntimeError("no route")

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    life.RankGroup = fail
paceline.connect()
"""


@pytest.mark.timeout(100)
def test_a_rank_that_fails_while_groups_are_made_is_named(tmp_path: Path) -> None:
    ended = run_by_mpirun(tmp_path, 2, FAILS_WHERE_RANKS_MEET)
    assert_one_cause(ended, "worker 1 failed before prepare(): RuntimeError('no route')")
    assert "KeyError" not in ended.said


@pytest.mark.timeout(100)
def test_the_death_of_the_rank_with_the_store_is_reported_in_one_line(tmp_path: Path) -> None:
    ended = run_by_mpirun(tmp_path, 2, MODE="kill 0")
    assert_one_cause(ended, "worker 0")
    assert "frame #" not in ended.said
    assert "TCPStore" not in ended.said
    assert ended.took_s < 60


@pytest.mark.timeout(100)
def test_all_ranks_may_leave_their_loops_together(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, MODE="all leave", EPOCHS="3")
    assert ended.code == 0, ended.said
    assert "epoch 2 version 6" in ended.said


@pytest.mark.timeout(100)
def test_settings_that_ranks_do_not_support_are_refused_at_the_start(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, PACELINE_PROTOCOL="k-sync:2")
    assert_one_cause(ended, "decides after each push", "paceline launch --workers 2")
    assert not (tmp_path / "run").exists()
    ended = run_ranks(tmp_path, 2, PACELINE_LR="0.5")
    assert_one_cause(ended, "lr 0.5 (PACELINE_LR) is for tasks", "lr=0.5)")
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("protocol", ["full-sync", "local-sgd:2", "local-sgd:4+fragments:2,1"])
def test_a_signal_stops_ranks_with_a_checkpoint(tmp_path: Path, protocol: str) -> None:
    process = begin(tmp_path, 2, MODE="slow", EPOCHS="1000", PACELINE_PROTOCOL=protocol)
    trace = tmp_path / "run" / "trace.jsonl"
    while not trace.is_file() or trace.read_text().count("\n") < 20:
        assert process.poll() is None
        time.sleep(0.1)
    interrupt(process, signal.SIGTERM)
    ended = end(process, tmp_path)
    assert ended.took_s < 30
    last = ended.run.records[-1]
    assert isinstance(last, EndedRecord)
    assert last.reason == "interrupted: terminated"
    assert list((tmp_path / "run" / "checkpoints").glob("*/run.json"))


@pytest.mark.timeout(100)
def test_a_task_is_trained_by_ranks(tmp_path: Path) -> None:
    words = ("-m", "paceline", "train", "quadratic", "--epochs", "2", "--json")
    ended = run_ranks(tmp_path, 2, *words)
    assert ended.code == 0, ended.said
    assert ended.run.path == "collective"
    assert '"workers": 2' in ended.said or '"workers":' in ended.said


@pytest.mark.timeout(100)
def test_ranks_started_with_different_settings_are_named(tmp_path: Path) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = {**meet, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    second = {**meet, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = run_alone(tmp_path, [first, {**second, "PACELINE_PROTOCOL": "local-sgd:2"}])
    assert [rank.code for rank in ended] == [2, 2]
    assert "protocol is 'full-sync' and 'local-sgd:2'" in ended[0].said
    assert ended[1].errors == []
    good = run_alone(tmp_path, [first, second])
    assert [rank.code for rank in good] == [0, 0], good


# -- without a process ----------------------------------------------------------------------------


def test_ranks_may_be_silent_for_longer_than_the_rendezvous_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_MEET_S", 1.0)
    address, port, lost = "127.0.0.1", free_port(), threading.Event()
    ranks = [
        RankOfWorld(rank=one, size=2, local_rank=one, address=address, port=port) for one in (0, 1)
    ]
    meeting = place.MeetingPlace(ranks[0])
    with ThreadPoolExecutor(2) as pool:
        groups = [
            pool.submit(group.RankGroup, meeting, rank, lambda seat: lost.set()) for rank in ranks
        ]
        first, second = (one.result() for one in groups)
        assert not lost.wait(2.5)
        left = [pool.submit(one.leave) for one in (first, second)]
        assert [one.result() for one in left] == [True, True]
    assert not lost.is_set()


def test_restarted_ranks_meet_with_any_restart_counts() -> None:
    """Where another machine's ranks fail, its agent counts a restart and this one does not."""
    address, port = "127.0.0.1", free_port()
    kept = torch.distributed.TCPStore(address, port, None, True, wait_for_workers=False)
    kept.queue_push("paceline/registrations", "paceline/of-one-that-died")
    for life, restarts in ((1, (0, 0)), (2, (0, 1)), (3, (0, 1))):
        ranks = [
            RankOfWorld(
                rank=one, size=2, local_rank=0, address=address, port=port, is_hosted=True,
                restarts=restarts[one],
            ) for one in (0, 1)
        ]  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            came_first = pool.submit(place.MeetingPlace, ranks[1])
            places = [place.MeetingPlace(ranks[0]), came_first.result()]
        assert places[0].kept() == ("" if life == 1 else "runs/that")
        places[0].keep("runs/that")
        places[0].close_registration()
        first, second = (one.client("words") for one in places)
        assert not second.check(["once"])
        first.set("once", "1")
        assert second.get("once") == b"1"
        assert [one.rank.life for one in places] == [life, life]
        assert [one.rank.goes_on for one in places] == [life > 1] * 2


def test_a_rank_of_another_job_with_the_same_port_is_refused() -> None:
    """It would take messages of the first job, and its SIGTERM would end that."""
    port = free_port()

    def rank(number: int, size: int = 2, step: str = "7.0") -> RankOfWorld:
        return RankOfWorld(
            rank=number, size=size, local_rank=0, address="127.0.0.1", port=port, step=step
        )

    places = [place.MeetingPlace(rank(0))]
    free = f"at 127.0.0.1:{port}, one .*: set MASTER_PORT to a free port"
    with pytest.raises(LinkError, match=f"another job {free}") as refused:
        place.MeetingPlace(rank(1, step="7.1"))  # before the first job's own
    assert "one that its launcher calls 7.0, and this one 7.1" in str(refused.value)
    places.append(place.MeetingPlace(rank(1)))
    with pytest.raises(LinkError, match=f"worker 1 found another job {free}"):
        place.MeetingPlace(rank(1))
    with pytest.raises(LinkError, match=f"worker 2 found another job {free}"):
        place.MeetingPlace(rank(2, size=3))
    assert [one.rank.life for one in places] == [None, None]


def test_an_unreachable_meeting_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_REACH_S", 0.3)
    port = free_port()
    rank = RankOfWorld(rank=1, size=2, local_rank=1, address="127.0.0.1", port=port)
    with pytest.raises(LinkError, match=f"worker 1 cannot reach 127.0.0.1:{port}"):
        place.MeetingPlace(rank)
    rank = RankOfWorld(rank=1, size=2, local_rank=1, address="no.such.host.invalid", port=port)
    with pytest.raises(LinkError, match=r"cannot find no\.such\.host\.invalid.*MASTER_ADDR"):
        place.MeetingPlace(rank)


def test_a_rank_of_another_version_is_named_and_told_why() -> None:
    rank = RankOfWorld(rank=0, size=3, local_rank=0, address="127.0.0.1", port=free_port())
    meeting = place.MeetingPlace(rank)
    post, store = ControllerPost(meeting, 3), meeting.client()
    other = bytes([WIRE[0] ^ 1]) + WIRE[1:]
    store.queue_push("up", _SEAT.pack(1) + other)
    ((seat, failed),) = post.hear(10.0)
    assert isinstance(failed, Failed)
    assert (seat, failed.whose) == (1, Whose.USER)
    assert failed.text.startswith("worker 1: a worker and its launcher use different versions")
    store.queue_push("up", _SEAT.pack(2) + UP.encode([Bye()]))
    assert post.hear(10.0) == [(2, Bye())]  # who speaks as this one does is still heard
    why: queue.SimpleQueue[str] = queue.SimpleQueue()
    channel = StoreChannel(meeting, 1, lambda message: None, why.put)
    store.queue_push("down/1", other)
    assert "use the same version of Paceline in all processes" in why.get(timeout=10.0)
    with pytest.raises(HungUp):
        channel.receive()
    post.close()


BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
"""What mpirun's processes inherit from the step that a batch job is."""


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (1, 2, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, (3, 4, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, (0, 2, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
        ({**BATCH_STEP, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4, 3)),
        ({**BATCH_STEP, "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (2, 4, 1)),
        ({**BATCH_STEP, "SLURM_LOCALID": "1", "PMI_RANK": "0", "PMI_SIZE": "4"}, (0, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_a_rank_is_read_from_the_environment(env: dict[str, str], rank: Any) -> None:
    result = find_rank({"MASTER_ADDR": "node1", "MASTER_PORT": "1234", **env})
    assert (result and (result.rank, result.size, result.local_rank)) == rank
    assert find_rank(env) is None  # nobody says where they meet


@pytest.mark.parametrize(
    ("names", "step"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, "7.1"),
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_HET_SIZE": "2"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_ranks_that_srun_started_know_its_step(names: dict[str, str], step: str) -> None:
    """Ranks that were numbered by hand may be of several steps."""
    env = {"MASTER_ADDR": "node1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", **names}
    assert (rank := find_rank(env)) is not None
    assert rank.step == step


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must be from 0 to 1 \(WORLD_SIZE=2\), got 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'one'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT must be a port"),
    ],
)
def test_impossible_ranks_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_rank({"MASTER_ADDR": "node1", **env})


@pytest.mark.parametrize(
    ("changed", "is_left"),
    [
        ({}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": ""}, False),
    ],
)
def test_only_rank_of_a_restarted_job_is_left_alone(changed: dict[str, str], is_left: bool) -> None:
    env = {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
    }  # fmt: skip
    left = find_left_alone(env | changed)
    assert (left is not None) is is_left
    assert left is None or (left.size, left.place) == (1, "node1:1234")


@pytest.fixture
def rank_messages() -> Iterator[list[Any]]:
    """A rank's messages to the controller, once it handles signals."""
    before = {number: signal.getsignal(number) for number in REASONS}
    life = object.__new__(RankLife)
    sent: list[Any] = []
    life._pid, life.channel = 0, SimpleNamespace(say=sent.append)  # type: ignore[assignment]  # only what it says is looked at
    life.begin_to_talk()
    yield sent
    atexit.unregister(life._leave)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_child_of_a_rank_ends_by_a_signal(rank_messages: list[Any]) -> None:
    """Otherwise a pool's teardown, and any terminate and join, would wait forever."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    forked.terminate()
    forked.join(5.0)
    code = forked.exitcode
    forked.kill()
    assert code == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert rank_messages == [EndAsked(signal.SIGTERM)]


def test_a_seed_set_by_the_script_is_kept() -> None:
    same, mine, other = ("a", "b", "c", "7"), ("x", "b", "y", "8"), ("z", "b", "w", str(2**60))
    assert unseeded([same, same]) == ()
    assert unseeded([same, mine]) == ("python",)  # torch by its seed and its rank
    assert unseeded([same, other]) == ("python", "torch")


def lines_of(num_seats: int) -> list[GatheredLines]:
    """Barriers of ranks in one process; what one gathers is the current state of all."""
    controls = []
    for _ in range(num_seats):
        page = SharedMemory.create(control_bytes(num_seats))
        controls.append((page, RankControl(page, num_seats, None)))  # type: ignore[arg-type]
    carriers = [
        SimpleNamespace(page=page, present=lambda seat: memoryview(bytearray()))
        for page, _ in controls
    ]
    all_lines: list[GatheredLines] = []

    class Group:
        def all_gather(self, mine: Tensor, out: Tensor) -> SimpleNamespace:
            out.copy_(torch.cat([line._own for line in all_lines]))
            return SimpleNamespace(wait=lambda: None)

        @property
        def near_ranks(self) -> "Group":
            return self

    for seat, (_, control) in enumerate(controls):
        all_lines.append(
            GatheredLines(control, seat, Clock(), Group(), carriers[seat])  # type: ignore[arg-type]
        )
    for _ in range(2):  # the first time makes what the second one gathers
        for line in all_lines:
            assert line.num_bytes
    return all_lines


def test_the_rank_with_more_scheduler_steps_wins() -> None:
    first, second = lines_of(2)
    first._control[RHYTHMS], first._control[COUNTS] = 2**29, 4
    second._control[RHYTHMS], second._control[COUNTS] = 2**29 + 2, 5
    second._control.set_double(ARGUMENTS, 0.25)
    second.arrive()
    first.arrive()
    assert (first._control[RHYTHMS], first._control[COUNTS]) == (2**29 + 2, 5)
    assert first._control.double(ARGUMENTS) == 0.25
    second._control[RHYTHMS] = 1  # another rhythm: for good, whoever has found it
    second.arrive()
    first.arrive()
    assert first._control[RHYTHMS] == 1


def test_a_controllers_alarm_is_kept_when_an_epoch_opens() -> None:
    first, second = lines_of(2)
    for one in (first, second):
        one._control[ALARM] = 1
        one.begin(0)
    assert (first._control[ALARM], second._control[ALARM]) == (1, 0)


def test_a_ranks_share_and_its_offered_scale_do_not_overlap() -> None:
    first, second = lines_of(2)
    for seat, one in enumerate((first, second)):
        control = one._control
        assert control.numbers[seat] + NUMBERS <= control.offers[seat]
        control.set_double(control.offers[seat], 65536.0 + seat)
        one.show_share(0.25 + seat)
    second.arrive()
    first.arrive()
    assert first.shares() == [0.25, 1.25]
    assert [first._control.double(one) for one in first._control.offers] == [65536.0, 65537.0]


SCALED = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
for epoch in pace.epochs(1):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
open(f"scale-{pace.worker}", "w").write(str(scaler.get_scale()))
"""


def test_a_loss_scale_starts_as_in_one_process(tmp_path: Path) -> None:
    ended = run_by_mpirun(tmp_path, 2, SCALED)
    assert ended.code == 0, ended.said
    assert [(tmp_path / f"scale-{rank}").read_text() for rank in (0, 1)] == ["65536.0"] * 2


def test_a_dry_run_shows_the_plan_of_all_ranks_and_ends(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, 2, PACELINE_DRY_RUN="1")
    assert ended.code == 0, ended.said
    assert "workers          2 on cpu, engine torchrun" in ended.said
    assert "epoch 1" not in ended.said


def test_errors_for_lack_of_batches_are_no_failure_after_a_stop(
    tmp_path: Path,
) -> None:
    ended = run_ranks(tmp_path, 2, PACELINE_UPDATES="4", MODE="needs batches")
    assert ended.code == 0, ended.said
    assert "so its loader had no more batches" in ended.said


STOPPED_BEHIND = """\
import time, torch
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(3):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    ASKS
    break
LATER
"""
ASK = "if pace.worker == 1: time.sleep(1); pace.stop()"
ASK_AT_ONCE = "if pace.worker == 1: pace.stop()\nelse: time.sleep(1)"


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("asks", "later"), [("pass", ""), (ASK, ""), ("pass", ASK), ("pass", ASK_AT_ONCE)]
)
def test_the_end_behind_a_loop_that_was_left_is_saved(
    tmp_path: Path, asks: str, later: str
) -> None:
    """Also where only another rank than 0, which writes it, asks for the stop."""
    script = STOPPED_BEHIND.replace("ASKS", asks).replace("LATER", later)
    ended = run_by_mpirun(tmp_path, 2, script + "torch.save(model.state_dict(), 'end.pt')\n")
    assert ended.code == 0, ended.said
    [folder] = (tmp_path / "run").glob("checkpoints/[0-9]*")
    saved, end = load_file(folder / "model.safetensors"), torch.load(tmp_path / "end.pt")
    assert saved.keys() == end.keys()
    assert all(torch.equal(saved[name], end[name]) for name in end)


def test_ranks_that_count_to_different_ends_are_told(tmp_path: Path) -> None:
    counts = "range(3 + pace.worker)"
    script = STOPPED_BEHIND.replace("    ASKS\n    break\nLATER", "")
    ended = run_by_mpirun(tmp_path, 2, script.replace("pace.epochs(3)", counts))
    assert_one_cause(ended, "worker 1 begins another epoch and worker 0 has no more")


CALLS_ALONE = """\
if pace.is_main:
    def count(batch):
        return {"n": (float(len(batch[0])), 1.0)}
    totals = pace.evaluate(count, DataLoader(TensorDataset(torch.ones(7, 2)), batch_size=3))
    print("evaluated", totals, "sum", pace.sum(2.0))
"""
TRAINS_ALONE = "if pace.is_main:\n    for epoch in pace.epochs(2):\n        for _ in loader: pass\n"


@pytest.mark.timeout(150)
def test_a_rank_whose_script_is_over_is_not_waited_for(tmp_path: Path) -> None:
    trained = STOPPED_BEHIND.replace("    ASKS\n    break\nLATER", "")
    ended = run_by_mpirun(tmp_path, 2, trained + CALLS_ALONE)
    assert ended.code == 0, ended.said
    assert "evaluated {'n': " in ended.said
    assert "sum 2.0" in ended.said


@pytest.mark.timeout(150)
def test_a_rank_that_trains_on_alone_is_told(tmp_path: Path) -> None:
    trained = STOPPED_BEHIND.replace("    ASKS\n    break\nLATER", "")
    ended = run_by_mpirun(tmp_path, 2, trained + TRAINS_ALONE)
    assert_one_cause(ended, "worker 0 begins another epoch and worker 1 has no more")


@pytest.mark.timeout(150)
def test_end_that_rank_0_is_not_there_to_copy_is_in_no_checkpoint(tmp_path: Path) -> None:
    """Checkpoints are written from rank 0's memory: what another rank pins is not seen there."""
    before, _, _ = STOPPED_BEHIND.partition("for epoch")
    ended = run_by_mpirun(tmp_path, 2, before + ASK)
    assert_one_cause(ended, "the end of the run could not be written")
    assert not list((tmp_path / "run").glob("checkpoints/[0-9]*"))
