"""Processes read from a recorded /proc; exclusions, and busy devices without a process."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from machines import UUID, gpu_row, nvidia
from paceline.errors import ConfigError
from paceline.machine.nvidia import read_gpus
from paceline.processes.devices import busy_devices, device_memory, without_process
from paceline.processes.judgement import Role, judge, role_of
from paceline.processes.reading import look, read_start
from paceline.processes.snapshot import ProcessSnapshot
from paceline.processes.table import Listing, render_listed

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
STAT = (
    "{pid} ({name}) {state} {parent} 70 {session} 0 -1 {flags} 0 0 0 0 150 50 0 0 20 0 1 0 "
    "{start} 0 0"
)


def write_process(
    root: Path,
    pid: int,
    *,
    parent: int = 1,
    name: str = "python",
    state: str = "S",
    flags: int = 0,
    owner: int = 1000,
    maps: str = "",
    links: dict[str, str] | None = None,
    command: str = "python\0train.py",
    environ: str = "",
    session: int = 50,
) -> None:
    """One process as the kernel shows it."""
    folder = root / "proc" / str(pid)
    for below in ("fd", "fdinfo", "ns", "net"):
        (folder / below).mkdir(parents=True)
    texts = {
        "stat": STAT.format(
            pid=pid,
            name=name,
            state=state,
            parent=parent,
            session=session,
            flags=flags,
            start=pid * 10,
        ),
        "status": f"Name:\t{name}\nUid:\t{owner}\t{owner}\nVmRSS:\t2048 kB\nRssShmem:\t1024 kB\n",
        "cmdline": f"{command}\0",
        "maps": maps,
        "environ": environ,
        "net/tcp": "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1F90 00000000:0000 0A 0:0 00:0 0 1000 0 777 1\n"
        "   1: 0100007F:1F91 00000000:0000 01 0:0 00:0 0 1000 0 778 1\n",
    }
    for path, text in texts.items():
        (folder / path).write_text(text)
    usual = {"exe": "/usr/bin/python3.11", "ns/pid": "pid:[1]", "ns/net": "net:[1]"}
    for path, target in {**usual, **(links or {})}.items():
        (folder / path).symlink_to(target)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "uptime").write_text("100.0 50.0")
    (tmp_path / "proc" / "self").symlink_to("9")
    write_process(tmp_path, 9, command="python\0-m\0paceline\0ps")
    return tmp_path


TORCH = "7f00-7f01 r-xp 0 8:1 1 /v/lib/libtorch_cpu.so\n"


@linux
def test_command_devices_and_files_of_a_process_are_read(root: Path) -> None:
    shared = "7f02-7f03 rw-s 0 0:1 2 /memfd:paceline (deleted)\n7f04-7f05 rw-s 0 0:1 3 /dev/shm/a\n"
    write_process(
        root, 20, parent=9, maps=TORCH + shared, flags=0x40, name="pt_(data) worker",
        environ="X=1\0TORCHELASTIC_ERROR_FILE=/tmp/elastic/attempt_0/1/error.json", links={
            "fd/3": "/dev/nvidia0", "fd/4": "socket:[777]", "fd/5": "socket:[778]",
            "fd/6": "/dev/shm/b", "fd/7": "/dev/nvidiactl", "fd/8": "/home/x",
        },
    )  # fmt: skip
    attempt = root / "tmp" / "elastic" / "attempt_0"
    attempt.mkdir(parents=True)
    began_s = time.time() - 98.0  # the machine was started 100 s ago, the process 2 s later
    os.utime(attempt, (began_s, began_s - 0.25))
    one = look(root).by_pid[20]
    assert one.rank_s == pytest.approx(0.25, abs=0.2)
    assert (one.parent, one.group, one.session, one.start_ticks) == (9, 70, 50, 200)
    assert (one.is_forked, one.has_torch) == (True, True)
    assert one.devices == ("/dev/nvidia0",)
    assert one.ports == (8080,)
    assert one.shared == ("/dev/shm/a", "/dev/shm/b", "memfd:paceline")
    assert (one.memory_bytes, one.shared_bytes, one.cpu_s) == (2 << 20, 1 << 20, 2.0)
    assert one.command == ("python", "train.py")
    assert read_start(20, root) == 200
    assert read_start(21, root) is None


@linux
def test_child_of_a_rank_in_its_own_session_is_no_rank(root: Path) -> None:
    environ = "TORCHELASTIC_ERROR_FILE=/tmp/elastic/attempt_0/1/error.json"
    (root / "tmp" / "elastic" / "attempt_0").mkdir(parents=True)
    for pid in (30, 20):
        write_process(root, pid, maps=TORCH, environ=environ, session=pid)
    by_pid = look(root).by_pid
    assert by_pid[20].rank_s is not None
    assert by_pid[30].rank_s is None


@linux
@pytest.mark.parametrize("named", ["/tmp/gone/attempt_0/0/error.json", "", "none"])
def test_process_without_a_rank_folder_is_no_rank(root: Path, named: str) -> None:
    write_process(root, 20, maps=TORCH, environ=f"TORCHELASTIC_ERROR_FILE={named}")
    assert look(root).by_pid[20].rank_s is None


def pipe(root: Path, pid: int, number: int, flags: str) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd" / str(number)).symlink_to("pipe:[55]")
    (folder / "fdinfo" / str(number)).write_text(f"pos:\t0\nflags:\t{flags}\n")


@linux
def test_pipe_is_dead_if_nobody_holds_its_other_end(root: Path) -> None:
    write_process(root, 20, maps=TORCH)
    pipe(root, 20, 3, "0100000")
    assert look(root).by_pid[20].dead_pipes == 1
    write_process(root, 21, maps=TORCH)
    pipe(root, 21, 4, "0100001")
    assert look(root).by_pid[20].dead_pipes == 0


@linux
def test_pipes_are_not_judged_if_a_process_is_unreadable(root: Path) -> None:
    write_process(root, 20, maps=TORCH)
    pipe(root, 20, 3, "0100000")
    write_process(root, 21)
    (root / "proc" / "21" / "ns" / "pid").unlink()
    snapshot = look(root)
    assert (snapshot.unread, snapshot.by_pid[20].dead_pipes) == (1, 0)


@linux
def test_dead_standard_output_is_no_evidence(root: Path) -> None:
    """Its other end may belong to another user: cron, a terminal."""
    write_process(root, 20, maps=TORCH)
    pipe(root, 20, 1, "0100001")
    assert look(root).by_pid[20].dead_pipes == 0


@linux
def test_other_users_processes_and_zombies_are_not_read(root: Path) -> None:
    write_process(root, 20, owner=7, maps=TORCH)
    write_process(root, 21, state="Z", maps=TORCH)
    snapshot = look(root)
    assert not any(snapshot.by_pid[pid].has_torch for pid in (20, 21))
    assert judge(snapshot) == []


@linux
def test_process_that_ends_meanwhile_is_left_out(root: Path) -> None:
    (root / "proc" / "33").mkdir()
    assert 33 not in look(root).by_pid


@linux
def test_python_process_holding_a_device_counts_as_training(root: Path) -> None:
    write_process(root, 20, links={"fd/3": "/dev/nvidia0"})
    assert role_of(look(root).by_pid[20]) is Role.SCRIPT


def test_missing_proc_is_refused_with_an_alternative(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use ps and kill"):
        look(tmp_path)


BUSY = gpu_row(used="0", utilization="100")


def test_busy_device_without_a_process_is_reported(tmp_path: Path) -> None:
    """A kernel that was left running: 100 %, no memory, no process listed."""
    source = nvidia(tmp_path, outputs={"nvidia-smi --query-gpu": BUSY})
    nobody = ProcessSnapshot(processes=(), own=1, owner=1, namespace="")
    (result,) = busy_devices(nobody, source)
    assert result.device == "nvidia0"
    assert "100% busy, 0 MiB in use, but no process here uses it" in result.reason
    assert result.reason in "\n".join(render_listed(Listing(judged=(), busy=(result,))))


def test_device_memory_is_reported_only_on_the_host(root: Path) -> None:
    """In a container the driver's numbers are those of the host, and mean other processes."""
    apps = f"20, {UUID}, 2048\n20, {UUID}, 1024\n"
    source = nvidia(root / "gpu", outputs={"nvidia-smi --query-compute-apps": apps})
    host = ProcessSnapshot(processes=(), own=9, owner=1000, namespace="pid:[4026531836]")
    assert device_memory(host, source) == {20: 3 << 30}
    assert device_memory(replace(host, namespace="pid:[4026532000]", by_pid={}), source) == {}
    write_process(root, 20, maps=TORCH, links={"fd/3": "/dev/nvidia0"})
    listed = Listing(judged=tuple(judge(look(root))), device_bytes={20: 3 << 30})
    assert "nvidia0 3.0 GiB" in "\n".join(render_listed(listed))
    assert listed.to_json()["processes"][0]["device_bytes"] == 3 << 30


@pytest.mark.parametrize(
    ("row", "listed", "held", "is_said"),
    [
        (BUSY, {UUID}, set(), False),
        (BUSY, set(), {"/dev/nvidia0"}, False),
        (gpu_row(used="9000"), set(), set(), True),
        (gpu_row(used="500", utilization="5"), set(), set(), False),
    ],
)
def test_idle_device_or_one_with_a_known_user_is_not_reported(
    row: str, listed: set[str], held: set[str], is_said: bool, tmp_path: Path
) -> None:
    gpus = read_gpus(nvidia(tmp_path, outputs={"nvidia-smi --query-gpu": row}))
    assert bool(without_process(gpus, listed, held)) is is_said
