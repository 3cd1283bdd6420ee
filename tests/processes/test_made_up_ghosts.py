"""Real processes: all planted ghosts are ended, no bystander is.

Instead of torch they map a file of its library's name, so that they start at once. Only processes
of these tests are ever signalled: another training may run beside them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.processes.ending import end, left_before, left_by, remove
from paceline.processes.judgement import ghosts, role_of
from paceline.processes.reading import look, read_start
from paceline.processes.snapshot import HOST, Process, ProcessSnapshot
from paceline.processes.targets import choose
from paceline.system.vitals import ProcessState, read_vitals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")

LOOK_S = 0.3
BEGINS = """
import ctypes, mmap, os, signal, socket, subprocess, sys, time
library = open(sys.argv[1], "rb")
torch = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
def say(*numbers):
    print(*numbers, flush=True)
def name(text):
    ctypes.CDLL(None).prctl(15, text.encode(), 0, 0, 0)
def rest():
    while True:
        time.sleep(600)
"""
LOADER = """
if os.fork():
    os._exit(0)
name("pt_data_worker")
{more}
say(os.getpid())
rest()
"""
OF_TORCHRUN = """
if os.fork():
    os._exit(0)
os.setsid()
attempt = os.path.join(os.path.dirname(sys.argv[1]), str(os.getpid()), "attempt_0")
os.makedirs(os.path.join(attempt, "0"))
{begins}
os.execve(
    sys.executable,
    [sys.executable, "-c", sys.argv[2], sys.argv[1]],
    {{**os.environ, "TORCHELASTIC_ERROR_FILE": os.path.join(attempt, "0", "error.json")}},
)
"""
GHOSTS = {
    "a loader worker": LOADER.format(more=""),
    "one that ignores TERM": LOADER.format(more="signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    "one that is stopped": LOADER.format(
        more="say(os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    "one that ignores TERM and is stopped": LOADER.format(
        more="signal.signal(signal.SIGTERM, signal.SIG_IGN); say(os.getpid()); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    "a part that was forked twice": """
if os.fork():
    os._exit(0)
if os.fork():
    os._exit(0)
say(os.getpid())
rest()
""",
    "a rank without its torchrun": OF_TORCHRUN.format(begins=""),
}
RANK = BEGINS + "say(os.getpid()); rest()"


class Made:
    """Starts processes, knows their numbers, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "libtorch_cpu.so"
        self.library.write_bytes(bytes(4096))
        self._all: dict[int, int | None] = {}
        self._begun: list[subprocess.Popen[str]] = []

    def begin(self, code: str, *, numbers: int = 1) -> list[int]:
        """Run this code; return the process numbers it prints."""
        begun = subprocess.Popen(
            [sys.executable, "-c", BEGINS + code, str(self.library), RANK],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._begun.append(begun)
        assert begun.stdout is not None
        results = [int(word) for word in begun.stdout.readline().split()]
        assert len(results) == numbers
        self._all |= {pid: read_start(pid) for pid in results}
        return results

    def keep(self, begun: "subprocess.Popen[str]") -> int:
        self._begun.append(begun)
        return begun.pid

    def close(self) -> None:
        for pid, start in self._all.items():
            if start is not None and read_start(pid) == start:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for begun in self._begun:
            begun.kill()
            begun.wait()
            if begun.stdout is not None:
                begun.stdout.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    making = Made(tmp_path)
    yield making
    making.close()


def becomes_true(is_there: Callable[[], bool]) -> bool:
    """Whether the condition becomes true within a time limit."""
    end_s = time.monotonic() + 20.0
    while not is_there() and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_there()


def is_there(pid: int) -> bool:
    return read_vitals(pid).state is not ProcessState.ENDED


def is_stopped(pid: int) -> bool:
    return read_vitals(pid).state is ProcessState.STOPPED


def quiet(_: str) -> None:
    pass


def test_all_ghosts_are_ended_and_no_bystander(made: Made) -> None:
    pids = {name: made.begin(code)[0] for name, code in GHOSTS.items()}
    assert becomes_true(lambda: sum(is_stopped(pid) for pid in pids.values()) == 2)
    bystanders = [made.keep(subprocess.Popen(["sleep", "600"], text=True)) for _ in range(24)]
    for code in (
        "say(os.getpid()); rest()",
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); say(os.getpid()); rest()",
        "say(os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)",
        "port = socket.create_server(('127.0.0.1', 0)); say(os.getpid()); rest()",
        "os.setsid(); say(os.getpid()); rest()",
        OF_TORCHRUN.format(begins="os.utime(attempt, (time.time() - 9,) * 2)"),
        "name('pt_data_worker'); say(os.getpid()); rest()",
    ):
        bystanders += made.begin(code)
    snapshot = look(for_s=LOOK_S)
    before = {pid: snapshot.by_pid[pid] for pid in bystanders}
    targets = [one for one, _ in choose(snapshot, for_s=LOOK_S).targets]
    assert {*pids.values()} <= {target.pid for target in targets}
    assert not {*bystanders} & {target.pid for target in targets}
    ours = [target for target in targets if target.pid in pids.values()]
    ended = {one.pid: one for one in end(ours, 1.0, quiet)}
    assert all(ended[pid].is_over for pid in pids.values())
    by = {name: ended[pid].by for name, pid in pids.items()}
    stubborn = {name for name in by if "ignores" in name}
    assert {name for name, signal_name in by.items() if signal_name == "SIGKILL"} == stubborn
    after = look()
    assert all(after.get(value.key) is not None for value in before.values())
    assert {after.by_pid[pid].state for pid in bystanders} <= {*"ST"}


