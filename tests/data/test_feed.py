"""Loader workers that are ours in number give what the user's own would give."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from paceline.data.feed import FedWorkers, Indices, plain_batches, plain_sizes
from paceline.events import Lease
from paceline.speed import Speed

DATA = TensorDataset(torch.arange(10.0))
CPU = torch.device("cpu")


def values(batches: object) -> list[list[float]]:
    return [batch[0].tolist() for batch in batches]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [-1, 0, 1])
def test_alone_any_number_of_workers_gives_the_same_batches(num_workers: int) -> None:
    def loader() -> DataLoader[object]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)

    found = plain_batches(loader(), CPU, Speed(loader_workers=num_workers))
    assert values(found) == values(loader())


def test_another_number_of_workers_is_started_as_the_users_own_are() -> None:
    loader = DataLoader(DATA, num_workers=1, multiprocessing_context="fork")
    remade = plain_batches(loader, CPU, Speed(loader_workers=2))
    seen = [type(one).__name__ for one in remade._workers]  # type: ignore[attr-defined]
    assert seen == ["ForkProcess", "ForkProcess"]


def test_sizes_are_known_without_drawing() -> None:
    assert plain_sizes(DataLoader(DATA, batch_size=4)) == (10, 3)
    assert plain_sizes(DataLoader(DATA, batch_sampler=[[0, 1], [2]])) == (2, 2)
    few = RandomSampler(DATA, num_samples=6)
    assert plain_sizes(DataLoader(DATA, batch_size=4, sampler=few)) == (6, 2)


def test_what_was_asked_for_comes_in_its_order_and_what_was_taken_back_is_skipped() -> None:
    workers = FedWorkers(DataLoader(DATA), num_workers=1, prefetch=2)
    leases = [Lease(number, 0, 2 * number, 2 * number + 2) for number in range(3)]
    asked = []
    for lease in leases:
        indices = Indices(range(lease.start, lease.stop))
        indices.seed = lease.id
        asked.append((lease, indices))
    workers.ask(asked)
    assert workers.take(leases[1])[0].tolist() == [2.0, 3.0]
    assert workers.take(leases[0]) is None
    assert workers.take(leases[2])[0].tolist() == [4.0, 5.0]
    workers.end_epoch()
