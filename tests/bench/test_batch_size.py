"""The largest batch is found for any limit, and for a real model within a given memory."""

import doctest
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import batch_size
from paceline.bench.batch_size import TOLERANCE, do_fit_together, largest_batch

Say = Callable[[str], tuple[int, str, str]]


@given(st.integers(0, 10_000), st.integers(1, 20_000))
def test_largest_batch_fits_and_slightly_more_does_not(limit: int, most: int) -> None:
    result = largest_batch(lambda batch: batch <= limit, most)
    assert result.fits <= limit
    if result.ends is None:
        assert result.fits == most
    else:
        assert result.ends > limit
        assert result.ends <= max(result.fits + 1, (1 + TOLERANCE) * result.fits)
    assert len(result.tried) == len(set(result.tried)) <= 32


def test_one_sample_is_tried_only_if_two_do_not_fit() -> None:
    """Batch norm cannot train on one."""
    assert 1 not in largest_batch(lambda batch: batch <= 40, most=1000).tried
    for limit in (0, 1):
        result = largest_batch(lambda batch, limit=limit: batch <= limit, most=1000)
        assert (result.fits, result.ends, result.tried) == (limit, limit + 1, (2, 1))


def test_doctests_pass() -> None:
    assert doctest.testmod(batch_size).failed == 0


@pytest.mark.timeout(600)
def test_found_batch_size_fits_and_a_tenth_more_does_not(say: Say) -> None:
    code, out, err = say("tune batch-size lenet --memory 400MiB --workers 2 --device cpu --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["mini_batch_size"] > 16
    assert report["does_not_fit"] <= 1.1 * report["mini_batch_size"]
    assert "memory" in err
    assert report["a_worker_bytes"] == 200 * 2**20  # for each of the two workers


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("batch", "does_fit"), [(4, True), (100_000, False)])
def test_fit_is_tested_with_all_workers_at_once(batch: int, does_fit: bool) -> None:
    arguments = {"spec": "lenet", "precision": "fp32", "device": "cpu", "threads": 1,
                 "limit_bytes": 200 * 2**20}  # fmt: skip
    assert do_fit_together(arguments, batch, 2) == does_fit


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tune batch-size lenet --batch-sizes 8,16", "--batch-sizes: only with --noise"),
        ("tune batch-size lenet --noise --seeds 5", "need --target-accuracy"),
        ("tune batch-size lenet --noise --most 8", "--most: not with --noise"),
        ("tune batch-size lenet --noise --plot no/x.svg", "no is not a folder"),
        ("tune batch-size lenet --memory lots", "must be a size such as 512MiB"),
        ("tune batch-size lenet --workers 0", "--workers and --most must be >= 1"),
        ("tune batch-size lenett --memory 1GiB", "did you mean 'lenet'"),
        ("tune batch-size lenet --precision fp16 --device cpu", "fp16 training needs a GPU"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
