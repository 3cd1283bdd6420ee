"""The standard loop takes pairs, and uses data sets that gather whole batches."""

import pytest
import torch
from torch.utils.data import TensorDataset

import tiny
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.errors import ConfigError
from paceline.trainer import make_loader, pair_of


def test_batch_gathering_data_set_is_not_read_by_sample() -> None:
    inputs, targets = torch.arange(6.0).view(6, 1), torch.arange(6)
    gathers = make_loader(ArrayDataset(inputs, targets), 4)
    assert gathers.collate_fn is collate_batch
    one_by_one = make_loader(TensorDataset(inputs, targets), 4)
    for mine, theirs in zip(gathers, one_by_one, strict=True):
        assert all(torch.equal(first, second) for first, second in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("batch", "held"), [(torch.ones(2), "Tensor"), ([1, 2, 3], "3 parts"), ({"x": 1}, "dict")]
)
def test_batch_that_is_no_pair_is_refused_with_its_contents(batch: object, held: str) -> None:
    with pytest.raises(ConfigError, match=f"must be a pair .*, got {held}"):
        pair_of(tiny.WITH_BATCH_NORM, batch)
