"""Scripts that differ in their data: samplers, batch samplers, data sets, collate functions, loader
workers, sizes that do not divide.

Longer than a file should be: one script after the other, each to be read by itself.
"""

import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

import paceline

from .base import SAMPLES, Record, Script, everywhere, several
from .usual import Numbered, loss_of, network, tensors


def trained_on(record: Record, loader: "DataLoader[Any]", *, has_length: bool = True) -> None:
    """The loop of the README over (vectors, classes, numbers), whose numbers are noted."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets, numbers in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                record.used(numbers)
        record.state(model)
    if has_length:
        record.fact(length=len(loader))
    record.state(model, optimizer)


def in_order(record: Record) -> None:
    """One sample after the other."""
    trained_on(record, DataLoader(Numbered(), batch_size=8))


def shuffled(record: Record) -> None:
    """shuffle=True."""
    trained_on(record, DataLoader(Numbered(), batch_size=8, shuffle=True))


def own_generator(record: Record) -> None:
    """shuffle=True with a generator of its own."""
    generator = torch.Generator().manual_seed(11)
    trained_on(record, DataLoader(Numbered(), batch_size=8, shuffle=True, generator=generator))


def with_replacement(record: Record) -> None:
    """RandomSampler with replacement: samples that come twice."""
    data = Numbered()
    sampler = RandomSampler(data, replacement=True, num_samples=48)
    trained_on(record, DataLoader(data, batch_size=8, sampler=sampler))


def weighted(record: Record) -> None:
    """WeightedRandomSampler."""
    sampler = WeightedRandomSampler([1.0 + one % 5 for one in range(SAMPLES)], 48)
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=sampler))


def random_subset(record: Record) -> None:
    """SubsetRandomSampler."""
    sampler = SubsetRandomSampler(range(8, 56))
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=sampler))


def subset(record: Record) -> None:
    """Subset of a data set."""
    trained_on(record, DataLoader(Subset(Numbered(), range(0, SAMPLES, 2)), batch_size=8))


def concatenated(record: Record) -> None:
    """ConcatDataset of two."""
    parts = ConcatDataset([Subset(Numbered(), range(24)), Subset(Numbered(), range(24, SAMPLES))])
    trained_on(record, DataLoader(parts, batch_size=8))


def split_by_a_generator(record: Record) -> None:
    """random_split with a generator."""
    generator = torch.Generator().manual_seed(42)
    train, _ = random_split(Numbered(), [48, 16], generator=generator)
    trained_on(record, DataLoader(train, batch_size=8))


def split_after_seeding(record: Record) -> None:
    """torch.manual_seed, then random_split, all before connect (in ``trained_on``)."""
    torch.manual_seed(42)
    train, _ = random_split(Numbered(), [48, 16])
    trained_on(record, DataLoader(train, batch_size=8))


class Backwards(Sampler[int]):
    """A user's own: from the end, without __len__ of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))

    def __len__(self) -> int:
        return SAMPLES


def own_sampler(record: Record) -> None:
    """A sampler of the user's own."""
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=Backwards()))


class ByPython(Sampler[int]):
    """A user's own, shuffled by a random.Random of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


def sampler_with_a_state(record: Record) -> None:
    """A sampler shuffled by its own random.Random(5)."""
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=ByPython(random.Random(5))))


def sampler_of_each_process(record: Record) -> None:
    """The same with a seed that each process has of its own, as an unseeded one would."""
    rng = random.Random(os.getpid())
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=ByPython(rng)))


def permuted_by_numpy(record: Record) -> None:
    """The order is drawn by numpy's default_rng() before the loader is made."""
    order = numpy.random.default_rng(5).permutation(SAMPLES)
    trained_on(record, DataLoader(Subset(Numbered(), order.tolist()), batch_size=8))


class Buckets(Sampler[list[int]]):
    """A user's own batches: of 4, 8, 12, ... samples."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in (4, 8, 12, 16, 24):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 5


def own_batches_of_samples(record: Record) -> None:
    """A batch sampler of the user's own, with batches of several sizes."""
    trained_on(record, DataLoader(Numbered(), batch_sampler=Buckets()))


