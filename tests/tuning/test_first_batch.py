"""A trial loads its batch as the user's loader does, and the script does not notice."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from paceline.context import Context
from paceline.data.order import EpochOrder
from paceline.replica.seeding import kept_random_state
from paceline.tuning import fast
from subjects import SIZE, batch, subject

NUM_SAMPLES = 4 * SIZE


class Drawing(Dataset[Any]):
    """Samples that are changed at random, and note in which processes they were read."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        inputs, targets = batch()
        row = int(key) % SIZE
        return inputs[row] * random.random() + torch.rand(()), targets[row]

    def __len__(self) -> int:
        return NUM_SAMPLES


class Named(Drawing):
    """Samples that have names, and no known number."""

    def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(key, str):
            raise KeyError(key)
        return super().__getitem__(key)

    __len__ = None  # type: ignore[assignment]  # as of a class without one


class Names:
    """A sampler that notes how often it was drawn."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return iter([str(number) for number in range(NUM_SAMPLES)])


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fast, "CANDIDATES", ())


def settle(loader: "DataLoader[Any]") -> str:
    """The notes of a trial with this loader."""
    with kept_random_state():
        mine = subject()
    return " ".join(fast.settle(mine, loader, Context(), "auto").notes)


def test_random_numbers_of_the_script_are_those_without_a_trial() -> None:
    def drawn() -> tuple[float, Tensor]:
        return random.random(), torch.rand(3)

    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Drawing(), batch_size=SIZE, shuffle=True, generator=generator)
    random.seed(1)
    torch.manual_seed(1)
    expected, order = drawn(), generator.get_state()
    for _ in range(2):  # a trial, and its outcome remembered
        random.seed(1)
        torch.manual_seed(1)
        assert "measured" in settle(loader)
        actual = drawn()
        assert actual[0] == expected[0]
        assert torch.equal(actual[1], expected[1])
        assert torch.equal(generator.get_state(), order)


def test_loader_worker_reads_if_there_is_one() -> None:
    loader = DataLoader(data := Drawing(), batch_size=SIZE, num_workers=1)
    assert "measured in" in settle(loader)
    assert data.keys == []


def test_samples_are_those_of_the_sampler() -> None:
    names: Any = Names()
    data = Named()
    assert "measured in" in settle(DataLoader(data, batch_size=SIZE, sampler=names))
    assert data.keys[:SIZE] == [str(number) for number in range(SIZE)]
    assert names.times == 0


class Halves(BatchSampler):
    """A batch sampler of the user's own class, with batches of half the size."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(NUM_SAMPLES)), SIZE // 2, drop_last=False)


def test_own_batches_are_not_mixed() -> None:
    loader = DataLoader(Drawing(), batch_sampler=Halves())
    inputs, _ = fast._first_batch(loader, EpochOrder(loader, 0), SIZE)
    assert len(inputs) == SIZE // 2


def test_batch_that_cannot_be_loaded_is_noted() -> None:
    notes = settle(DataLoader(Named(), batch_size=SIZE, sampler=range(NUM_SAMPLES)))
    assert notes == "fast: not measured, the first batch could not be loaded: KeyError: 0"


class Shuffling:
    """A sampler that shuffles its own large list in place, and may refuse to be copied."""

    def __init__(self, *, can_be_copied: bool) -> None:
        self.order, self.can_be_copied = list(range(150_000)), can_be_copied

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shuffling":
        if not self.can_be_copied:
            raise TypeError("no copies")
        made = Shuffling(can_be_copied=True)
        made.order = memo.get(id(self.order)) or list(self.order)
        return made


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_a_look_leaves_the_scripts_sampler_as_it_is(can_be_copied: bool) -> None:
    sampler = Shuffling(can_be_copied=can_be_copied)
    data = range(150_000)
    order = EpochOrder(DataLoader(data, 4, sampler=sampler), seed=0)  # type: ignore[arg-type]  # a range has all that is asked
    assert len(order.look(4)) == 4
    assert sampler.order == list(data)
