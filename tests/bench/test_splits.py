"""Measured splits beside their predictions: results, report and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from paceline.bench import split_watch, splits
from paceline.bench.split_watch import ProcessWatch, read_watches
from paceline.bench.splits import LiveSplitsQuestion, SplitSample, command_of, measure_splits
from paceline.errors import ConfigError, Interrupted
from paceline.partition.prices import SplitPrice, SplitTable
from paceline.report.live_splits import draw_live_splits, render_live_splits
from paceline.report.splits import SplitReport

Say = Callable[[str], tuple[int, str, str]]
TASK = """
import torch
from torch import nn
from paceline import Splits, Task
from paceline.workloads.base import loss_metrics

def data():
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    return Splits(train=data, test=None, source="made up")

loss = nn.functional.cross_entropy
task = Task(
    name="three layers", model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)),
    loss=loss, data=data, learning_rate=0.1, batch_size=8, epochs=1, metrics=loss_metrics(loss),
)
"""
QUESTION = LiveSplitsQuestion(task="quadratic", workers=2, rounds=2, batch_size=8)


def price(name: str, step_s: float | None, why: str = "") -> SplitPrice:
    return SplitPrice(name=name, step_s=step_s, sent_bytes=64, memory_bytes=4096, why=why)


def fake_runs(monkeypatch: pytest.MonkeyPatch, steps_s: dict[str, float]) -> list[str]:
    """Replaces runs: one of two workers does 3/4 of the other's work; returns what ran."""
    prices = (
        price("none", 0.004), price("data", 0.003), price("network", None, "nine are odd"),
        price("2x2", 0.002),
    )  # fmt: skip
    table = SplitTable(prices=prices, advised=prices[3], reason="so")
    report = SplitReport(about=(("model", "a small one"),), table=table)
    ran: list[str] = []

    def run(question: LiveSplitsQuestion, split: str, batch_size: int) -> SplitSample:
        ran.append(split)
        step_s = steps_s[split]
        if step_s == 0.0:
            raise KeyboardInterrupt
        if step_s < 0.0:
            raise ConfigError(f"{split} is not possible")
        return SplitSample((step_s, 2 * step_s), (1024.0, 2048.0), (10.0, 5.0), (0.004, 0.003))

    monkeypatch.setattr(splits, "plan_splits", lambda question: report)
    monkeypatch.setattr(splits, "_run", run)
    return ran


def test_known_runs_are_listed_beside_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake_runs(monkeypatch, {"none": 0.010, "data": 0.020, "network": 0.030})
    result = measure_splits(QUESTION)
    assert ran == ["none", "data", "network", "data", "network", "none"]
    rows = {one.split: one for one in result.rows}
    assert rows["data"].steps_s == (0.020, 0.040) * 2
    assert rows["data"].step_s == pytest.approx(0.030)
    assert (rows["data"].memory_bytes, rows["data"].sent_bytes) == (2048.0, 10.0)
    assert rows["data"].balance == pytest.approx(3.5 / 4)
    assert rows["network"].predicted_step_s is None
    assert (rows["2x2"].steps_s, rows["2x2"].memory_bytes) == ((), None)
    assert (result.advised, result.fastest) == ("2x2", "none")
    lines = render_live_splits(result)
    row = next(line for line in lines if line.startswith("data"))
    assert row.split() == [
        "data", "30", "ms", "20", "ms", "to", "40", "ms", "3", "ms", "10", "B", "64", "B",
        "2.0", "KiB", "4.0", "KiB", "0.88", "1.00",
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("none")).endswith("fastest measured")
    assert next(line for line in lines if line.startswith("2x2")).endswith("advised, not run")
    assert "network: nine are odd" in lines
    assert any(line.startswith("2x2: split '2x2' is for 4 workers") for line in lines)
    assert lines[-1] == "advised: 2x2, which was not run; fastest measured: none"


def test_refused_run_gets_a_row_and_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = fake_runs(monkeypatch, {"none": 0.010, "data": -1.0, "network": 0.030})
    result = measure_splits(QUESTION)
    assert ran.count("data") == 1
    assert "data: data is not possible" in render_live_splits(result)
    ElementTree.fromstring(draw_live_splits(result))


