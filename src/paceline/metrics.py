"""Which of the metrics that a script or a task measures is the accuracy.

``--target-accuracy``, ``--keep-best`` and the summary ask for it. A script names its own metrics,
so the name is found and not prescribed. This module must not know where metrics come from.
"""

from collections.abc import Collection

_NAMES = ("acc", "accuracy")


def accuracy_among(names: Collection[str]) -> str | None:
    """``acc``, else ``accuracy``, else the only name that ends in one of them; None: nobody knows.

    Example:
        >>> accuracy_among(["loss", "val_acc"])
        'val_acc'
    """
    for name in _NAMES:
        if name in names:
            return name
    ending = [name for name in names if name.lower().endswith(_NAMES)]
    return ending[0] if len(ending) == 1 else None


def better_of(totals: dict[str, tuple[float, float]]) -> float | None:
    """What grows as a model gets better: the accuracy, or minus the loss; None: neither is there.

    Args:
        totals: name -> (sum over samples, number of samples).
    """
    name, sign = accuracy_among(totals), 1.0
    if name is None:
        name, sign = "loss", -1.0
    value, count = totals.get(name, (0.0, 0.0))
    return sign * value / count if count else None
