"""Gradient noise of known size, and the effect of the batch size on a real task."""

import doctest
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from paceline.bench import training
from paceline.bench.training import measure_noise, scale_of, scaled_rate, unbiased

Say = Callable[[str], tuple[int, str, str]]


def test_doctests_pass() -> None:
    assert doctest.testmod(training).failed == 0


def test_known_noise_scale_is_recovered() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.full((100,), 0.1)  # |G|^2 = 1

    def gradient(count: int) -> Tensor:
        # tr(Sigma) = 100 * 0.8 = 80, so B_simple = 80
        return truth + torch.randn(100, generator=generator) * math.sqrt(0.8 / count)

    result = measure_noise(gradient, small=8, doublings=5, draws=100)
    assert result.scale == pytest.approx(80, rel=0.1)
    assert result.trace == pytest.approx(80, rel=0.05)
    low, high = result.interval
    assert low < result.scale < high < 1.5 * low
    for size in result.squared:
        assert result.measured_share(size) == pytest.approx(80 / (80 + size), abs=0.03)
    assert result.share(80) == pytest.approx(0.5, abs=0.03)


def test_signal_and_trace_estimates_are_unbiased() -> None:
    rng = random.Random(1)
    for _ in range(20):
        signal, trace, small = rng.uniform(0.1, 9), rng.uniform(0.1, 9), rng.randint(1, 50)
        big = small + rng.randint(1, 500)
        result = unbiased(small, signal + trace / small, big, signal + trace / big)
        assert result == pytest.approx((signal, trace))


def test_negative_signal_estimate_has_infinite_noise_scale() -> None:
    assert scale_of(-0.1, 3.0) == math.inf
    assert scale_of(2.0, 0.0) == 0.0


def test_rate_grows_with_the_batch_only_below_the_noise_scale() -> None:
    assert scaled_rate(0.1, 32, 64, scale=math.inf) == pytest.approx(0.2)
    assert scaled_rate(0.1, 32, 64, scale=1e9) == pytest.approx(0.2, rel=1e-6)
    assert scaled_rate(0.1, 32, 64, scale=0.0) == 0.1
    assert scaled_rate(0.1, 32, 32, scale=50.0) == pytest.approx(0.1)


def test_tune_batch_size_trains_to_the_target_and_plots(say: Say, tmp_path: Path) -> None:
    line = "tune batch-size tests_digits:task --noise --target-accuracy 0.7 --seeds 2 --after 5"
    (tmp_path / "tests_digits.py").write_text(
        "from paceline.data.fetch import Choice\n"
        "from paceline.workloads.images import softmax\n"
        "task = softmax(chooser=lambda name: Choice(name='digits'))\n"
    )
    code, out, err = say(f"{line} --batch-sizes 32,128 --device cpu --plot batch.svg --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["noise_scale"] is None or report["noise_scale"] > 1
    assert [row["batch_size"] for row in report["rows"]] == [32, 128]
    for row in report["rows"]:
        assert len(row["seconds"]) == 2
        assert all(seconds > 0 for seconds in row["seconds"])
        assert min(row["accuracy"]) >= 0.7
    assert report["rows"][0]["learning_rate"] == pytest.approx(0.1)
    picture = ElementTree.parse(tmp_path / "batch.svg")
    words = [element.text or "" for element in picture.iter() if element.tag.endswith("text")]
    assert "samples a batch" in words
    assert "samples a second" in words
    assert "128" in words
    assert "seconds of training to test accuracy 0.7" in words


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("softmax --plot x.svg", "--plot: only with --noise"),
        ("softmax --noise --target-accuracy 0.8 --batch-sizes 8,lots", "must be whole numbers"),
        ("softmax --noise --target-accuracy 0.8 --batch-sizes 0", "--batch-sizes must be >= 1"),
        ("softmax --noise --target-accuracy 85", "must be > 0 and <= 1, got 85"),
        ("softmax --noise --target-accuracy 0.8 --seeds 0", "--seeds >= 1"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(f"tune batch-size {line}")
    assert code == 2
    assert said in err
