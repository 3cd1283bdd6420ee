"""The summary of a run follows from its trace, number by number."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.events import Apply, EpochEnd, Grant, Lease, Pushed, Ticket
from paceline.report.files import write_report
from paceline.report.summary import CompressedBytes, Staleness, SupersededWork, summarize
from paceline.report.text import Point
from paceline.report.watch import WatchedRun
from paceline.trace import Trace, read_trace


def test_the_summary_names_the_settings_of_the_run(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert (summary.task, summary.protocol, summary.workers) == ("lenet", "async", 2)
    assert (summary.engine, summary.path) == ("local", "store")
    assert summary.devices == ("cpu:0", "cpu:1")
    assert (summary.ended, summary.run_dir) == ("finished", str(run_dir))


def test_rates_count_training_and_not_evaluation(run_dir: Path) -> None:
    summary = summarize(run_dir)
    trained_s = (3.5 - 1.0) + (7.0 - 5.0)
    assert summary.updates == 3
    assert summary.samples == 60
    assert summary.time_per_update_s == pytest.approx(trained_s / 3)
    assert summary.samples_per_s == pytest.approx(60 / trained_s)
    assert summary.seconds_per_epoch == pytest.approx(trained_s / 2)
    assert summary.total_s == 8.0


def test_staleness_is_the_lag_of_the_applied_gradient(run_dir: Path) -> None:
    assert summarize(run_dir).staleness_versions == Staleness(mean=1 / 3, p50=0, p99=1, max=1)


def test_lost_work_is_counted_by_its_fate(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert (summary.discarded_pushes, summary.late_pushes) == (1, 1)
    assert summary.superseded == SupersededWork(count=1, wasted_s=0.25, saved_s=0.75)
    assert summary.dropped_samples == 20  # the lease of the cancelled work is in no update


def test_each_worker_has_its_seconds(run_dir: Path) -> None:
    first, second = summarize(run_dir).per_worker
    assert (first.worker, first.members, first.pushes, first.samples) == (0, 1, 3, 60)
    assert (first.compute_s, first.wait_s, first.push_s) == pytest.approx((2.2, 0.2, 0.1))
    assert first.superseded_s == 0.0
    assert (second.compute_s, second.wait_s, second.push_s) == pytest.approx((1.5, 0.3, 0.2))
    assert second.superseded_s == 0.25


def resumed_run(folder: Path, *lives: dict[str, str | int]) -> Path:
    """A run of one worker, resumed with another header after every ten updates."""
    trace = Trace(folder / "trace.jsonl")
    for life, fields in enumerate(lives):
        if life:
            trace.go_on(trace.mark(), 10.0 * life, 10 * life, 1, fields)
        else:
            trace.header(**fields)
            trace.joined(0.0, 0, 0, 1)
        for version in range(10 * life, 10 * life + 10):
            ticket = Ticket(0, version, version)
            trace.pushed(Pushed(ticket, 4, 1.0, True, float(version)), 1.0, 0.0, 0.0)
            trace.order(Apply((ticket,), (1.0,)), float(version))
    trace.close()
    return folder


@pytest.mark.parametrize(("num_bad", "loss"), [(30, None), (2, 1.0), (0, 1.0)])
def test_a_run_that_diverged_has_no_loss_over_the_last_updates(
    num_bad: int, loss: float | None, tmp_path: Path
) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(workers=1)
    trace.joined(0.0, 0, 0, 1)
    for version in range(40):
        ticket, own = Ticket(0, version, version), 1.0 if version < 40 - num_bad else math.nan
        trace.pushed(Pushed(ticket, 4, own, True, float(version)), 1.0, 0.0, 0.0)
        trace.order(Apply((ticket,), (1.0,)), float(version))
    trace.close()
    summary, watched = summarize(tmp_path), WatchedRun()
    for record in read_trace(tmp_path / "trace.jsonl"):
        watched.add(record)
    assert summary.final_loss == loss
    assert math.isnan(watched.progress().loss) == (loss is None)
    assert len(summary.losses) == 40 - num_bad


def test_only_compressed_updates_count_as_such(tmp_path: Path) -> None:
    int8: dict[str, str | int] = {"compress": "int8", "plain_bytes": 100, "sent_bytes": 30}
    topk: dict[str, str | int] = {"compress": "topk:1%", "plain_bytes": 100, "sent_bytes": 2}
    none: dict[str, str | int] = {"compress": "none"}
    for number, (lives, result) in enumerate((
        ([int8], CompressedBytes(compressor="int8", plain_bytes=1000, sent_bytes=300)),
        ([int8, none], CompressedBytes(compressor="int8", plain_bytes=1000, sent_bytes=300)),
        ([none, int8], CompressedBytes(compressor="int8", plain_bytes=1000, sent_bytes=300)),
        ([none, int8, none, topk, int8],
         CompressedBytes(compressor="int8, topk:1%", plain_bytes=3000, sent_bytes=620)),
        ([none, none], None),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        assert summarize(resumed_run(folder, *lives)).compressed == result


def test_epochs_have_loss_and_accuracy(run_dir: Path) -> None:
    first, second = summarize(run_dir).epochs
    assert (first.epoch, first.t, first.seconds, first.updates) == (1, 2.5, 2.5, 2)
    assert (first.loss, first.test_accuracy, first.test_loss) == (1.5, 0.6, 1.2)
    assert (second.epoch, second.loss, second.test_accuracy) == (2, 0.5, 0.8)


def test_an_epoch_keeps_an_accuracy_that_a_later_evaluation_lacks(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(task="lenet", protocol="async", workers=1, num_samples=40, batch_size=20)
    trace.joined(0.5, 0, 0, 11)
    ticket = Ticket(0, 0, 0)
    trace.order(Grant(ticket, (Lease(0, 0, 0, 20),)), 1.0)
    trace.pushed(Pushed(ticket, 20, 2.0, True, 2.0), 0.8, 0.1, 0.1)
    trace.order(Apply((ticket,), (1.0,)), 2.0)
    trace.order(EpochEnd(0, 1), 3.5)
    trace.evaluated(4.0, 0, 1, {"acc": (6.0, 10.0), "loss": (12.0, 10.0)})
    trace.evaluated(4.5, 0, 1, {"perplexity": (90.0, 10.0)})
    trace.close()
    (epoch,) = summarize(tmp_path).epochs
    assert (epoch.test_accuracy, epoch.test_loss) == (0.6, 1.2)


def test_the_last_accuracy_and_loss_count(run_dir: Path) -> None:
    summary = summarize(run_dir)
    assert (summary.test_accuracy, summary.final_loss) == (0.8, 0.5)
    assert summary.losses == (
        Point(t=1.0, value=2.0),
        Point(t=2.0, value=1.0),
        Point(t=5.0, value=0.5),
    )
    assert summary.accuracies == (Point(t=3.0, value=0.6), Point(t=6.5, value=0.8))


def test_the_last_line_has_the_form_of_the_chapter(run_dir: Path) -> None:
    line = summarize(run_dir).chapter_line()
    assert line == "test acc: 0.80, 2.2 sec/epoch on ['cpu:0', 'cpu:1']"


def test_an_interrupted_run_is_summarised_as_far_as_it_came(
    run_dir: Path, cut: Callable[[int], None]
) -> None:
    cut(7)  # up to the first update
    summary = summarize(run_dir)
    assert (summary.updates, summary.samples, summary.ended) == (1, 20, "")
    assert summary.test_accuracy is None
    assert summary.seconds_per_epoch == pytest.approx(2.0)  # 1 s for 20 of 40 samples


def test_a_run_without_an_update_has_no_rates(run_dir: Path, cut: Callable[[int], None]) -> None:
    cut(3)
    summary = summarize(run_dir)
    assert summary.updates == 0
    assert summary.time_per_update_s is None
    assert summary.samples_per_s is None
    assert summary.seconds_per_epoch is None
    assert summary.chapter_line() == "test acc: -, - sec/epoch on ['cpu:0', 'cpu:1']"


def test_a_respawned_worker_has_two_lives(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(workers=1)
    trace.joined(0.1, 0, 0, 11)
    trace.left(0.2, 0, "killed")
    trace.joined(0.3, 1, 0, 12)
    trace.close()
    (worker,) = summarize(tmp_path).per_worker
    assert (worker.worker, worker.members) == (0, 2)


def test_every_field_of_the_json_is_documented(run_dir: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*(names(item) for item in value.values()))
        if isinstance(value, list | tuple):
            return set().union(*(names(item) for item in value))
        return set()

    missing = {n for n in names(summarize(run_dir).to_json()) if f"`{n}`" not in page}
    assert not missing


def test_samples_per_second_keep_their_earlier_name_too(run_dir: Path) -> None:
    summary = summarize(run_dir)
    told = summary.to_json()
    assert told["samples_per_s"] == told["images_per_s"] == summary.images_per_s is not None


def test_the_files_of_a_run_can_be_made_again(run_dir: Path) -> None:
    summary = write_report(run_dir)
    written = json.loads((run_dir / "summary.json").read_text())
    assert written == json.loads(json.dumps(summary.to_json()))
    assert (run_dir / "curve.svg").read_text().startswith("<svg")
    assert {path.name for path in run_dir.iterdir()} == {"trace.jsonl", "summary.json", "curve.svg"}


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run found at .*gone"):
        summarize(tmp_path / "gone")
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is empty: the run ended before it had a plan"):
        summarize(tmp_path)
