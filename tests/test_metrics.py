"""The accuracy is found among the metric names of a script."""

import pytest

from paceline.core.stats import accuracy_among, better_of


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["loss", "acc"], "acc"),
        (["accuracy", "loss"], "accuracy"),
        (["acc", "accuracy"], "acc"),
        (["val_acc", "loss"], "val_acc"),
        (["top1_Accuracy"], "top1_Accuracy"),
        (["train_acc", "val_acc"], None),
        (["f1", "loss"], None),
        ([], None),
    ],
)
def test_accuracy_is_found_among_metric_names(names: list[str], found: str | None) -> None:
    assert accuracy_among(names) == found


def test_smaller_loss_is_better_without_an_accuracy() -> None:
    assert better_of({"loss": (6.0, 2.0)}) == -3.0
    assert better_of({"val_acc": (1.0, 2.0), "loss": (6.0, 2.0)}) == 0.5
    assert better_of({"f1": (1.0, 2.0)}) is None
    assert better_of({"acc": (0.0, 0.0)}) is None
