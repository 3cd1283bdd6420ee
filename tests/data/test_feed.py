"""Loader workers in a number of our choice give the batches of the user's own."""

from collections import Counter, UserDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, get_worker_info

from paceline.data.feed import (
    FedWorkers,
    Indices,
    _with_workers,
    apply,
    move,
    plain_batches,
    plain_sizes,
)
from paceline.events import Lease
from paceline.speed import Speed

DATA = TensorDataset(torch.arange(10.0))
CPU = torch.device("cpu")


class Unsaid:
    """A sampler that does not say how many it has."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def values(batches: object) -> list[list[float]]:
    return [batch[0].tolist() for batch in batches]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [-1, 0, 1])
def test_a_lone_worker_gets_the_same_batches_with_any_number_of_loader_workers(
    num_workers: int,
) -> None:
    def loader() -> DataLoader[object]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)

    result = plain_batches(loader(), CPU, Speed(loader_workers=num_workers))
    assert values(result) == values(loader())


def test_another_number_of_loader_workers_keeps_the_start_method() -> None:
    loader = DataLoader(DATA, num_workers=1, multiprocessing_context="fork")
    remade = plain_batches(loader, CPU, Speed(loader_workers=2))
    seen = [type(process).__name__ for process in remade._workers]  # type: ignore[attr-defined]
    assert seen == ["ForkProcess", "ForkProcess"]


def test_sizes_are_known_without_drawing() -> None:
    assert plain_sizes(DataLoader(DATA, batch_size=4)) == (10, 3)
    assert plain_sizes(DataLoader(DATA, batch_sampler=[[0, 1], [2]])) == (2, 2)
    few = RandomSampler(DATA, num_samples=6)
    assert plain_sizes(DataLoader(DATA, batch_size=4, sampler=few)) == (6, 2)
    assert plain_sizes(DataLoader(DATA, batch_size=4, sampler=Unsaid())) == (4, 1)


def test_requested_batches_arrive_in_order_without_cancelled_ones() -> None:
    workers = FedWorkers(DataLoader(DATA), num_workers=1, prefetch=2)
    leases = [Lease(number, 0, 2 * number, 2 * number + 2) for number in range(3)]
    requests = []
    for lease in leases:
        indices = Indices(range(lease.start, lease.stop))
        indices.seed = lease.id
        requests.append((lease, indices))
    workers.ask(requests)
    assert workers.take(leases[1])[0].tolist() == [2.0, 3.0]
    assert workers.take(leases[0]) is None
    assert workers.take(leases[2])[0].tolist() == [4.0, 5.0]
    workers.end_epoch()


def test_starved_loader_workers_prefetch_again() -> None:
    workers = FedWorkers(DataLoader(DATA), num_workers=1, prefetch=3)
    requests = []
    for number in range(6):
        indices = Indices([number])
        indices.seed = number
        requests.append((Lease(number, 0, number, number + 1), indices))
    workers.ask(requests[:1])
    workers.ask(requests[1:])
    assert len(workers._feed.ready) == 3  # the other three are with the worker
    results = [workers.take(lease)[0].tolist() for lease, _ in requests]
    assert results == [[float(number)] for number in range(6)]
    workers.close()


class Levelled(Dataset[int]):
    level = 0

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.level + index

    def __len__(self) -> int:
        return 10


def raise_level(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.level = 100


def test_get_worker_info_has_the_users_own_data_set() -> None:
    loader = DataLoader(Levelled(), num_workers=1, worker_init_fn=raise_level)
    workers, lease, indices = FedWorkers(loader, 1, 2), Lease(0, 0, 2, 4), Indices([2, 3])
    indices.seed = 0
    workers.ask([(lease, indices)])
    assert workers.take(lease).tolist() == [102, 103]
    workers.close()


# -- containers ------------------------------------------------------------------------------------


class Named(UserDict[str, Any]):
    """A mapping that is not a dict and has more than its items."""

    def __init__(self, items: dict[str, Any], name: str) -> None:
        super().__init__(items)
        self.name = name


class Fixed(list[Any]):
    def __init__(self, first: Tensor, other: Tensor) -> None:
        super().__init__([first, other])


def doubled(value: Any) -> Any:
    return apply(lambda tensor: 2 * tensor, value)


def test_tensors_are_changed_in_containers_of_any_type() -> None:
    tensor = torch.ones(())
    grouped = defaultdict(list, a=[tensor])
    result = doubled(grouped)
    assert (result, result["b"], grouped) == ({"a": [2.0], "b": []}, [], {"a": [1.0]})
    assert type(result) is defaultdict
    named = doubled(Named({"a": tensor}, "x"))
    assert (type(named), named.name, named["a"]) == (Named, "x", 2.0)
    counts = Counter(a=3)
    assert doubled(counts) == counts
    assert doubled(Fixed(tensor, tensor)) == [2.0, 2.0]
    assert list(doubled(torch.ones(2, 2).max(0))) != []


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 5), (3, 5), (0, None)])
def test_another_number_of_loader_workers_keeps_the_prefetch_factor(
    num_workers: int, prefetch: int | None
) -> None:
    data = TensorDataset(torch.arange(4))
    loader = DataLoader(data, num_workers=2, prefetch_factor=5)
    assert _with_workers(loader, num_workers).prefetch_factor == prefetch


def test_packed_sequences_move_and_keep_their_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = move(packed, torch.device("meta"), is_pinned=False)
    assert type(moved) is PackedSequence
    assert moved.data.is_meta
    assert moved.sorted_indices.is_meta
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