def test_process_started_by_torchelastic_is_a_rank(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recognized by the launcher that torchrun uses, not by its command."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "none of this process")
    folder, library = str(made.library.parent), str(made.library)
    ranks = start_processes(
        name="trains", entrypoint=sys.executable, args={0: ("-c", RANK, library)}, envs={0: {}},
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )  # fmt: skip
    try:
        (pid,) = ranks.pids().values()
        assert becomes_true(lambda: look().by_pid[pid].has_torch)
        assert role_of(look().by_pid[pid]).value == "rank"
    finally:
        ranks.close()


def test_unrelated_child_of_an_ended_process_survives(made: Made) -> None:
    ghost, child = made.begin(
        LOADER.format(
            more="child = subprocess.Popen(['sleep', '600']); say(os.getpid(), child.pid)"
        ),
        numbers=2,
    )
    snapshot = look(for_s=LOOK_S)
    targets = [one for one, _ in choose(snapshot, (ghost,), LOOK_S).targets]
    assert [target.pid for target in targets] == [ghost]
    assert end(targets, 5.0, quiet)[0].is_over
    assert is_there(child)


def test_reused_pid_is_sent_no_signal(made: Made) -> None:
    (pid,) = made.begin(LOADER.format(more=""))
    real = look().by_pid[pid]
    earlier = replace(real, start_ticks=real.start_ticks - 1)
    (answer,) = end([earlier], 0.1, quiet)
    assert (answer.by, answer.reason) == ("", "it had ended before")
    assert is_there(pid)


def test_held_ports_and_files_are_listed_and_freed(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself: first listed, then done; only for named processes."""
    file = Path(f"/dev/shm/paceline-test-{os.getpid()}")
    holds = LOADER.format(
        more="port = socket.create_server(('127.0.0.1', 0)); "
        f"file = os.open({str(file)!r}, os.O_CREAT | os.O_RDWR, 0o600); "
        "os.ftruncate(file, 4096); block = mmap.mmap(file, 4096); block[0] = 1"
    )
    (pid,) = made.begin(holds)
    process = look().by_pid[pid]
    assert process.shared == (str(file),)
    assert len(process.ports) == 1
    assert left_by([process], look())[0].path == str(file)
    assert run(["clean", str(pid), "--look-s", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert f"would end {pid}" in shown
    assert f"would free {file}" in shown
    assert is_there(pid)
    assert run(["clean", str(pid), "--yes", "--look-s", "0.1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["targets"][0]["ended_by"] == "SIGTERM"
    assert answer["targets"][0]["is_over"]
    assert answer["shared_memory"] == [{"path": str(file), "num_bytes": 4096}]
    assert answer["ports"] == [*process.ports]
    assert answer["kept_ports"] == []
    assert not file.exists()


def test_file_held_by_others_stays(made: Made) -> None:
    file = Path(f"/dev/shm/paceline-test-held-{os.getpid()}")
    try:
        opens = f"file = os.open({str(file)!r}, os.O_CREAT | os.O_RDWR, 0o600)"
        (ghost,) = made.begin(LOADER.format(more=opens))
        made.begin(f"{opens}; say(os.getpid()); rest()")
        snapshot = look()
        assert left_by([snapshot.by_pid[ghost]], snapshot) == []
    finally:
        file.unlink()


def test_shared_memory_files_of_ended_trainings_are_found(tmp_path: Path) -> None:
    """By the process number in their names; files that are held or open to others stay."""
    gone, mine = 2**22 - 7, os.getpid()
    for name in (f"torch_{gone}_77_0", f"torch_{mine}_77_0", f"torch_{gone}_77_1", "psm_1",
                 f"torch_{gone}_77_2", f"torch_{gone}"):  # fmt: skip
        (tmp_path / name).write_bytes(bytes(5000))
        (tmp_path / name).chmod(0o600)
    (tmp_path / f"torch_{gone}_77_1").chmod(0o644)
    held = str(tmp_path / f"torch_{gone}_77_2")
    own = Process(pid=mine, start_ticks=1, parent=1, owner=os.getuid(), shared=(held,))
    now = ProcessSnapshot(processes=(own,), own=mine, owner=os.getuid(), namespace=HOST)
    leftovers = left_before(now, tmp_path)
    assert [Path(leftover.path).name for leftover in leftovers] == [f"torch_{gone}_77_0"]
    assert remove(leftovers) == leftovers
    assert len([*tmp_path.iterdir()]) == 5
    in_container = ProcessSnapshot(processes=(), own=1, owner=os.getuid(), namespace="pid:[2]")
    assert left_before(in_container, tmp_path) == []


root = pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")


@root
def test_process_of_another_user_is_not_ended(made: Made) -> None:
    made.library.parent.chmod(0o755)
    (pid,) = made.begin("os.setuid(65534)" + LOADER.format(more=""))
    snapshot = look(for_s=LOOK_S)
    chosen = choose(snapshot, (pid,), LOOK_S)
    assert chosen.targets == ()
    assert "another user's" in chosen.refused[0].reason
    assert snapshot.by_pid[pid].key not in ghosts(snapshot, LOOK_S)
    assert is_there(pid)


@root
def test_process_in_another_pid_namespace_is_not_ended(made: Made) -> None:
    """It reports its number there, which belongs to another process here."""
    code = "libc = ctypes.CDLL(None, use_errno=True)\nassert libc.unshare(0x20000000) == 0\n"
    code += "child = os.fork()\nif child:\n    say(child)\n    rest()\n"
    code += "name('pt_data_worker')\nif os.fork():\n    rest()\nos.setsid()\nrest()"
    (pid,) = made.begin(code)
    snapshot = look(for_s=LOOK_S)
    inside = [process for process in snapshot.processes if pid in (process.pid, process.parent)]
    assert len(inside) == 2
    assert {one.namespace for one in inside}.isdisjoint({snapshot.namespace})
    for one in inside:
        chosen = choose(snapshot, (one.pid,), LOOK_S)
        assert chosen.targets == ()
        assert "another PID namespace" in chosen.refused[0].reason
    assert not {one.key for one in inside} & {
        one.key for one, _ in choose(snapshot, for_s=LOOK_S).targets
    }


def test_loader_worker_of_a_killed_script_is_a_ghost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "from torch.utils.data import DataLoader\n"
        "class Slow:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        print(os.getpid(), flush=True)\n"
        "        time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    next(iter(DataLoader(Slow(), num_workers=1)))\n"
    )
    training = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    with training.stdout:
        pid = int(training.stdout.readline())
        worker = look().by_pid[pid]
        try:
            assert role_of(worker).value == "loader worker"
            assert worker.key not in ghosts(look())
            training.kill()
            training.wait()
            assert becomes_true(lambda: worker.key in ghosts(look()))
            (answer,) = end([worker], 10.0, quiet)
            assert answer.is_over
        finally:
            training.kill()
            training.wait()
            if look().get(worker.key) is not None:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("words", [["--look-s", "-1"], ["--look-s", "nan"], ["--wait-s", "1e9"]])
def test_invalid_times_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", str(os.getpid()), *words]) == 2
    assert f"{words[0]} must be between 0 and 3600 seconds" in capsys.readouterr().err


def test_ps_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ps", "--look-s", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"processes", "ghosts", "busy_devices", "unread"} == answer.keys()
    assert os.getpid() not in {process["pid"] for process in answer["processes"]}