def torch_batch_sampler(record: Record) -> None:
    """batch_sampler=BatchSampler(RandomSampler(...), drop_last=True)."""
    data = Numbered(60)
    batches = BatchSampler(RandomSampler(data), batch_size=8, drop_last=True)
    trained_on(record, DataLoader(data, batch_sampler=batches))


def batches_as_samples(record: Record) -> None:
    """batch_size=None with a BatchSampler as the sampler: the data set takes lists."""

    class Lists(Numbered):
        def __getitem__(self, index: Any) -> Any:
            return self.inputs[index], self.targets[index], torch.tensor(index)

    batches: Any = BatchSampler(SequentialSampler(range(SAMPLES)), batch_size=8, drop_last=False)
    trained_on(record, DataLoader(Lists(), sampler=batches, batch_size=None))


def rest_left_out(record: Record) -> None:
    """drop_last=True: 60 samples, batches of 8."""
    trained_on(record, DataLoader(Numbered(60), batch_size=8, drop_last=True))


def sizes_that_do_not_divide(record: Record) -> None:
    """61 samples in batches of 9: the parts of a batch differ in size."""
    trained_on(record, DataLoader(Numbered(61), batch_size=9))


def loader_worker(record: Record) -> None:
    """num_workers=1."""
    trained_on(record, DataLoader(Numbered(), batch_size=8, num_workers=1))


def persistent_worker(record: Record) -> None:
    """num_workers=1, persistent_workers=True, shuffled."""
    trained_on(
        record,
        DataLoader(Numbered(), 8, shuffle=True, num_workers=1, persistent_workers=True),
    )


