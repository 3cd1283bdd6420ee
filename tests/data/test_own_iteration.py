"""A loader class is refused if its iteration changes batches, and only then."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from paceline.data.own_iteration import refuse_own_iteration
from paceline.errors import ConfigError

DATA = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))


class Normalised(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        for inputs, targets in super().__iter__():
            yield (inputs - 0.5) / 0.25, targets


class InPlace(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        for batch in super().__iter__():
            batch[0].mul_(2.0)
            yield batch


class Pairs(DataLoader[Any]):
    """Two batches become one."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        batches = super().__iter__()
        yield from zip(batches, batches, strict=False)


class Filtered(DataLoader[Any]):
    """As loaders of graphs make their batches."""

    def _get_iterator(self) -> Any:
        return ({"inputs": inputs} for inputs, _ in super()._get_iterator())


class FetchesAhead(DataLoader[Any]):
    """As with prefetch_generator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        taken: queue.Queue[Any] = queue.Queue(2)

        def fetch() -> None:
            for batch in super(FetchesAhead, self).__iter__():
                taken.put(batch)
            taken.put(None)

        threading.Thread(target=fetch, daemon=True).start()
        while (batch := taken.get()) is not None:
            yield batch


class ToDevice(DataLoader[Any]):
    """Puts batches on a device, and counts its passes."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        self.passes += 1
        for batch in super().__iter__():
            yield tuple(tensor.to("cpu", copy=True) for tensor in batch)


class Within(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class FromElsewhere(DataLoader[Any]):
    """Iterates over another loader."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        return iter(DataLoader(DATA, batch_size=3))


class Asking(DataLoader[Any]):
    """Fails in a simulated pass."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as scripts write it
        raise AttributeError("client")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("nobody reads it")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Normalised, InPlace, Pairs, Filtered])
def test_a_loader_class_that_changes_batches_is_refused(
    kind: type[DataLoader[Any]], num_workers: int
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.\w+ changes batches"):
        refuse_own_iteration(kind(DATA, batch_size=4, shuffle=True, num_workers=num_workers))


@pytest.mark.parametrize("kind", [DataLoader, FetchesAhead, ToDevice, Within])
def test_a_loader_class_that_keeps_batches_is_accepted(kind: type[DataLoader[Any]]) -> None:
    loader = kind(DATA, batch_size=4, shuffle=True)
    torch.manual_seed(1)
    assert refuse_own_iteration(loader) == []
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert len(list(loader)) == 3
    assert vars(loader).get("passes", 1) == 1
    by_samples = kind(DATA, batch_size=None, sampler=SequentialSampler(DATA))
    assert refuse_own_iteration(by_samples) == []


@pytest.mark.parametrize("kind", [FromElsewhere, Asking])
def test_a_loader_class_that_cannot_be_judged_gives_a_note(kind: type[DataLoader[Any]]) -> None:
    [note] = refuse_own_iteration(kind(DATA, batch_size=4))
    assert note.startswith(f"{kind.__name__}.__iter__ is not called")


def test_a_stream_is_not_read_for_the_check() -> None:
    [note] = refuse_own_iteration(Normalised(Stream(), batch_size=4))
    assert note.startswith("Normalised.__iter__ is not called")
