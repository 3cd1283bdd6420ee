"""An epoch's order is drawn once, takes 8 bytes a position, and is finite."""

import copy
import itertools
import pickle
import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from paceline.data.order import EpochOrder
from paceline.errors import ConfigError


class Listed:
    """A sampler of these positions, which may claim another length."""

    def __init__(self, positions: Any, says: int | None = None) -> None:
        self._positions = positions
        self._says = says

    def __iter__(self) -> Iterator[Any]:
        return iter(self._positions)

    def __len__(self) -> int:
        if self._says is None:
            raise TypeError
        return self._says


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


class EndlessBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat([1, 2])


def order_of(**options: Any) -> EpochOrder:
    if "batch_sampler" not in options:
        options["batch_size"] = 2
    loader: DataLoader[Any] = DataLoader(range(8), **options)  # type: ignore[arg-type]
    return EpochOrder(loader, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": Endless()}, "the sampler Endless has no __len__ and gave more than"),
        ({"batch_sampler": EndlessBatches()}, "the batch sampler EndlessBatches has no __len__"),
        (
            {"sampler": Listed(itertools.count(), 8)},
            r"Listed has a __len__ of 8 samples and gave more",
        ),
        ({"sampler": Listed(range(8), 9)}, r"Listed has a __len__ of 9 samples and gave 8"),
        (
            {"sampler": RandomSampler(range(8), True, 10**12, torch.Generator())},
            "RandomSampler has 1,000,000,000,000 samples an epoch: at most",
        ),
    ],
    ids=["endless", "endless batches", "says too few", "says too many", "huge"],
)
def test_an_endless_order_is_refused_by_name(options: Any, words: str) -> None:
    order = order_of(**options)

    def begin() -> None:
        order.count()
        order.draw(0)

    with pytest.raises(ConfigError, match=words):
        begin()


def test_a_sampler_whose_epochs_differ_in_length_is_refused() -> None:
    positions = [0, 1, 2, 3]
    order = order_of(sampler=Listed(positions))
    assert order.count()[0] == 4
    order.draw(0)
    positions.append(4)
    with pytest.raises(ConfigError, match="Listed gave 5 samples for epoch 2, and 4 before"):
        order.draw(1)


def test_positions_take_eight_bytes_each() -> None:
    order = order_of(shuffle=True)
    order.draw(0)
    assert isinstance(order.indices, array)
    assert order.indices.itemsize == 8
    assert sorted(order.indices) == list(range(8))
    in_order = order_of()
    in_order.draw(0)
    assert in_order.indices == range(8)


@pytest.mark.parametrize(
    "positions",
    [["a", "b"], [torch.tensor(1), torch.tensor(0)], [(0, "left"), (1, "right")], [True, False]],
    ids=str,
)
def test_positions_of_other_types_are_kept_unchanged(positions: list[Any]) -> None:
    order = order_of(sampler=Listed(positions, len(positions)))
    order.draw(0)
    assert list(order.indices) == positions
    assert [type(index) for index in order.indices] == [type(one) for one in positions]


def test_drawing_leaves_every_generator_unchanged() -> None:
    own = torch.Generator().manual_seed(5)
    order = order_of(shuffle=True, generator=own)
    before = torch.get_rng_state(), own.get_state(), random.getstate()
    order.draw(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])
    assert random.getstate() == before[2]
    assert own.initial_seed() == 5


def test_the_digest_distinguishes_orders_and_batches() -> None:
    def digest(**options: Any) -> str:
        order = order_of(**options)
        order.draw(0)
        return order.fingerprint()

    assert digest() == digest() == digest(sampler=Listed(range(8), 8))
    assert digest() != digest(sampler=Listed(range(7, -1, -1), 8))
    pairs = digest(batch_sampler=Listed([[0, 1], [2, 3]], 2))
    assert pairs == digest(batch_sampler=Listed([[0, 1], [2, 3]], 2))
    assert pairs != digest(batch_sampler=Listed([[0], [1, 2, 3]], 2))