def test_interrupt_returns_the_rows_measured_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, {"none": 0.010, "data": 0.0, "network": 0.030})
    with pytest.raises(Interrupted) as caught:
        measure_splits(QUESTION)
    assert caught.value.summary.fastest == "none"
    assert "interrupted in round 1 of 2: data" in render_live_splits(caught.value.summary)
    fake_runs(monkeypatch, {"none": 0.0})
    with pytest.raises(KeyboardInterrupt) as alone:
        measure_splits(QUESTION)
    assert not isinstance(alone.value, Interrupted)


def test_split_none_uses_one_worker_and_the_same_batch() -> None:
    by_name = {
        name: command_of(QUESTION, name, 64, Path("run")) for name in ("none", "network", "2x2")
    }
    for name, (workers, split) in {
        "none": ("1", "data"), "network": ("2", "network"), "2x2": ("2", "2x2")
    }.items():  # fmt: skip
        words = by_name[name]
        assert words[1:3] == ["-P", "-m"]  # a module in the folder of the run shadows none
        flags = dict(zip(words[6::2], words[7::2], strict=True))
        assert (flags["--workers"], flags["--split"]) == (workers, split)
        assert flags["--batch-size"] == "64"


def test_process_is_measured_from_its_third_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bytes of the measurement itself are not counted; the peak excludes earlier memory."""
    held, resets, written = [0], [0], [0]

    def reset(device: object) -> None:
        resets[0] += 1

    monkeypatch.setattr(split_watch, "reset_peak", reset)
    monkeypatch.setattr(split_watch, "peak_bytes", lambda device: held[0])
    monkeypatch.setattr(split_watch, "_written_bytes", lambda: written[0] + own())
    monkeypatch.setattr(split_watch, "time", SimpleNamespace(process_time=lambda: held[0] / 1000))

    def own() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))

    held[0] = 1000
    watch = ProcessWatch(tmp_path)
    watch.begin()
    for held[0] in (9000, 3000, 4000, 6000, 5000):
        written[0] += 200
        watch.note()
    assert resets[0] == 2
    memory, sent, busy = read_watches(tmp_path)
    assert memory == (5000.0,)
    assert sent == (200.0,)
    assert busy == (0.5,)


def test_bench_splits_runs_and_plots_a_split(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "three_layers.py").write_text(TASK)
    num_lines = list[int]()

    def read(folder: Path) -> tuple[tuple[float, ...], ...]:
        num_lines.extend(len(path.read_text().splitlines()) for path in folder.glob("*.jsonl"))
        return read_watches(folder)

    monkeypatch.setattr(splits, "read_watches", read)
    code, out, err = say(
        "bench splits three_layers:task -n 2 --only network --updates 8 --plot s.svg --json"
    )
    assert code == 0, err
    report = json.loads(out)
    (network,) = report["rows"]
    assert len(network["steps_s"]) >= 2 * 4
    assert min(network["steps_s"]) > 0
    assert num_lines == [8 - 2] * 2 * report["rounds"]  # one an update from both workers
    assert network["sent_bytes"] > 4 * 8 * 64 / 2  # at least half of the border
    assert 0 < network["balance"] <= 1
    assert network["memory_bytes"] > 0
    ElementTree.parse(tmp_path / "s.svg")
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline bench splits`")[1].split("\n## ")[0]
    for name in (*report, *network):
        assert f"`{name}`" in section, name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("quadratic -n 1", "--workers must be >= 2, got 1"),
        ("quadratic --updates 3", "--updates must be >= 6"),
        ("quadratic --rounds 0", "--rounds must be >= 1"),
        ("quadratik", "did you mean 'quadratic'"),
        ("quadratic --plot nowhere/splits.svg", "nowhere is not a folder"),
        ("softmax --only netwrok --batch-size 8", "did you mean 'network'"),
    ],
)
def test_invalid_input_gets_a_one_line_error(say: Say, flags: str, words: str) -> None:
    code, _, err = say(f"bench splits {flags}")
    assert code == 2
    assert words in err.splitlines()[-1]
