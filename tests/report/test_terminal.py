"""The terminal's text after a run is readable and correct."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.stats import SlowWorker
from paceline.report.summary import summarize
from paceline.report.terminal import describe_slow, render_summary
from paceline.report.text import format_duration
from resealing import reseal


def test_the_report_has_the_expected_text(run_dir: Path) -> None:
    lines = render_summary(summarize(run_dir))
    text = "\n".join(line.rstrip() for line in lines).replace(str(run_dir), "RUN")
    assert text.endswith(
        """\
test accuracy     0.8000
training loss     0.5 over the last updates
updates           3, 1.5 s each
samples           60, 13 a second
seconds an epoch  2.25
staleness         0.33 versions in the mean, median 0, 99 % within 1, at most 1
not used          1 push discarded, 1 push late, 20 samples dropped
abandoned         1 step, 250 ms thrown away, 750 ms saved
time in all       8.0 s
ended             finished

worker    pushes samples/s   compute    wait    push  abandoned
0              3        13      88 %     8 %     4 %        0 %
1              2         9      67 %    13 %     9 %       11 %

files: RUN
test acc: 0.80, 2.2 sec/epoch on ['cpu:0', 'cpu:1']"""
    )


def test_input_time_is_shown_beside_computing_time(run_dir: Path) -> None:
    summary = summarize(run_dir)
    first, second = summary.per_worker
    told = replace(summary, per_worker=(replace(first, input_s=1.25), second))
    head, row, other = (line.split() for line in render_summary(told)[-6:-3])
    assert head[3:7] == ["input", "compute", "wait", "push"]
    assert row[3:11] == ["50", "%", "38", "%", "8", "%", "4", "%"]
    assert other[3:7] == ["0", "%", "67", "%"]
    narrow = [line.split() for line in render_summary(told, columns=50)[-6:-3]]
    assert narrow[0] == ["worker", "pushes", "input", "compute", "wait", "push"]
    assert narrow[1][2:6] == ["50", "%", "38", "%"]


def test_a_worker_slow_by_its_input_is_described_as_such() -> None:
    by_input = SlowWorker(1, 0.040, 0.020, input_s=0.025, others_input_s=0.002)
    text = describe_slow(by_input, 0.5, 1.0)
    assert text == (
        "worker 1 is slow: 40 ms a step, the others 20 ms (2.0 times as long); its batches "
        "arrive after 25 ms, the others' after 2 ms; the others wait 50% of their time"
    )
    by_itself = by_input._replace(input_s=0.011)
    assert "batches" not in describe_slow(by_itself, 0.5, 1.0)


def test_waiting_is_the_cost_of_a_slow_worker_only_if_others_wait_for_it() -> None:
    """On a busy machine workers wait for each other's updates under any protocol."""
    slow = SlowWorker(1, 0.080, 0.020, input_s=0.0, others_input_s=0.0)
    assert describe_slow(slow, 0.31, 1.0).endswith("; the others wait 31% of their time")
    less = "; it does 25% of the work of one of the others"
    assert describe_slow(slow, 0.31, 0.27).endswith(less)
    assert describe_slow(slow, 0.02, 1.0).endswith(less)


def test_the_report_ends_with_untried_options(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert not any("--fast" in line for line in render_summary(summary))
    told = replace(summary, could_try=("channels last", "compile"))
    *_, hint, _, _ = render_summary(told)
    assert hint == "faster? --fast auto measures channels last, compile (at most 30 s, once)"


def test_the_curve_falls_from_the_largest_loss_to_the_least(run_dir: Path) -> None:
    lines = render_summary(summarize(run_dir))
    top, bottom = lines[0], lines[8]
    assert top.startswith("       2 |")
    assert bottom.startswith("     0.5 |")
    assert "*" in top
    assert "*" in bottom
    assert top.index("*") < bottom.index("*")
    assert sum(line.count("o") for line in lines[:9]) == 2
    assert lines[9].split() == ["0", "s", "6.5", "s"]
    assert "* training loss (left)   o test accuracy (right)" in lines[10]


def test_no_line_has_control_codes_or_is_wider_than_a_terminal(run_dir: Path) -> None:
    lines = render_summary(summarize(run_dir))
    assert all(line.isprintable() for line in lines)
    assert max(len(line) for line in lines if str(run_dir) not in line) <= 80


@pytest.mark.parametrize("columns", [80, 40])
def test_only_some_of_very_many_workers_are_shown(run_dir: Path, columns: int) -> None:
    summary = summarize(run_dir)
    worker = summary.per_worker[0]
    many = tuple(replace(worker, worker=i, pushes=i, input_s=1.25) for i in range(1000))
    lines = render_summary(replace(summary, per_worker=many, run_dir="RUN"), columns)
    assert "(fewest and most pushes of 1,000)" in lines
    assert len(lines) < 60
    assert max(map(len, lines[:-2])) <= columns


def test_a_run_without_updates_has_no_curve_and_dashes(
    run_dir: Path, cut: Callable[[int], None]
) -> None:
    cut(3)
    lines = render_summary(summarize(run_dir))
    assert lines[0] == "test accuracy     -"
    assert "ended             unknown: the trace was cut off" in lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-5, "20 us"),
        (0.0301, "30.1 ms"),
        (7.44, "7.4 s"),
        (123.2, "2 min 03 s"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations_have_readable_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_an_unfinished_epoch_is_shown_as_an_estimate(
    run_dir: Path, cut: Callable[[int], None]
) -> None:
    cut(7)
    lines = render_summary(summarize(run_dir))
    assert "seconds an epoch  2.00 at this pace (no epoch was finished)" in lines


def test_a_nearly_constant_loss_has_two_different_ends(run_dir: Path) -> None:
    path = run_dir / "trace.jsonl"
    text = path.read_text().replace('"loss":2.0', '"loss":0.5003')
    path.write_text(reseal(text.replace('"loss":1.0', '"loss":0.5001')))
    lines = render_summary(summarize(run_dir))
    assert (lines[0].split()[0], lines[8].split()[0]) == ("0.5003", "0.5")


@pytest.mark.parametrize("columns", [40, 62, 80, 200])
def test_no_line_is_wider_than_the_given_columns(columns: int, run_dir: Path) -> None:
    lines = render_summary(summarize(run_dir), columns)
    files = next(line for line in lines if line.startswith("files: "))
    assert max(len(line) for line in lines[:-1] if line != files) <= min(columns, 80)
    assert any("1 push discarded, 1" in line for line in lines)


def test_skipped_updates_are_shown(run_dir: Path) -> None:
    trace = run_dir / "trace.jsonl"
    trace.write_text(reseal(trace.read_text().replace('"finite":true', '"finite":false', 1)))
    assert summarize(run_dir).skipped_updates == 1
    assert "skipped           1 update: a gradient was not finite" in "\n".join(
        render_summary(summarize(run_dir))
    )
