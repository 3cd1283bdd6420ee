"""Injected faults from outside a worker: signals at a time, and faults of the machine.

    plan, time, version -> a signal to a process, a file that is damaged, a disk that is full

A worker's own faults happen within its step (conditions/faults.py); here they are only recorded,
and a worker that stopped itself is continued. This module must not know protocols, nor what a
message leads to.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from ..conditions.faults import Fault, FaultPlan, Kind
from ..system.files import OpenFolder
from ..wire.messages import FaultComes
from .state import RunState


class OuterFaults:
    """The outer faults of one run."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._plan = FaultPlan.parse(run.settings.fault, run.settings.workers)
        outside = (Kind.KILL, Kind.STOP)
        self._left = [
            one
            for one in self._plan.faults
            if one.worker is None or (one.at_s is not None and one.kind in outside)
        ]
        self._later: list[tuple[float, int]] = []
        """When to end a fault, and of which member; -1: the full disk."""

    def heard(self, member: int, message: FaultComes) -> None:
        """A fault happens to this member, from within."""
        fault = next(one for one in self._plan.faults if str(one) == message.text)
        self._note(fault)
        if fault.kind is Kind.STOP:
            self._later.append((self._run.now_s() + fault.for_s, member))

    def tick(self, now_s: float) -> None:
        """Inject the faults that are due."""
        if not self._plan or not self._run.watch.opened_s:
            return
        for one in [one for one in self._left if self._is_due(one, now_s)]:
            self._left.remove(one)
            self._strike(one, now_s)
        for due in [due for due in self._later if due[0] <= now_s]:
            self._later.remove(due)
            self._relieve(due[1])

    def close(self) -> None:
        """The run is over: undo a fault of this process itself."""
        if any(member < 0 for _, member in self._later):
            limit_files(None)

    def _is_due(self, fault: Fault, now_s: float) -> bool:
        if fault.update is not None:
            return self._run.coordinator.version >= fault.update
        return fault.at_s is not None and now_s - self._run.watch.opened_s >= fault.at_s

    def _note(self, fault: Fault) -> None:
        run = self._run
        run.happened.append(str(fault))
        run.trace.fault(run.now_s(), str(fault))
        run.observer.note(f"fault: {fault}")

    def _strike(self, fault: Fault, now_s: float) -> None:
        run = self._run
        if fault.worker is not None:
            one = run.roster.on_seat(fault.worker)
            if not one.is_alive or not one.pid:
                run.observer.note(f"no fault: {fault}: the worker is not running")
                return
            self._note(fault)
            _signal(one.pid, signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGSTOP)
            if fault.kind is Kind.STOP:
                self._later.append((now_s + fault.for_s, one.number))
            return
        self._note(fault)
        run.trace.flush()
        if fault.kind is Kind.KILL_LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is Kind.CORRUPT:
            flip_a_byte(run.trace.path.parent / fault.file)
        else:
            assert fault.kind is Kind.FILL_DISK
            limit_files(run.trace.path.stat().st_size)
            self._later.append((now_s + fault.for_s, -1))

    def _relieve(self, member: int) -> None:
        if member < 0:
            limit_files(None)
        elif self._run.roster[member].is_alive:
            _signal(self._run.roster[member].pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def flip_a_byte(path: Path) -> None:
    """Change one bit in the middle of a file, as a bad disk would; a missing one stays missing."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(OpenFolder.open(path.parent)) as place,
        open(place.again(path.name), "r+b") as file,
    ):
        middle = os.fstat(file.fileno()).st_size // 2
        if data := os.pread(file.fileno(), 1, middle):
            os.pwrite(file.fileno(), bytes([data[0] ^ 0x10]), middle)


def limit_files(size: int | None) -> None:
    """Limit the files of this process to ``size`` bytes, as a full disk would; None: no limit."""
    if sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    soft = hard if size is None else size
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
