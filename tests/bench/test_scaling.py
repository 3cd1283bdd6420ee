"""Scaling over real workers, the report for known times, and invalid options."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.bench import scaling
from paceline.bench.scaling import (
    STRONG,
    WEAK,
    ScalingCase,
    ScalingQuestion,
    ScalingSample,
    cases,
    draw_scaling,
    measure_scaling,
    read_sample,
    render_scaling,
)
from paceline.errors import ConfigError, Interrupted
from paceline.events import Apply, EpochEnd, Pushed, Ticket
from paceline.report.chart import Curve
from paceline.trace import FILE_NAME, Trace

Say = Callable[[str], tuple[int, str, str]]
QUESTION = ScalingQuestion(task="quadratic", workers=(2, 4), batch_size=8, rounds=2, updates=10)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sample(step_s: float, workers: int, mini_batch_size: int) -> ScalingSample:
    """A sample of workers that always finish at the same time."""
    return ScalingSample(workers * mini_batch_size / step_s, 1.0 / step_s, (step_s,) * 9)


def fake_measure(
    question: ScalingQuestion, steps_s: dict[str, float]
) -> Callable[..., ScalingSample]:
    """Replaces runs by the step time of a row's label; the second round is 10 % slower."""
    count = dict.fromkeys(steps_s, 0)

    def measure(
        asked: ScalingQuestion, case: ScalingCase, about: dict[str, str], keep: str | None
    ) -> ScalingSample:
        about.update(device="cpu", source="made up")
        count[case.label] += 1
        factor = 1.1 if count[case.label] == 2 else 1.0
        if steps_s[case.label] < 0:
            raise KeyboardInterrupt
        return sample(factor * steps_s[case.label], case.workers, case.mini_batch_size)

    return measure


STEPS_S = {
    "1 worker": 0.010, "2 workers, weak": 0.0125, "2 workers, strong": 0.00625,
    "4 workers, weak": 0.020, "4 workers, strong": 0.005,
}  # fmt: skip


def test_speedup_and_efficiency_follow_from_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is slow for all rows changes no ratio."""
    monkeypatch.setattr(scaling, "_measure", fake_measure(QUESTION, STEPS_S))
    monkeypatch.setattr(scaling, "num_cores", lambda: 2)
    messages: list[str] = []
    result = measure_scaling(QUESTION, messages.append)
    rows = {(one.kind, one.workers): one for one in result.rows}
    assert rows[WEAK, 2].efficiencies == pytest.approx((0.8, 0.8))
    assert rows[WEAK, 2].speedups == pytest.approx((1.6, 1.6))
    assert rows[STRONG, 2].speedups == pytest.approx((1.6, 1.6))
    assert rows[STRONG, 4].efficiencies == pytest.approx((0.5, 0.5))
    assert rows[STRONG, 4].p95_step_s == pytest.approx(0.00525)  # the median of the two rounds
    assert (rows[STRONG, 4].mini_batch_size, rows[WEAK, 4].mini_batch_size) == (2, 8)
    lines = render_scaling(result)
    row = next(line for line in lines if line.startswith("2 workers, weak"))
    assert row.split()[3:] == [
        "8", "1,222", "1.60", "0.800", "0.800", "to", "0.800", "13.1", "ms", "13.1", "ms", "76.4"
    ]  # fmt: skip
    assert "4 or more workers share 2 cores: their efficiency shows" in " ".join(lines)
    assert "runs of more workers with --mini-batch-size 8" in lines[-1]
    assert lines[:-1] == [
        line.replace("inline", "local") for line in render_scaling(replace(result, engine="inline"))
    ]
    assert len(messages) == 10
    assert messages[0].startswith("round 1 of 2: 1 worker: 800 samples/s")
    assert messages[5].startswith("round 2 of 2: 2 workers, weak")  # it starts with another row


def test_interrupt_returns_the_rows_measured_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = {**STEPS_S, "4 workers, weak": -1.0}
    monkeypatch.setattr(scaling, "_measure", fake_measure(QUESTION, stops))
    with pytest.raises(Interrupted) as caught:
        measure_scaling(QUESTION)
    result = caught.value.summary
    assert [(row.kind, row.workers) for row in result.rows] == [("", 1), (WEAK, 2), (STRONG, 2)]
    assert result.interrupted_in == "round 1 of 2: 4 workers, weak"
    assert render_scaling(result)[-1].startswith("interrupted in round 1 of 2")
    ElementTree.fromstring(draw_scaling(result))
    first = {**STEPS_S, "2 workers, weak": -1.0}
    monkeypatch.setattr(scaling, "_measure", fake_measure(QUESTION, first))
    with pytest.raises(KeyboardInterrupt) as alone:
        measure_scaling(QUESTION)
    assert not isinstance(alone.value, Interrupted)


def test_two_measurements_in_one_second_use_separate_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = fake_measure(QUESTION, STEPS_S)

    def kept(*arguments: object) -> ScalingSample:
        *_, folder = arguments
        if isinstance(folder, str):
            (Path(folder) / FILE_NAME).touch()
        return measure(*arguments)

    monkeypatch.setattr(scaling, "_measure", kept)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    runs = [measure_scaling(QUESTION).one_worker_run for _ in range(2)]
    assert runs == [f"runs/one-worker-quadratic-20260101-000000{end}" for end in ("", "-2")]
    assert all((tmp_path / run / FILE_NAME).is_file() for run in runs)


def test_measurement_without_a_run_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "_measure", fake_measure(QUESTION, {**STEPS_S, "1 worker": -1.0}))
    with pytest.raises(KeyboardInterrupt):
        measure_scaling(QUESTION)
    assert not list((tmp_path / "runs").iterdir())


def test_ideal_curve_is_a_multiple_of_one_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The axis of workers is logarithmic, so the curve is no straight line."""
    monkeypatch.setattr(scaling, "_measure", fake_measure(QUESTION, dict.fromkeys(STEPS_S, 0.010)))
    drawn: list[tuple[Curve, ...]] = []
    monkeypatch.setattr(
        scaling, "draw_chart", lambda title, words, parts: drawn.extend(p.curves for p in parts)
    )
    draw_scaling(measure_scaling(QUESTION))
    ideal, weak, strong = drawn[0]
    by_place = {point.t: point.value for point in ideal.points}
    for point in weak.points:  # equal steps: weak scaling is perfect
        assert by_place[point.t] == pytest.approx(point.value)
    assert [point.value for point in strong.points] == pytest.approx([weak.points[0].value] * 3)


