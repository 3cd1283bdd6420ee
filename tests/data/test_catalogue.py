"""Where data sets are searched for, and what counts as present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.catalogue import CATALOGUE, data_folders, find, locate, looked_in
from paceline.errors import ConfigError


def test_folders_of_the_environment_come_before_the_cache(tmp_path: Path) -> None:
    own = os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")])
    env = {"PACELINE_DATA": own, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert data_folders(env) == (
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "cache" / "paceline" / "data",
    )


def test_without_an_environment_data_are_in_the_home_cache() -> None:
    assert data_folders({}) == (Path.home() / ".cache" / "paceline" / "data",)


def test_the_distributions_folder_is_searched_last(tmp_path: Path) -> None:
    folders = looked_in(find("fashion-mnist"), {"XDG_CACHE_HOME": str(tmp_path)})
    assert folders[-1] == Path("/usr/share/datasets/fashion-mnist")
    assert folders[0] == tmp_path / "paceline" / "data" / "fashion-mnist"


def test_a_complete_folder_is_preferred_to_an_incomplete_one(tiny) -> None:
    first = tiny.root / "tiny"
    tiny.put(first)
    (first / "test-labels").unlink()
    partial = locate(tiny.data_set, tiny.env)
    assert partial is not None
    assert partial.missing == ("test-labels",)
    other = tiny.root / "Tiny" / "raw"
    tiny.put(other, compress=True)
    whole = locate(tiny.data_set, tiny.env)
    assert whole is not None
    assert (whole.folder, whole.missing) == (other, ())


def test_nothing_is_found_in_empty_folders(tiny) -> None:
    assert locate(tiny.data_set, tiny.env) is None


def test_an_unknown_data_set_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'fashion-mnist'.*digits"):
        find("fashion_mnist")


@pytest.mark.parametrize("name", CATALOGUE)
def test_names_and_sizes_agree_with_the_number_of_images(name: str) -> None:
    data_set = CATALOGUE[name]
    assert data_set.name == name
    pixels = data_set.side_px**2
    assert data_set.train_images.num_bytes == 16 + data_set.num_train * pixels
    assert data_set.test_images.num_bytes == 16 + data_set.num_test * pixels
    assert data_set.train_labels.num_bytes == 8 + data_set.num_train
    assert data_set.test_labels.num_bytes == 8 + data_set.num_test
    assert all(len(file.md5) == 32 for file in data_set.files)
    assert all(address.startswith("https://") for address in data_set.addresses)


def test_listing_fetching_and_choosing_import_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, paceline.data.fetch, paceline.workloads; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
