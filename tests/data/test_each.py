"""Batches gathered a few at a time equal those fetched one by one."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data import loader as module
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.data.loader import LeasedLoader
from paceline.events import Lease

_LINE = 64


def leased(*, is_plain: bool = True, width: int = 5) -> LeasedLoader:
    inputs = torch.arange(40 * width, dtype=torch.uint8).view(40, width)
    data = ArrayDataset(inputs, torch.arange(40))
    collate = {"collate_fn": collate_batch} if is_plain else {}
    made = LeasedLoader(
        DataLoader(data, batch_size=8, shuffle=True, **collate), 3, torch.device("cpu")
    )  # type: ignore[arg-type]
    made.order.draw(0)
    return made


def cut(*sizes: int) -> list[Lease]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = zip(starts, sizes, strict=True)
    return [Lease(i, 0, start, start + size) for i, (start, size) in enumerate(places)]


def with_draws(batches: Iterable[Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each batch, and what a step would draw after it."""
    return [(inputs, targets, torch.rand(3)) for inputs, targets in batches]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("sizes", [(8,), (8, 8, 8), (7, 7, 7, 7), (8, 8, 3)], ids=str)
@pytest.mark.parametrize("at_once", [1, 300, 1 << 20], ids=["one", "two", "all"])
def test_batches_gathered_together_equal_single_ones_with_the_same_random_state(
    is_plain: bool, sizes: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GATHERED_BYTES", at_once)
    loader = leased(is_plain=is_plain)
    alone = with_draws(map(loader.fetch, cut(*sizes)))
    together = with_draws(loader.each(cut(*sizes)))
    assert len(together) == len(sizes)
    for these, those in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def test_a_batch_starts_at_a_cache_line_and_may_be_changed() -> None:
    factor = torch.ones((), requires_grad=True)
    for inputs, targets in leased(width=3).each(cut(7, 7, 7)):
        assert inputs.data_ptr() % _LINE == targets.data_ptr() % _LINE == 0
        inputs.mul_(factor).sum().backward()


def test_no_more_is_gathered_at_a_time_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GATHERED_BYTES", 2 * 8 * 5 * 4)
    sizes: list[int] = []
    gathered = LeasedLoader._gathered

    def counted(self: LeasedLoader, leases: list[Lease]) -> object:
        sizes.append(len(leases))
        return gathered(self, leases)

    monkeypatch.setattr(LeasedLoader, "_gathered", counted)
    list(leased().each(cut(8, 8, 8, 8, 8)))
    assert sizes == [2, 2, 1]


def test_without_a_seed_no_generator_is_seeded() -> None:
    torch.manual_seed(1)
    draws = [torch.rand(3) for _ in leased().each(cut(8, 8), is_seeded=False)]
    torch.manual_seed(1)
    assert [torch.equal(draw, torch.rand(3)) for draw in draws] == [True, True]
