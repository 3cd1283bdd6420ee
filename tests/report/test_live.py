"""The output of a running run suits its destination."""

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.plan import LayerParameters, Plan
from paceline.report.live import (
    Observer,
    PlainObserver,
    Progress,
    QuietObserver,
    WorkerProgress,
    format_progress,
)
from paceline.report.screen import ScreenObserver, draw
from paceline.report.summary import summarize

PLAN = Plan(
    task="lenet", source="Fashion-MNIST (60,000 + 10,000)", workers=2, device="cpu",
    engine="local", path="peers", protocol="full-sync", mini_batch_size=128,
    pushes_per_update=2, samples_per_update=256, updates_per_epoch=235, epochs=10,
    updates_total=2350, lr=0.2, num_parameters=112_000, update_bytes=896_000,
    shared_bytes=3_000_000, grain="between layers", notes=("accuracy stays low at first",),
)  # fmt: skip
PROGRESS = Progress(
    t=6.0, epoch=2, epochs=10, version=512, updates_total=2350, samples=131_072,
    samples_per_s=8912.4, loss=0.7312, eta_s=58.2,
    workers=(
        WorkerProgress(
            worker=0, state="training", pushes=512, samples_per_s=4456.0,
            compute_share=0.9, input_share=0.0, wait_share=0.05, push_share=0.05,
            mean_staleness=0.0,
        ),
        WorkerProgress(
            worker=1, state="gone", pushes=510, samples_per_s=4450.0,
            compute_share=0.4, input_share=0.0, wait_share=0.5, push_share=0.1,
            mean_staleness=1.5,
        ),
    ),
)  # fmt: skip


def play(observer: Observer, run_dir: Path) -> None:
    """A whole run, as an engine reports it."""
    observer.plan(PLAN)
    for t, version in ((1.0, 512), (6.0, 512), (7.0, 512), (12.0, 520), (18.0, 520)):
        observer.progress(dataclasses.replace(PROGRESS, t=t, version=version))
    observer.printed("from the script\nhalf a ")
    observer.printed("line")
    observer.note("worker 1 is gone")
    observer.evaluated(2, {"acc": 0.7412, "loss": 0.688})
    observer.finished(summarize(run_dir))
    observer.close()
    observer.close()


def test_a_pipe_gets_plain_lines_without_control_codes(run_dir: Path) -> None:
    out = io.StringIO()
    play(PlainObserver(out), run_dir)
    lines = out.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    progress = [line for line in lines if line.startswith("epoch 3/10")]
    later = dataclasses.replace(PROGRESS, version=520)
    # at 6 s and 12 s, not at each call; at 18 s nothing is new
    assert progress == [format_progress(PROGRESS), format_progress(later)]
    assert "half a line" in lines
    assert lines[lines.index("half a line") + 1] == "note: worker 1 is gone"
    assert "epoch 3: test acc 0.7412, test loss 0.6880" in lines
    assert lines[-1].startswith("test acc: 0.80")


@pytest.mark.parametrize("kind", ["a pipe", "a terminal"])
def test_a_watched_run_that_went_back_is_shown_from_there_on(kind: str) -> None:
    out = io.StringIO()
    observer: Observer = PlainObserver(out)
    if kind == "a terminal":
        observer = ScreenObserver(Console(file=out, force_terminal=True, width=100))
    for t, version in ((60.0, 512), (20.0, 100), (20.1, 101), (26.0, 102)):
        observer.progress(dataclasses.replace(PROGRESS, t=t, version=version))
    shown = [number in out.getvalue() for number in ("512/", "100/", "101/", "102/")]
    assert shown == [True, True, False, True]


def test_a_program_gets_nothing_on_standard_output(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = QuietObserver()
    play(observer, run_dir)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "from the script" in captured.err
    assert "worker 1 is gone" in captured.err
    assert observer.shown_plan == PLAN


def test_a_terminal_shows_plan_workers_bar_and_summary(run_dir: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    play(ScreenObserver(console), run_dir)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("K x m", "from the script", "half a line", "58.2 s left", "test acc: 0.80"):
        assert words in text


def test_a_terminal_shows_the_parameter_table_of_plain_output() -> None:
    row = LayerParameters("layer", "Linear", "3 x 4", 12, 12, 48)
    plan = dataclasses.replace(PLAN, parameter_table=(row,))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    ScreenObserver(console).plan(plan)
    assert isinstance(console.file, io.StringIO)
    assert plan.parameter_lines()
    assert all(line in console.file.getvalue() for line in plan.parameter_lines())


def test_the_live_table_has_a_row_for_each_worker() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(PROGRESS))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[2][:4] == ["0", "training", "512", "4,456"]
    assert lines[2][-1] == "##################+."
    assert lines[3][:4] == ["1", "gone", "510", "4,450"]
    assert lines[3][-1] == "########++.........."
    assert lines[4][-5:] == ["22", "%", "58.2", "s", "left"]


def test_input_has_a_column_where_it_takes_time() -> None:
    slow = dataclasses.replace(PROGRESS.workers[0], input_share=0.6)
    console = Console(file=io.StringIO(), width=110)
    console.print(draw(dataclasses.replace(PROGRESS, workers=(slow, PROGRESS.workers[1])), 110))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[1][4:8] == ["input", "compute", "wait", "push"]
    assert lines[2][4:8] == ["60", "%", "30", "%"]
    assert lines[2][-1] == "::::::::::::######+."
    assert lines[3][4:8] == ["0", "%", "40", "%"]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (40, ["worker", "pushes", "samples/s", "wait"]),
        (80, ["worker", "state", "pushes", "samples/s", "compute", "wait", "push", "staleness"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(
    columns: int, names: list[str]
) -> None:
    console = Console(file=io.StringIO(), width=columns)
    console.print(draw(PROGRESS, columns))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert names in [line.split() for line in text.splitlines()]
    assert "4,456" in text
    assert "\u2026" not in text  # rich's mark of a word that was cut


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 512 / 2350),
        ({"updates_total": None, "t": 20.0, "eta_s": 60.0}, 0.25),
        ({"updates_total": None, "eta_s": None}, 0.0),
    ],
)
def test_the_share_done_follows_from_updates_or_else_from_time(
    changes: dict[str, Any], share: float
) -> None:
    assert dataclasses.replace(PROGRESS, **changes).share_done == pytest.approx(share)


def test_a_progress_line_leaves_out_unknown_figures() -> None:
    unknown = dataclasses.replace(
        PROGRESS, epochs=None, updates_total=None, loss=math.nan, eta_s=None
    )
    assert format_progress(unknown) == "epoch 3  update 512  8,912 samples/s"
