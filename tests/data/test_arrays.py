"""Batches gathered at once equal the batches that a loader would stack."""

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data.arrays import ArrayDataset, Batch, collate_batch


@pytest.fixture(params=["bytes", "floats"])
def data(request: pytest.FixtureRequest) -> ArrayDataset:
    inputs = torch.arange(10 * 6, dtype=torch.uint8).view(10, 1, 2, 3)
    if request.param == "floats":
        inputs = inputs.to(torch.float32)
    return ArrayDataset(inputs, torch.arange(10))


def test_a_gathered_batch_equals_stacked_samples_bit_for_bit(data: ArrayDataset) -> None:
    order = [7, 0, 7, 3]
    inputs, targets = collate_batch(data.__getitems__(order))
    assert torch.equal(inputs, torch.stack([data[i][0] for i in order]))
    assert torch.equal(targets, torch.stack([data[i][1] for i in order]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_default_collate_gives_the_same_batches(
    data: ArrayDataset, num_workers: int
) -> None:
    def loader(**options: object) -> DataLoader:
        return DataLoader(data, batch_size=4, num_workers=num_workers, **options)

    for ours, theirs in zip(loader(collate_fn=collate_batch), loader(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_images_become_floats_between_zero_and_one() -> None:
    data = ArrayDataset(torch.tensor([[0], [255]], dtype=torch.uint8), torch.zeros(2))
    inputs, _ = collate_batch(data.__getitems__([0, 1]))
    assert inputs.dtype is torch.float32
    assert inputs.flatten().tolist() == [0.0, 1.0]


def test_a_batch_is_a_new_tensor_that_may_be_written_to(data: ArrayDataset) -> None:
    before = data.inputs.clone()
    data.__getitems__([0, 1]).inputs.zero_()
    assert torch.equal(data.inputs, before)


def test_a_batch_can_be_read_as_a_list_of_samples(data: ArrayDataset) -> None:
    batch = data.__getitems__([4, 5, 6])
    assert len(batch) == 3
    assert batch[1][1].item() == 5
    part = batch[1:]
    assert isinstance(part, Batch)
    assert [target.item() for _, target in part] == [5, 6]


def test_plain_samples_are_stacked_by_the_same_collate(data: ArrayDataset) -> None:
    inputs, targets = collate_batch([data[1], data[2]])
    assert inputs.shape == (2, 1, 2, 3)
    assert targets.tolist() == [1, 2]


def test_an_index_out_of_range_is_refused(data: ArrayDataset) -> None:
    with pytest.raises(IndexError):
        data.__getitems__([10])


def test_inputs_and_targets_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        ArrayDataset(torch.zeros(3, 1), torch.zeros(2))
