"""The images that the examples train on, as ordinary torch data sets.

Fashion-MNIST if it is on this machine (`paceline data get fashion-mnist` fetches it), else the
8x8 digits that ship with Paceline, scaled up. Paceline only finds the files here; the plain example
trains without it.
"""

import torch
from torch.utils.data import TensorDataset

from paceline.data.arrays import load_or_fallback


def open_images(num_train: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images (1, 28, 28) in [0, 1] with their labels.

    Args:
        num_train: number of training images, and at most that many to test on.
    """
    splits, note = load_or_fallback("fashion-mnist", fetch_missing=False, side_px=28)
    if note:
        print(note)
    return _first(splits.train, num_train), _first(splits.test, num_train)


def _first(data: object, count: int | None) -> TensorDataset:
    size = len(data) if count is None else min(count, len(data))  # type: ignore[arg-type]
    batch = data.__getitems__(range(size))  # type: ignore[attr-defined]
    return TensorDataset(batch.inputs.contiguous(), batch.targets.to(torch.int64))
