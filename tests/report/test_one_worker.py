"""A run of one worker counts for a later run only with equal settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.events import Apply, Pushed, Ticket
from paceline.report.one_worker import ALIKE, OneWorker, find_one_worker
from paceline.report.summary import summarize
from paceline.report.terminal import render_summary
from paceline.trace import FILE_NAME, Trace

HEADER: dict[str, Any] = {
    "program": "task made-up", "model": "abc", "source": "made up", "mini_batch_size": 4,
    "accumulate": 1, "machine": "a processor", "device": "cpu", "cores": 2, "threads": 1,
    "rounding": [], "engine": "local", "delay": [], "slow": [],
}  # fmt: skip


def written(
    folder: Path,
    step_s: float,
    updates: int = 20,
    later: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A made-up run whose workers push together every ``step_s``; its header.

    Args:
        later: fields that differ when it is resumed, after all these updates.
    """
    folder.mkdir(parents=True)
    header: dict[str, Any] = {**HEADER, "workers": 1, **fields}
    trace = Trace(folder / FILE_NAME)
    trace.header(**header)
    add_updates(trace, header["workers"], step_s, range(updates))
    if later is not None:
        now = {**header, **later}
        trace.go_on(trace.mark(), updates * step_s, updates, now["workers"], now)
        add_updates(trace, now["workers"], step_s / 4, range(updates, 2 * updates))
    trace.close()
    return header


def add_updates(trace: Trace, num_workers: int, step_s: float, versions: range) -> None:
    workers = range(num_workers)
    for worker in workers:
        trace.joined(0.0, worker, worker, 1)
    for version in versions:
        tickets = tuple(Ticket(worker, version, version) for worker in workers)
        for ticket in tickets:
            trace.pushed(Pushed(ticket, 4, 1.0, True, version * step_s), step_s, 0.0, 0.0)
        trace.order(Apply(tickets, tuple(1 / len(workers) for _ in workers)), version * step_s)


def test_efficiency_is_the_step_of_one_worker_over_each_ones_step(tmp_path: Path) -> None:
    written(tmp_path / "one", 0.010)
    mine = {**HEADER, "workers": 4}
    alone = find_one_worker(tmp_path / "four", mine)
    assert alone is not None
    assert (alone.step_s, alone.run) == (pytest.approx(0.010), "one")
    written(tmp_path / "four", 0.0125, workers=4, **alone.header())
    summary = summarize(tmp_path / "four")
    assert summary.scaling_efficiency is not None
    assert summary.scaling_efficiency.value == pytest.approx(0.8)
    (line,) = [line for line in render_summary(summary) if line.startswith("efficiency")]
    assert line.split(maxsplit=1)[1] == f"0.80 of one worker's 10 ms a step (run of {alone.day})"


def test_an_unknown_efficiency_is_not_shown(tmp_path: Path) -> None:
    assert find_one_worker(tmp_path / "four", {**HEADER, "workers": 4}) is None
    written(tmp_path / "four", 0.0125, workers=4)
    summary = summarize(tmp_path / "four")
    assert summary.scaling_efficiency is None
    assert not [line for line in render_summary(summary) if line.startswith("efficiency")]


@pytest.mark.parametrize("name", ALIKE)
def test_a_run_with_other_settings_does_not_count(tmp_path: Path, name: str) -> None:
    other: Any = ["bf16"] if name == "rounding" else 8 if name == "mini_batch_size" else "other"
    written(tmp_path / "one", 0.010, **{name: other})
    assert find_one_worker(tmp_path / "four", {**HEADER, "workers": 4}) is None


@pytest.mark.parametrize(
    "fields",
    [{"workers": 2}, {"engine": "inline"}, {"engine": "simulated"}, {"delay": ["10ms"]},
     {"slow": ["0=2x"]}, {"updates": 9}],
    ids=str,
)  # fmt: skip
def test_only_one_undisturbed_worker_counts(tmp_path: Path, fields: dict[str, Any]) -> None:
    written(tmp_path / "one", 0.010, **fields)
    assert find_one_worker(tmp_path / "four", {**HEADER, "workers": 4}) is None


def test_a_run_resumed_with_more_workers_counts_up_to_there(tmp_path: Path) -> None:
    written(tmp_path / "one", 0.010, later={"workers": 4})
    alone = find_one_worker(tmp_path / "four", {**HEADER, "workers": 4})
    assert alone is not None
    assert alone.step_s == pytest.approx(0.010)


@pytest.mark.parametrize("later", [{"workers": 2}, {"threads": 2}], ids=str)
def test_a_run_resumed_with_other_settings_has_no_efficiency(
    tmp_path: Path, later: dict[str, Any]
) -> None:
    alone = OneWorker(step_s=0.0125, run="one", day="2026-11-24")
    written(tmp_path / "four", 0.0125, workers=4, **alone.header(), later=later)
    assert summarize(tmp_path / "four").scaling_efficiency is None
    written(tmp_path / "same", 0.0125, workers=4, **alone.header(), later={})
    assert summarize(tmp_path / "same").scaling_efficiency is not None


def test_the_newest_run_counts_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    for number, step_s in enumerate((0.010, 0.020, 0.030)):
        written(tmp_path / f"run-{number}", step_s)
        os.utime(tmp_path / f"run-{number}" / FILE_NAME, (number, number))
    (tmp_path / "run-2" / FILE_NAME).write_text("nothing\n")
    (tmp_path / "latest").symlink_to("run-0")
    (tmp_path / "a file").touch()
    alone = find_one_worker(tmp_path / "four", {**HEADER, "workers": 4})
    assert alone is not None
    assert alone.run == "run-1"


def test_one_worker_and_inline_members_have_no_efficiency(tmp_path: Path) -> None:
    written(tmp_path / "one", 0.010)
    assert find_one_worker(tmp_path / "next", {**HEADER, "workers": 1}) is None
    inline = {**HEADER, "workers": 4, "engine": "inline"}
    assert find_one_worker(tmp_path / "next", inline) is None


def test_a_missing_folder_has_no_run_of_one_worker(tmp_path: Path) -> None:
    assert find_one_worker(tmp_path / "gone" / "four", {**HEADER, "workers": 4}) is None


def test_a_run_of_one_worker_goes_through_a_header_unchanged(tmp_path: Path) -> None:
    alone = OneWorker(step_s=0.0125, run="one", day="2026-11-24")
    written(tmp_path / "four", 0.0125, workers=4, **alone.header())
    result = summarize(tmp_path / "four").scaling_efficiency
    assert result is not None
    assert (result.one_worker_run, result.one_worker_day) == ("one", "2026-11-24")
