"""The choice of the quickest batch size, and the report if none reached the target."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from paceline.bench import batch_choice, training
from paceline.bench.batch_choice import (
    BatchChoice,
    BatchSizeQuestion,
    Choices,
    _sizes,
    choices_json,
    compare_batch_sizes,
    draw_choices,
    render_choices,
)
from paceline.bench.training import Noise, Reached, TrainingRun, train_to
from paceline.errors import ConfigError
from tiny import TASK, samples

NOISE = Noise(
    squared={16: 6.0, 32: 3.5}, signal=1.0, trace=80.0,
    interval=(60.0, math.inf), draws=40,
)  # fmt: skip


def row(batch_size: int, *seconds: float | None) -> BatchChoice:
    runs = [Reached(samples_per_s=100.0, accuracy=0.9, updates=50, seconds=one) for one in seconds]
    return BatchChoice(batch_size=batch_size, learning_rate=0.1, runs=tuple(runs))


def choices(*rows: BatchChoice) -> Choices:
    question = BatchSizeQuestion(spec="softmax", device="cpu", target=0.8)
    return Choices(
        question=question, task="softmax", source="digits", own_batch_size=32, own_rate=0.1,
        noise=NOISE, rows=rows,
    )  # fmt: skip


def test_quickest_batch_size_reached_the_target_with_every_seed() -> None:
    result = choices(row(16, 3.0, 5.0), row(32, 1.0, None), row(64, 4.5))
    assert result.quickest is not None
    assert result.quickest.batch_size == 16
    text = "\n".join(render_choices(result))
    assert "quickest     --batch-size 16 --lr 0.1" in text
    assert "1 of 2 seeds" in text


def test_report_says_when_no_batch_size_reached_the_target() -> None:
    result = choices(row(16, None))
    assert result.quickest is None
    assert "no batch size reached the target" in "\n".join(render_choices(result))


def test_only_noise_is_shown_without_training_runs() -> None:
    text = "\n".join(render_choices(replace(choices(), noise=NOISE)))
    assert "80 samples (95 %: 60 to infinitely many" in text
    assert "samples/s" not in text


def test_task_diverging_before_its_noise_is_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = replace(NOISE, signal=math.nan)
    monkeypatch.setattr(batch_choice, "noise_of", lambda *args, **kwargs: result)
    with pytest.raises(ConfigError, match="after 100 updates its gradients are not finite; use"):
        compare_batch_sizes(BatchSizeQuestion(spec="quadratic", device="cpu"), lambda text: None)


@pytest.mark.parametrize(
    ("own", "asked", "found"),
    [(32, (), [8, 16, 32, 60]), (4, (), [1, 2, 4, 8, 16]), (4, (60, 5, 60), [5, 60])],
    ids=["few samples", "many", "named"],
)
def test_batch_sizes_are_limited_by_the_data(
    own: int, asked: tuple[int, ...], found: list[int]
) -> None:
    question = BatchSizeQuestion(spec="softmax", device="cpu", target=0.8, batch_sizes=asked)
    assert _sizes(question, own, 60) == found
    with pytest.raises(ConfigError, match="--batch-sizes 61: softmax has 60 samples to train on"):
        _sizes(replace(question, batch_sizes=(5, 61)), own, 60)


def test_throughput_counts_only_samples_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 samples in batches of 40: every other update has 20; each takes a second here."""

    def a_second(work: Callable[[], object]) -> float:
        work()
        return 1.0

    monkeypatch.setattr(training, "elapsed_s", a_second)
    made = TrainingRun(TASK, samples(), "cpu", 40, 0.1, seed=0)
    reached = train_to(made, target=2.0, num_samples=60, epochs=2)
    assert reached.samples_per_s == 30.0
    whole = TrainingRun(TASK, samples(), "cpu", 100, 0.1, seed=0)
    assert train_to(whole, target=2.0, num_samples=60, epochs=2).samples_per_s == 60.0


def test_zero_gradient_has_no_noise() -> None:
    still = replace(NOISE, squared={16: 0.0, 32: 0.0}, signal=0.0, trace=0.0)
    result = replace(choices(), noise=still)
    assert "0%" in render_choices(result)[-1]
    assert choices_json(result)["noise_shares"] == {"16": 0.0, "32": 0.0}


def test_infinite_values_are_null_and_all_sizes_are_drawn() -> None:
    result = choices(row(64, 2.0))
    assert json.loads(json.dumps(choices_json(result)))["noise_scale_interval"] == [60.0, None]
    picture = ElementTree.fromstring(draw_choices(result))
    assert "64" in [element.text for element in picture.iter() if element.tag.endswith("text")]
