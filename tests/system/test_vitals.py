"""Process information from the kernel: state, tracer, and CPU time including children."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.system import vitals
from paceline.system.vitals import UNKNOWN, ProcessState, catches, read_vitals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell")

SLEEPS = "import time; print(flush=True); time.sleep(60)"
COMPUTES = "print(flush=True)\nwhile True: pass"
LETS_COMPUTE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])"
IGNORES = "import signal, time; signal.signal(10, lambda *_: None); " + SLEEPS


@contextmanager
def started_process(code: str) -> Iterator[int]:
    """A process that runs this code, once it reports; it and its children end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def becomes_true(is_there: Callable[[], bool]) -> bool:
    """Whether the condition becomes true within a time limit."""
    end_s = time.monotonic() + 20.0
    while not is_there() and time.monotonic() < end_s:
        time.sleep(0.002)
    return is_there()


def test_sleeping_process_is_awake_until_it_is_stopped() -> None:
    with started_process(SLEEPS) as pid:
        before = read_vitals(pid)
        assert before.state is ProcessState.AWAKE
        assert becomes_true(lambda: not read_vitals(pid).is_running)
        os.kill(pid, signal.SIGSTOP)
        assert becomes_true(lambda: read_vitals(pid).state is ProcessState.STOPPED)
        assert read_vitals(pid).cpu_s - before.cpu_s < 0.05
        os.kill(pid, signal.SIGCONT)
        assert becomes_true(lambda: read_vitals(pid).state is ProcessState.AWAKE)


@pytest.mark.parametrize("code", [COMPUTES, LETS_COMPUTE], ids=["itself", "a child"])
def test_cpu_time_includes_children(code: str) -> None:
    with started_process(code) as pid:
        before_s = read_vitals(pid).cpu_s
        assert becomes_true(lambda: read_vitals(pid).cpu_s > before_s + 0.1)
        assert becomes_true(lambda: read_vitals(pid).is_running)


def test_ended_process_is_reported_and_its_time_stays_counted() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_vitals(process.pid).state is ProcessState.ENDED
    process.wait()
    assert read_vitals(process.pid).state is ProcessState.ENDED
    assert read_vitals(os.getpid()).cpu_s >= os.times().children_user


def test_caught_signals_are_known() -> None:
    with started_process(IGNORES) as pid:
        assert catches(pid, signal.SIGUSR1)
        assert not catches(pid, signal.SIGUSR2)


def test_vitals_are_unknown_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "_PROC", tmp_path / "none")
    assert read_vitals(os.getpid()) == UNKNOWN
    assert catches(os.getpid(), signal.SIGUSR2)


def test_traced_process_is_recognized_in_any_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file as the kernel writes it; tracing needs rights that a container may lack."""
    monkeypatch.setattr(vitals, "_PROC", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "7").mkdir()
    rows = [("S", 9, "TRACED"), ("t", 9, "TRACED"), ("T", 0, "STOPPED"), ("D", 0, "DISK")]
    for letter, tracer, name in rows:
        state = ProcessState[name]
        (tmp_path / "7" / "stat").write_text(f"7 (a) name) {letter} " + "0 " * 48)
        (tmp_path / "7" / "status").write_text(f"Name:\ta: b\nTracerPid:\t{tracer}\n")
        assert read_vitals(7)[:3] == (state, 0.0, tracer)