def test_only_times_between_updates_of_warm_epochs_count(tmp_path: Path) -> None:
    trace = Trace(tmp_path / FILE_NAME)
    trace.header(workers=2, device="cpu", source="made up", num_samples=48, mini_batch_size=4)
    for worker in range(2):
        trace.joined(0.0, worker, worker, 1)
    t_s, version = 0.0, 0
    for epoch in range(2):
        for number in range(6):
            # The first updates of the run are slow, and so is what precedes an epoch.
            t_s += 1.0 if version < 3 or number == 0 else 0.010
            tickets = tuple(Ticket(worker, version, version) for worker in range(2))
            for ticket in tickets:
                trace.pushed(Pushed(ticket, 4, 1.0, True, t_s), 0.009, 0.0, 0.001)
            trace.order(Apply(tickets, (0.5, 0.5)), t_s)
            version += 1
        trace.order(EpochEnd(epoch, version), t_s)
    trace.close()
    about: dict[str, str] = {}
    result = read_sample(tmp_path, about)
    assert result.samples_per_s == pytest.approx(800.0)
    assert result.updates_per_s == pytest.approx(100.0)
    # The first two steps of each worker do not count; the third is still slow.
    assert max(result.steps_s) == pytest.approx(1.0)
    assert len(result.steps_s) == 2 * (4 + 5)
    assert about == {"device": "cpu", "source": "made up"}


def test_bench_scaling_measures_and_plots_workers(say: Say, tmp_path: Path) -> None:
    line = "bench scaling quadratic -n 1,2 --batch-size 8 --updates 20 --rounds 2"
    code, out, err = say(f"{line} --plot scaling.svg --json")
    assert code == 0, err
    report = json.loads(out)
    assert [(row["kind"], row["workers"]) for row in report["rows"]] == [
        ("", 1), (WEAK, 2), (STRONG, 2)
    ]  # fmt: skip
    assert [row["mini_batch_size"] for row in report["rows"]] == [8, 8, 4]
    for row in report["rows"]:
        assert len(row["samples_per_s"]) == 2
        assert min(row["samples_per_s"]) > 0 < row["step_s"] <= row["p95_step_s"]
    ElementTree.parse(tmp_path / "scaling.svg")
    assert (tmp_path / report["one_worker_run"] / FILE_NAME).is_file()
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline bench scaling`")[1].split("\n## ")[0]
    for field in (*report, *report["rows"][0]):
        assert f"`{field}`" in section, field
    # A run of two workers with the same mini-batch can now refer to that of one worker.
    code, out, err = say(
        "train quadratic --workers 2 --mini-batch-size 8 --threads 1 --updates 20 --json"
    )
    assert code == 0, err
    known = json.loads(out)["scaling_efficiency"]
    assert f"runs/{known['one_worker_run']}" == report["one_worker_run"]
    assert known["value"] > 0


def test_asynchronous_workers_each_make_as_many_steps_as_one_alone(say: Say) -> None:
    code, out, err = say(
        "bench scaling quadratic -n 2 --weak --protocol async --batch-size 4 --updates 12 "
        "--rounds 1 --engine inline --json"
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["kind"] for row in rows] == ["", WEAK]
    assert rows[1]["updates_per_s"] == pytest.approx(rows[1]["samples_per_s"][0] / 4, rel=1e-6)


def test_strong_scaling_divides_the_batch_among_workers() -> None:
    assert [one.mini_batch_size for one in cases(QUESTION, 9)] == [9, 9, 4, 9, 2]
    with pytest.raises(ConfigError, match="a batch of 3 has no sample for each of 4 workers"):
        cases(QUESTION, 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("quadratic -n 1", "write -n 1,2,4"),
        ("quadratic -n two", "--workers must be whole numbers such as 1,2,4, got 'two'"),
        ("quadratic --updates 3", "--updates must be >= 10"),
        ("quadratic --rounds 0", "--rounds must be >= 1"),
        ("quadratic --threads 0", "--threads must be >= 1"),
        ("quadratik", "did you mean 'quadratic'"),
        ("quadratic --plot nowhere/scaling.svg", "nowhere is not a folder"),
        ("quadratic -n 2,4 --protocol k-sync:3", "k-sync"),
        ("quadratic --engine torchrun", "use --engine local"),
        ("quadratic -n 8 --batch-size 4", "--batch-size"),
    ],
)
def test_invalid_input_gets_a_one_line_error(say: Say, flags: str, words: str) -> None:
    code, _, err = say(f"bench scaling {flags}")
    assert code == 2
    assert words in err.splitlines()[-1]
