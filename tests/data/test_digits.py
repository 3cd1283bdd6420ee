"""The data set in the package: as documented, and equal to its source."""

import numpy as np
import pytest

from paceline.data.arrays import load
from paceline.data.catalogue import find
from paceline.data.fetch import FetchState, inspect


def test_digits_are_present_and_intact() -> None:
    inspection = inspect(find("digits"))
    assert inspection.state is FetchState.HERE
    assert inspection.folder is not None
    assert "CC BY 4.0" in (inspection.folder / "SOURCE.txt").read_text()


def test_digits_are_scikit_learns_in_the_documented_order() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    source = datasets.load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(1797)
    splits = load("digits")
    images = np.concatenate([splits.train.inputs, splits.test.inputs]).squeeze(1)
    targets = np.concatenate([splits.train.targets, splits.test.targets])
    assert np.array_equal(images, source.images[order])
    assert np.array_equal(targets, source.target[order])


def test_every_digit_occurs_in_both_splits() -> None:
    splits = load("digits")
    for part in (splits.train, splits.test):
        assert part.targets.unique().tolist() == list(range(10))


def test_scaled_up_images_stay_in_range_and_are_labelled_as_such() -> None:
    splits = load("digits", side_px=28)
    inputs, _ = splits.train[0]
    assert inputs.shape == (1, 28, 28)
    assert 0 <= splits.train.inputs.min() <= splits.train.inputs.max() <= 1
    assert splits.source == "Digits 8x8 (1,437 + 360 images, scaled up to 28x28)"
