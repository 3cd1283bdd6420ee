"""Samples that tell whether two workers hold the same data, without being fooled by chance."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.data.likeness import Likeness, are_others, digest_of, sample_digests


class Made(Dataset[Any]):
    """Samples that a function makes."""

    def __init__(self, make: Callable[[int], Any], num_samples: int = 9) -> None:
        self._make = make
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def likeness(make: Callable[[int], Any], **options: Any) -> list[Likeness]:
    return sample_digests(DataLoader(Made(make), **options))


def test_the_first_middle_and_last_samples_are_compared() -> None:
    assert [sample.number for sample in likeness(lambda index: index)] == [0, 4, 8]


def test_one_different_sample_is_found() -> None:
    mine = likeness(lambda index: torch.full((2,), index))
    theirs = likeness(lambda index: torch.full((2,), index + (index == 4)))
    assert are_others(mine, mine) is None
    assert are_others(mine, theirs) == 4


def test_random_numbers_of_the_known_generators_are_compared() -> None:
    def draw(index: int) -> Any:
        return random.random(), np.random.random(), torch.rand(2)

    first = likeness(draw)
    assert all(sample.times for sample in first)
    assert are_others(first, likeness(draw)) is None


@pytest.mark.parametrize("seed", range(200))
def test_samples_with_their_own_random_numbers_are_never_told_apart(seed: int) -> None:
    """A flip in half of all cases is the hardest: it often gives equal results."""
    first, second = random.Random(seed), random.Random(seed + 1000)
    mine = likeness(lambda index: (index, first.random() < 0.5))
    theirs = likeness(lambda index: (index, second.random() < 0.5))
    assert are_others(mine, theirs) is None


def test_slow_samples_must_all_differ_to_be_told_apart() -> None:
    def slow(*digests: str) -> list[Likeness]:
        return [Likeness(i, digest, 3) for i, digest in enumerate(digests)]

    assert are_others(slow("a", "b", "c"), slow("a", "x", "y")) is None
    assert are_others(slow("a", "b", "c"), slow("z", "x", "y")) == 0


def test_an_unreadable_sample_is_not_compared() -> None:
    results = likeness(lambda index: {4: 1, 8: 1}[index])
    assert [result.times > 0 for result in results] == [False, True, True]


def test_comparing_draws_nothing_from_the_scripts_generators() -> None:
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    likeness(lambda index: torch.rand(2) + random.random())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (np.zeros(2), np.ones(2)),
        ({"a": [1, 2.0]}, {"a": [1, 2.5]}),
        ((1, "x"), (1, "y")),
        (1, True),
        (None, 0),
    ],
    ids=str,
)
def test_different_contents_have_different_digests(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(one)
    assert digest_of(one) != digest_of(other)


def test_other_objects_count_by_their_type() -> None:
    assert digest_of(object()) == digest_of(object())
    sparse = torch.eye(2).to_sparse()
    assert digest_of(sparse) == digest_of(sparse * 2)


class Opened(Made):
    opened: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.opened[index]


def open_it(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = range(9)


def test_a_loader_worker_opens_the_data_set_with_worker_init_fn() -> None:
    data = Opened(lambda index: index)
    results = sample_digests(DataLoader(data, num_workers=1, worker_init_fn=open_it))
    assert all(result.times for result in results)
