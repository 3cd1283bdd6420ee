"""The next batch is copied while this one is computed, and it is the right one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data.arrays import ArrayDataset, as_input, collate_batch
from paceline.data.feed import Arriving, Transfer
from paceline.data.loader import LeasedLoader
from paceline.events import Lease
from paceline.speed import Speed

CPU = torch.device("cpu")
LEASES = [Lease(n, 0, 4 * n, 4 * n + 4) for n in range(4)]


class Recorded(Transfer):
    """Notes when copies begin and finish."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def begin(self, host: Any) -> Arriving:
        self.words.append(f"begin {int(host[1][0])}")
        return Arriving(host, host, None)

    def finish(self, arriving: Arriving) -> Any:
        self.words.append(f"finish {int(arriving.batch[1][0])}")
        return arriving.batch


def data() -> ArrayDataset:
    images = torch.arange(16 * 9, dtype=torch.uint8).view(16, 1, 3, 3)
    return ArrayDataset(images, torch.arange(16))


def leased(transfer: Transfer | None) -> LeasedLoader:
    loader = DataLoader(data(), batch_size=4, collate_fn=collate_batch)
    made = LeasedLoader(loader, 0, CPU, Speed(ahead=True))
    made._transfer = transfer
    made._takes_bytes = transfer is not None
    made.order.draw(0)
    return made


def epoch(loader: LeasedLoader) -> list[tuple[Tensor, Tensor]]:
    """Every batch of four leases; the next one is known when one is computed."""
    batches = []
    for number, lease in enumerate(LEASES):
        loader.reserve(LEASES[number : number + 2] if number == 0 else LEASES[number + 1 :][:1])
        batches.append(loader.fetch(lease))
        loader.fetch_ahead()
    return batches


def test_a_copy_starts_before_its_batch_is_needed() -> None:
    transfer = Recorded()
    epoch(leased(transfer))
    assert transfer.words == [
        word for n in (4, 8, 12) for word in (f"begin {n}", f"finish {n}")
    ]  # fmt: skip


def test_batches_equal_those_converted_before_the_copy_bit_for_bit() -> None:
    for mine, plain in zip(epoch(leased(Recorded())), epoch(leased(None)), strict=True):
        assert mine[0].dtype is torch.float32
        assert torch.equal(mine[0], plain[0])
        assert torch.equal(mine[1], plain[1])


def test_prefetching_does_not_change_a_steps_random_state() -> None:
    seen = []
    for transfer in (Recorded(), None):
        loader = leased(transfer)
        loader.reserve(LEASES[:2])
        loader.fetch(LEASES[0])
        loader.fetch_ahead()
        seen.append(torch.rand(3))
    assert torch.equal(*seen)


def test_a_batch_that_belongs_to_another_member_is_not_used() -> None:
    transfer = Recorded()
    loader = leased(transfer)
    loader.reserve(LEASES[:2])
    loader.fetch(LEASES[0])
    loader.fetch_ahead()
    batch = loader.fetch(LEASES[3])
    assert batch[1].tolist() == [12, 13, 14, 15]
    assert transfer.words == ["begin 4"]
    assert loader.fetch(LEASES[1])[1].tolist() == [4, 5, 6, 7]


def test_the_end_of_an_epoch_drops_pending_copies() -> None:
    loader = leased(Recorded())
    loader.reserve(LEASES[:2])
    loader.fetch(LEASES[0])
    loader.fetch_ahead()
    loader.end_epoch()
    assert loader._arriving is None
    assert not loader._known


@pytest.mark.parametrize("scale", [1 / 255, 1 / 16, 0.3])
def test_bytes_become_the_same_floats_one_by_one_or_all_at_once(scale: float) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    each = torch.stack([as_input(value, scale) for value in values])
    assert torch.equal(as_input(values, scale), each)
