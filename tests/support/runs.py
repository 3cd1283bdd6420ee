"""Runs for tests: quiet, in a folder of their own, and read back from their files."""

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

import forked
from paceline.config import RunSettings
from paceline.engines import inline
from paceline.engines.local import client
from paceline.events import Apply, EpochEnd, Grant, Late, Lease, Order, Pushed, Retire
from paceline.launch import launcher
from paceline.program import Program, ScriptProgram, TaskProgram
from paceline.report.live import QuietObserver
from paceline.trace import read_trace
from paceline.trace.records import Handed, Header, Heard, Noted, Ordered, Record, SupersededRecord
from paceline.workloads.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    folder: Path
    summary: Any
    """A Summary; of a script that trains in trials a TrialsSummary."""

    @property
    def records(self) -> list[Record]:
        return list(read_trace(self.folder / "trace.jsonl"))

    @property
    def state(self) -> dict[str, Tensor]:
        """The model saved by the run."""
        return load_file(self.folder / "model.safetensors")

    @property
    def path(self) -> str:
        header = self.records[0]
        assert isinstance(header, Header)
        return header.text("path")

    @property
    def pushes(self) -> list[Pushed]:
        """All pushes that were not late, in order of arrival."""
        late = {one.ticket[:2] for one in self.every_order() if isinstance(one, Late)}
        facts = [record.fact for record in self.records if isinstance(record, Handed)]
        return [fact for fact in facts if fact.ticket[:2] not in late]

    def every_order(self) -> list[Order]:
        return [record.order for record in self.records if isinstance(record, Ordered)]

    @property
    def orders(self) -> list[Order]:
        """The decisions of the coordinator, in order; late pushes cause none."""
        return [one for one in self.every_order() if not isinstance(one, Late)]

    @property
    def superseded(self) -> list[SupersededRecord]:
        return [record for record in self.records if isinstance(record, SupersededRecord)]

    @property
    def notes(self) -> list[str]:
        return [record.text for record in self.records if isinstance(record, Noted)]

    @property
    def left(self) -> list[str]:
        """The ends of members that did not end by themselves."""
        return [
            record.reason
            for record in self.records
            if isinstance(record, Heard) and record.reason.startswith("killed")
        ]

    def used(self) -> list[Counter[int]]:
        """For each epoch, how often each position was used by an update."""
        leases = leases_of(self.every_order())
        rest = {
            record.fact.ticket[:2]: record.fact.kept + record.fact.unused
            for record in self.records
            if isinstance(record, Handed)
        }
        used: list[Counter[int]] = []
        for order in self.every_order():
            if isinstance(order, Apply | Retire):
                for ticket in order.tickets:
                    for lease in leases[ticket[:2]]:
                        while len(used) <= lease.epoch:
                            used.append(Counter())
                        if lease.id not in rest[ticket[:2]]:
                            used[lease.epoch].update(range(lease.start, lease.stop))
        return used

    def num_epochs_ended(self) -> int:
        return sum(isinstance(one, EpochEnd) for one in self.every_order())


def leases_of(orders: Iterable[Order]) -> dict[tuple[int, int], tuple[Lease, ...]]:
    """The leases granted for each member and serial; accumulation grants a ticket repeatedly."""
    leases: dict[tuple[int, int], tuple[Lease, ...]] = {}
    for order in orders:
        if isinstance(order, Grant):
            leases[order.ticket[:2]] = (*leases.get(order.ticket[:2], ()), *order.leases)
    return leases


def train(task: Task, folder: Path, **settings: Any) -> Run:
    """Train a task and check that no process is left behind."""
    return _launch(TaskProgram(task=task), folder, settings)


def run_script(
    script: Path, folder: Path, *args: str, has_ranks: bool = True, **settings: Any
) -> Run:
    """Run a script with its own loop."""
    program = ScriptProgram(path=str(script), args=args, has_ranks=has_ranks)
    return _launch(program, folder, settings)


def _launch(program: Program, folder: Path, settings: dict[str, Any]) -> Run:
    chosen = RunSettings(run_dir=str(folder / "run"), device="cpu", threads=1, **settings)
    with nothing_left():
        summary = launcher.launch_run(program, chosen, QuietObserver())
    assert summary is not None
    return Run(folder=folder / "run", summary=summary)


def named_memory() -> set[str]:
    """Named shared memory except torch's: Paceline has none.

    A loader's worker, maybe of a test beside this one, makes a segment under a name for a batch,
    and takes the name away at once; killed between the two it leaves the name.
    """
    return {one for one in os.listdir("/dev/shm") if not one.startswith("torch_")}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that no process started inside is alive afterwards, except kept fork servers.

    A process that is ending has a moment to do so.
    """
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = psutil.Process().children(recursive=True)
    if (spare := client.kept()) is not None:
        before.add(spare.pid)
    before.update(one.pid for one in forked.forkers)
    _, left = psutil.wait_procs([one for one in after if one.pid not in before], timeout=2.0)
    assert [one.as_dict(["pid", "ppid", "status", "cmdline"]) for one in left] == []


def assert_each_sample_once(run: Run, num_samples: int, epochs: int) -> None:
    """Every position of every epoch was used by exactly one update."""
    assert run.used() == [Counter(range(num_samples))] * epochs


@contextmanager
def same_arrivals(run: Run, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, an inline run gets pushes in the order of ``run``, from the same versions."""
    tickets = [fact.ticket for fact in run.pushes]
    engine = functools.partial(inline.InlineEngine, arrivals=tickets)

    with patch.context() as here:
        here.setattr(inline, "InlineEngine", engine)
        yield
