"""Watching a run: its trace is followed as it grows, until the run or the watching ends."""

import errno
import fcntl
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from paceline.cli import app as command
from paceline.errors import ConfigError
from paceline.plan import Plan
from paceline.report.live import Progress, QuietObserver
from paceline.report.watch import WatchedRun, watch
from paceline.run_dir import is_at_work
from paceline.trace import Trace, read_header, read_trace
from paceline.trace.records import Evaluated, Header, Resumed
from runs import train


class Seen(QuietObserver):
    """Keeps what is reported to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown_plan: Plan | None = None
        self.told: list[Progress] = []
        self.tests: list[float] = []
        self.versions: list[int | None] = []
        """Of tests that were not at an epoch's end."""

    def progress(self, progress: Progress) -> None:
        self.told.append(progress)

    def evaluated(self, epoch: int, metrics: object, version: int | None = None) -> None:
        self.tests.append(dict(metrics)["acc"])  # type: ignore[call-overload]
        self.versions.append(version)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a run is at work."""
    folder = tmp_path / "held"
    folder.mkdir()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def grow(run_dir: Path, folder: Path, num_bytes: int) -> Iterator[None]:
    """Add this many bytes of the trace at each step, wherever lines end."""
    whole = (run_dir / "trace.jsonl").read_bytes()
    for start in range(0, len(whole), num_bytes):
        with open(folder / "trace.jsonl", "ab") as file:
            file.write(whole[start : start + num_bytes])
        yield
    (folder / "lock").unlink()
    yield


def add_lines(folder: Path, until: bytes) -> None:
    """Write a trace up to here, of which there may be a part."""
    with open(folder / "trace.jsonl", "ab") as file:
        file.write(until[file.tell() :])


def test_a_run_is_followed_to_its_end_line_by_line(run_dir: Path, held: Path) -> None:
    pieces, seen = grow(run_dir, held, 97), Seen()
    assert watch(held, seen, lambda: next(pieces))
    versions = [progress.version for progress in seen.told]
    assert versions == sorted(versions)
    assert {0, 1, 2, 3} <= set(versions)
    last = seen.told[-1]
    assert (last.samples, last.epoch, last.loss) == (60, 1, pytest.approx(3.5 / 3))
    assert [worker.pushes for worker in last.workers] == [3, 2]
    assert last.workers[1].mean_staleness == 0.5  # one of its two pushes was a version late
    assert seen.tests == [0.6, 0.8]


@pytest.mark.parametrize(
    ("fields", "updates_total", "left_s"),
    [
        ({"epochs": 3}, None, 4.5),  # 60 of 120 samples
        ({"epochs": 3, "updates_total": 4}, 4, 1.5),
        ({"epochs": 3, "updates_total": 4, "seconds": 8.0}, 4, 1.0),
        ({"epochs": 3, "updates_total": 4, "seconds": 60.0}, 4, 1.5),
        ({"order": "numbers", "num_samples": 0, "updates_total": 6}, 6, 4.5),
        ({"order": "numbers", "num_samples": 0}, None, None),
    ],
    ids=["samples", "updates", "seconds", "updates before seconds", "numbers", "nobody knows"],
)
def test_the_time_left_follows_from_the_end_that_comes_first(
    run_dir: Path, fields: dict[str, Any], updates_total: int | None, left_s: float | None
) -> None:
    """Three updates took 4.5 seconds of training, of the 7 since the first grant."""
    run = WatchedRun()
    for record in read_trace(run_dir / "trace.jsonl"):
        if isinstance(record, Header):
            run.add(Header(fields={**record.fields, **fields}))
        else:
            run.add(record)
    result = run.progress()
    assert result.updates_total == updates_total
    assert result.eta_s == (None if left_s is None else pytest.approx(left_s))


def test_a_resumed_run_is_measured_by_its_new_end(run_dir: Path) -> None:
    run = WatchedRun()
    for record in read_trace(run_dir / "trace.jsonl"):
        run.add(record)
    changes = {"updates_total": 9}
    run.add(Resumed(t_s=8.0, version=3, workers=2, lost=0, changes=changes))
    assert run.progress().updates_total == 9


def test_a_live_run_records_where_it_ends(tmp_path: Path) -> None:
    live = train(tiny.TASK, tmp_path, workers=2, updates=3, seconds=600.0, engine="inline")
    fields = read_header(live.folder / "trace.jsonl").fields
    assert (fields["updates_total"], fields["seconds"]) == (3, 600.0)


def test_an_evaluation_inside_an_epoch_is_shown_with_its_update(run_dir: Path) -> None:
    run, seen = WatchedRun(), Seen()
    for record in read_trace(run_dir / "trace.jsonl"):
        run.add(record)
        if isinstance(record, Evaluated):
            run.tell(record, seen)
            run.tell(replace(record, version=record.version - 1), seen)
    assert seen.versions == [None, 1, None, 2]


@pytest.mark.parametrize("num_logs", [0, 100], ids=["shorter", "longer again"])
@pytest.mark.parametrize("is_new", [False, True], ids=["cut off", "another file"])
def test_a_run_resumed_after_its_end_is_followed(
    is_new: bool, num_logs: int, run_dir: Path, held: Path
) -> None:
    path, seen, looks = held / "trace.jsonl", Seen(), list[int]()
    path.write_bytes((run_dir / "trace.jsonl").read_bytes())
    second = Trace(held / "second.jsonl")
    second.header(num_samples=40)
    second.joined(0.5, 0, 0, 11)
    second.evaluated(4.0, 0, 2, {"acc": (6.0, 10.0), "loss": (12.0, 10.0)})  # was told before
    second.evaluated(4.5, 0, 2, {"acc": (7.0, 10.0)})
    for number in range(num_logs):
        second.log(5.0, 0, {"x": float(number)})
    second.end(9.0, "finished")
    second.close()

    def go_on() -> None:
        looks.append(seen.told[-1].version)
        if len(looks) > 1:
            (held / "lock").unlink()
        elif is_new:
            second.path.replace(path)
        else:
            path.write_bytes(second.path.read_bytes())

    assert watch(held, seen, go_on)
    assert looks == [3, 0]
    assert seen.tests == [0.6, 0.8, 0.7]


def test_watching_ends_with_an_interrupted_run(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    lines = (run_dir / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "trace.jsonl").write_bytes(b"".join(lines[:8]) + lines[8][:10])
    seen = Seen()
    assert not watch(folder, seen, lambda: pytest.fail("nobody is at work there"))
    assert seen.told[-1].version == 1


def test_watching_ends_without_a_reader(
    run_dir: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    lines = (run_dir / "trace.jsonl").read_text().splitlines(keepends=True)
    (held / "trace.jsonl").write_text("".join(lines[:-1]))
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it goes on"))
    assert command.run(["watch", str(held)]) == 1


def test_a_missing_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run found at .*; runs are in runs/"):
        watch(tmp_path / "none", QuietObserver(), lambda: None)
    with pytest.raises(ConfigError, match=r"the trace .* cannot be read: No such file"):
        watch(tmp_path, Seen(), lambda: None)


def test_a_damaged_line_is_named(run_dir: Path) -> None:
    path = run_dir / "trace.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"samples":20', b'"samples":21', 1))
    with pytest.raises(ConfigError, match=r"damaged at .*trace.jsonl:\d+"):
        watch(run_dir, Seen(), lambda: None)


def test_a_run_at_work_is_recognized_without_locking(held: Path, tmp_path: Path) -> None:
    assert is_at_work(held)
    assert not is_at_work(tmp_path)
    (tmp_path / "lock").touch()
    assert not is_at_work(tmp_path)
    assert is_at_work(tmp_path, locks=tmp_path / "no such table")


def test_a_search_is_refused_with_the_trials_to_watch(held: Path) -> None:
    (held / "trace.jsonl").touch()
    (held / "trials.json").write_text('{"trials": []}')
    with pytest.raises(ConfigError, match="holds the trials of a script, each a run of its own"):
        watch(held, Seen(), lambda: None)


def test_a_trial_is_followed_while_its_search_is_at_work(run_dir: Path, held: Path) -> None:
    """The search alone has a lock, which it keeps for the trials after this one."""
    (held / "trials.json").write_text('{"trials": []}')
    trial, seen = held / "lr-1", Seen()
    trial.mkdir()
    whole = (run_dir / "trace.jsonl").read_bytes()
    pieces = iter([whole[:-200], whole, whole])
    assert watch(trial, seen, lambda: add_lines(trial, next(pieces)))
    assert seen.told[-1].samples == 60
    (held / "lock").unlink()
    (trial / "trace.jsonl").write_bytes(whole[:-200])
    assert not watch(trial, Seen(), lambda: pytest.fail("no process works on it"))


def test_a_lock_of_another_file_is_not_this_runs(held: Path, tmp_path: Path) -> None:
    number = next(path for path in held.iterdir() if "lock" in path.name).stat().st_ino
    locks = tmp_path / "locks"
    row = "1: FLOCK  ADVISORY  WRITE {} 08:02:{} 0 EOF\n"
    locks.write_text(row.format(4242, f"{number}1"))
    assert not is_at_work(held, locks)
    locks.write_text(row.format(number, 7))
    assert not is_at_work(held, locks), "that is the number of a process"
    locks.write_text(row.format(4242, number))
    assert is_at_work(held, locks)