class Batched(Numbered):
    """Fetches a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def whole_batches(record: Record) -> None:
    """A data set with __getitems__."""
    trained_on(record, DataLoader(Batched(), batch_size=8))


def own_collate(record: Record) -> None:
    """collate_fn: samples of several lengths are padded."""
    inputs, targets = tensors()
    rows = [(inputs[one, : 2 + one % 5], targets[one], one) for one in range(SAMPLES)]

    def pad(samples: list[Any]) -> Any:
        padded = torch.zeros(len(samples), 6, dtype=torch.float64)
        for row, (vector, _, _) in zip(padded, samples, strict=True):
            row[: len(vector)] = vector
        return (padded, *(torch.tensor([one[k] for one in samples]) for k in (1, 2)))

    trained_on(record, DataLoader(rows, batch_size=8, collate_fn=pad))


class Example(NamedTuple):
    """A sample by names."""

    inputs: Tensor
    target: Tensor
    number: int


def named_tuples(record: Record) -> None:
    """Samples are NamedTuples, and so are batches."""
    rows = [Example(*Numbered()[one]) for one in range(SAMPLES)]
    trained_on(record, DataLoader(rows, batch_size=8))


def dict_batches(record: Record) -> None:
    """Samples are dicts, the model takes keyword arguments (as Hugging Face's do)."""
    pace = paceline.connect()
    rows = [dict(zip(("x", "y", "number"), Numbered()[one], strict=True)) for one in range(64)]
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(rows, batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for batch in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(batch["x"]), batch["y"]).backward()
                optimizer.step()
                record.used(batch["number"])
    record.state(model, optimizer)


class Endless(IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[Any]:
        return (Numbered()[one] for one in range(SAMPLES))


def iterable(record: Record) -> None:
    """An iterable data set."""
    trained_on(record, DataLoader(Endless(), batch_size=8), has_length=False)


def distributed_sampler(record: Record) -> None:
    """DistributedSampler with this worker's number."""
    pace = paceline.connect()
    data = Numbered()
    sampler = DistributedSampler(data, num_replicas=pace.num_workers, rank=pace.worker)
    trained_on(record, DataLoader(data, batch_size=8, sampler=sampler))


def distributed_sampler_alone(record: Record) -> None:
    """What the twin of it has: one replica."""
    sampler = DistributedSampler(Numbered(), num_replicas=1, rank=0)
    trained_on(record, DataLoader(Numbered(), batch_size=8, sampler=sampler))


def shards_by_worker(record: Record) -> None:
    """Each worker takes its own shard of the data by hand."""
    pace = paceline.connect()
    mine = range(pace.worker, SAMPLES, pace.num_workers)
    trained_on(record, DataLoader(Subset(Numbered(), mine), batch_size=8))


def set_epoch_by_hand(record: Record) -> None:
    """A sampler with set_epoch, called by the loop."""

    class Rotated(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(one + 8 * self.epoch) % SAMPLES for one in range(SAMPLES)])

        def __len__(self) -> int:
            return SAMPLES

    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    sampler = Rotated()
    loader: Any = DataLoader(Numbered(), batch_size=8, sampler=sampler)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(3):
        sampler.set_epoch(epoch)
        for inputs, targets, numbers in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                record.used(numbers)
    record.state(model, optimizer)


class Cached(Dataset[Any]):
    """Counts how often a sample was read, in a cache of its own."""

    def __init__(self) -> None:
        self.inputs, self.targets = tensors()
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = (self.inputs[index], self.targets[index], index)
        return self.cache[index]


def cached(record: Record) -> None:
    """A data set that caches its samples."""
    trained_on(record, DataLoader(Cached(), batch_size=8))


class Scaled(DataLoader[Any]):
    """Halves what it gives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        for inputs, targets, numbers in super().__iter__():
            yield 0.5 * inputs, targets, numbers


def changed_by_its_loader(record: Record) -> None:
    """A class of loader whose __iter__ changes each batch."""
    trained_on(record, Scaled(Numbered(), batch_size=8))


class Passing(DataLoader[Any]):
    """Gives what it is given, as one that fetches ahead."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        for inputs, targets, numbers in super().__iter__():
            yield inputs.to("cpu"), targets.to("cpu"), numbers


def passed_on_by_its_loader(record: Record) -> None:
    """A class of loader whose __iter__ puts each batch on a device."""
    trained_on(record, Passing(Numbered(), batch_size=8))


UNEQUAL = "another order|order|differ|the same samples"

SCRIPTS = (
    Script(in_order),
    Script(shuffled, shuffles=True),
    Script(own_generator, shuffles=True),
    Script(with_replacement, shuffles=True, num_samples=48),
    Script(weighted, shuffles=True, num_samples=48),
    Script(random_subset, shuffles=True, num_samples=48),
    Script(subset, num_samples=32),
    Script(concatenated),
    Script(split_by_a_generator, num_samples=48),
    Script(split_after_seeding, num_samples=48),
    Script(own_sampler),
    Script(sampler_with_a_state),
    Script(sampler_of_each_process, is_repeatable=False, refused=several(UNEQUAL, is_sure=False)),
    Script(permuted_by_numpy),
    Script(own_batches_of_samples),
    Script(torch_batch_sampler, shuffles=True, num_samples=56),
    Script(batches_as_samples, refused=everywhere("batch_size=None", is_sure=False)),
    Script(rest_left_out, num_samples=56),
    Script(sizes_that_do_not_divide, num_samples=61),
    Script(loader_worker),
    Script(persistent_worker, shuffles=True),
    Script(whole_batches),
    Script(own_collate),
    Script(named_tuples),
    Script(dict_batches),
    Script(iterable),
    Script(
        distributed_sampler,
        like=distributed_sampler_alone,
        refused=several("DistributedSampler|" + UNEQUAL, is_early=True),
    ),
    Script(shards_by_worker, refused=several(UNEQUAL, is_early=True)),
    Script(set_epoch_by_hand),
    Script(cached),
    Script(changed_by_its_loader, refused=several("changes batches", is_early=True)),
    Script(passed_on_by_its_loader),
)