def test_a_sampler_with_replacement_is_drawn_only_as_far_as_needed() -> None:
    long = DataLoader(range(50), 4, sampler=RandomSampler(range(50), True, int(1e10)))
    short = DataLoader(range(50), 4, sampler=RandomSampler(range(50), True, 640))
    orders = [EpochOrder(loader, 3) for loader in (long, short, long)]
    assert orders[0].count() == (int(1e10), int(2.5e9))
    state = torch.get_rng_state()
    for order in orders:
        order.draw(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(orders[0].indices[:640]) == list(orders[1].indices)
    assert list(orders[0].indices[100_000:100_004]) == list(orders[2].indices[100_000:100_004])
    assert orders[0].fingerprint() == orders[2].fingerprint()
    orders[2].draw(2)
    assert orders[0].fingerprint() != orders[2].fingerprint()


def test_a_generator_inside_a_batch_sampler_is_seeded_and_restored() -> None:
    own = torch.Generator().manual_seed(5)
    order = order_of(batch_sampler=BatchSampler(RandomSampler(range(8), generator=own), 2, True))
    before = own.get_state()
    order.draw(1)
    first = list(order.indices)
    order.draw(2)
    assert list(order.indices) != first
    order.draw(1)
    assert list(order.indices) == first
    assert torch.equal(own.get_state(), before)


class Rotated(Listed):
    """A sampler that follows ``set_epoch``."""

    def __init__(self) -> None:
        super().__init__(range(8), 8)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(position + self.epoch) % 8 for position in range(8)])


class InPairs(Listed):
    """A batch sampler that tells the epoch to its sampler."""

    def __init__(self, sampler: Rotated) -> None:
        super().__init__([], 4)
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.sampler, 2, False))


def firsts(order: EpochOrder, *, says: Any = None) -> list[int]:
    """The first position of each of three epochs; ``says``: what the script does before each."""
    results = []
    for epoch in range(3):
        if says is not None:
            says(epoch)
        order.draw(epoch)
        results.append(order.indices[0])
    return results


class Growing:
    """A batch sampler that gives one batch more each time it is drawn."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.data = torch.utils.data.TensorDataset(torch.zeros(8))

    def __iter__(self) -> Iterator[list[int]]:
        self.num_drawn += 1
        return iter([[2 * batch, 2 * batch + 1] for batch in range(self.num_drawn)])


class Uncopyable(Growing):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not this one")


def test_counting_does_not_draw_the_users_sampler() -> None:
    sampler = Growing()
    order = order_of(batch_sampler=sampler)
    assert order.count() == (2, 1)
    assert [order.draw(epoch) for epoch in range(3)] == [[2], [2, 4], [2, 4, 6]]


def test_a_sampler_that_cannot_be_copied_is_counted_by_a_draw() -> None:
    sampler = Uncopyable()
    order = order_of(batch_sampler=sampler)
    assert order.count() == (2, 1)
    assert sampler.num_drawn == 1


def test_data_are_not_copied_with_a_sampler() -> None:
    sampler = Growing()
    copied: Any = order_of(batch_sampler=sampler)._copied()
    assert copied is not sampler
    assert copied.data is sampler.data


@pytest.mark.parametrize("length", [10, 10**6])
def test_small_tables_are_copied_with_a_sampler_and_large_ones_shared(length: int) -> None:
    sampler: Any = Growing()
    sampler.table, sampler.rows = [0] * length, torch.zeros(length)
    copied: Any = order_of(batch_sampler=sampler)._copied()
    assert (copied.table is sampler.table, copied.rows is sampler.rows) == (length > 10,) * 2


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_sampler_with_set_epoch_is_told_the_epoch(has_batches: bool) -> None:
    sampler = Rotated()
    options = {"batch_sampler": InPairs(sampler)} if has_batches else {"sampler": sampler}
    order = order_of(**options)
    order.count()
    assert firsts(order) == [0, 1, 2]


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_set_epoch_call_by_the_script_takes_precedence(has_batches: bool) -> None:
    sampler: Any = Rotated()
    told: Any = InPairs(sampler) if has_batches else sampler
    order = order_of(**{"batch_sampler" if has_batches else "sampler": told})
    order.count()
    assert firsts(order, says=lambda epoch: told.set_epoch(5 + epoch)) == [5, 6, 7]
    again = order_of(**{"batch_sampler" if has_batches else "sampler": told})
    again.count()
    assert firsts(again) == [7, 7, 7], "as plain PyTorch, which tells it nothing by itself"


def test_a_sampler_with_a_tracked_set_epoch_can_be_copied() -> None:
    sampler: Any = Rotated()
    order_of(sampler=sampler).count()
    other = pickle.loads(pickle.dumps(copy.deepcopy(sampler)))
    other.set_epoch(3)
    assert (other.epoch, sampler.epoch) == (3, 0)
