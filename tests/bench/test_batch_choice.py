"""Which batch size is the quickest, and what is said where none reached the target."""

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from paceline.bench import batch_choice
from paceline.bench.batch_choice import (
    BatchChoice,
    Choices,
    Wish,
    choices_json,
    compare_batch_sizes,
    draw_choices,
    render_choices,
)
from paceline.bench.training import Noise, Reached
from paceline.errors import ConfigError

NOISE = Noise(
    squared={16: 6.0, 32: 3.5}, signal=1.0, trace=80.0,
    interval=(60.0, math.inf), draws=40,
)  # fmt: skip


def row(batch_size: int, *seconds: float | None) -> BatchChoice:
    runs = [Reached(samples_per_s=100.0, accuracy=0.9, updates=50, seconds=one) for one in seconds]
    return BatchChoice(batch_size=batch_size, learning_rate=0.1, runs=tuple(runs))


def choices(*rows: BatchChoice) -> Choices:
    wish = Wish(spec="softmax", device="cpu", target=0.8)
    return Choices(
        wish=wish, task="softmax", source="digits", own_batch_size=32, own_rate=0.1, noise=NOISE,
        rows=rows,
    )  # fmt: skip


def test_the_quickest_reached_the_target_with_every_seed() -> None:
    found = choices(row(16, 3.0, 5.0), row(32, 1.0, None), row(64, 4.5))
    assert found.quickest is not None
    assert found.quickest.batch_size == 16
    text = "\n".join(render_choices(found))
    assert "quickest     --batch-size 16 --lr 0.1" in text
    assert "1 of 2 seeds" in text


def test_where_none_reached_it_that_is_said() -> None:
    found = choices(row(16, None))
    assert found.quickest is None
    assert "no batch size reached the target" in "\n".join(render_choices(found))


def test_without_trainings_the_noise_alone_is_shown() -> None:
    text = "\n".join(render_choices(replace(choices(), noise=NOISE)))
    assert "80 samples (95 %: 60 to infinitely many" in text
    assert "samples/s" not in text


def test_a_task_that_diverges_before_its_noise_is_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = replace(NOISE, signal=math.nan)
    monkeypatch.setattr(batch_choice, "noise_of", lambda *args, **kwargs: found)
    with pytest.raises(ConfigError, match="after 100 updates its gradients are not finite; give"):
        compare_batch_sizes(Wish(spec="quadratic", device="cpu"), lambda text: None)


def test_what_is_infinite_is_null_and_all_sizes_are_drawn() -> None:
    found = choices(row(64, 2.0))
    assert json.loads(json.dumps(choices_json(found)))["noise_scale_interval"] == [60.0, None]
    picture = ElementTree.fromstring(draw_choices(found))
    assert "64" in [one.text for one in picture.iter() if one.tag.endswith("text")]
