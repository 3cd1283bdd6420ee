"""From the name of a data set to samples that a network can be trained on.

Loading reads files that are here and never fetches, so a worker cannot start a download. It must
not know which network it is for.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from .arrays import ArrayDataset, Splits
from .catalogue import DataFile, DataSet, Located, find, locate, looked_in
from .checked import read_checked
from .choice import choose
from .fetch import remedy
from .idx import parse_idx
from .outside import Outside


def load(name: str, *, side_px: int | None = None, env: Mapping[str, str] | None = None) -> Splits:
    """Training and test images of a data set that is here: float32 (1, side, side) in [0, 1].

    Args:
        side_px: scale the images to this height and width (bilinear); default as they are.

    Raises:
        ConfigError: the data set is not here, incomplete, damaged or not what it claims to be.
    """
    data_set = find(name)
    located = locate(data_set, env)
    if located is None:
        folders = ", ".join(map(str, looked_in(data_set, env)))
        raise ConfigError(f"{name} is not here (looked in {folders}); {remedy(data_set)}")
    if located.missing:
        raise ConfigError(
            f"{name} in {located.folder} is incomplete: no {', '.join(located.missing)}; "
            f"{remedy(data_set)}"
        )
    train = _samples(data_set, located, data_set.train_images, data_set.train_labels, side_px)
    test = _samples(data_set, located, data_set.test_images, data_set.test_labels, side_px)
    scaled = (
        f", scaled up to {side_px}x{side_px}" if side_px not in (None, data_set.side_px) else ""
    )
    return Splits(
        train=train,
        test=test,
        source=f"{data_set.title} ({len(train):,} + {len(test):,} images{scaled})",
        classes=data_set.classes,
    )


def load_or_fallback(
    name: str,
    *,
    fetch_missing: bool,
    side_px: int | None = None,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
) -> tuple[Splits, str]:
    """``choose`` and ``load`` in one: the samples, and the line that says what stands in, or ""."""
    choice = choose(name, fetch_missing=fetch_missing, env=env, outside=outside)
    return load(choice.name, side_px=side_px, env=env), choice.note


def _samples(
    data_set: DataSet,
    located: Located,
    images_file: DataFile,
    labels_file: DataFile,
    side_px: int | None,
) -> ArrayDataset:
    images = _values(data_set, located, images_file).unsqueeze(1)
    labels = _values(data_set, located, labels_file).to(torch.int64)
    scale = 1 / data_set.max_value
    if side_px is None or side_px == data_set.side_px:
        return ArrayDataset(images, labels, scale=scale)
    size = (side_px, side_px)
    floats = torch.nn.functional.interpolate(images * scale, size=size, mode="bilinear")
    return ArrayDataset(floats, labels)


def _values(data_set: DataSet, located: Located, file: DataFile) -> Tensor:
    path = located.paths[file.name]
    return torch.from_numpy(parse_idx(read_checked(path, file, remedy(data_set)), str(path)))
