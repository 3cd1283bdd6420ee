"""A slow worker is named during the run and in its summary, with its cost."""

import functools
import io
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import RunSettings
from paceline.launch import launcher
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.terminal import render_summary
from tiny import TASK, samples


@pytest.mark.parametrize(
    ("protocol", "cost"),
    [("full-sync", "the others wait "), ("k-batch-async:2", "of the work of one of the others")],
)
def test_a_slow_worker_is_named_with_its_cost(tmp_path: Path, protocol: str, cost: str) -> None:
    settings = RunSettings(
        run_dir=str(tmp_path / "run"), workers=3, protocol=protocol, device="cpu", threads=1,
        delay=("20ms",), slow=("1=4x",), epochs=1,
    )  # fmt: skip
    task = replace(TASK, data=functools.partial(samples, 1200))
    text = io.StringIO()
    summary = launcher.launch_run(TaskProgram(task=task), settings, QuietObserver(text))
    assert summary is not None
    (note,) = [line for line in text.getvalue().splitlines() if "is slow" in line]
    assert note.startswith("note: worker 1 is slow: ")
    assert cost in note
    assert [worker.worker for worker in summary.slow_workers] == [1]
    assert any(line.startswith("slow ") for line in render_summary(summary))
