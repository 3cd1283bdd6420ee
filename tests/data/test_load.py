"""From a name to samples; and what happens when they are missing."""

import pytest
import torch

from paceline.data.arrays import load, load_or_fallback
from paceline.data.fetch import STAND_IN, choose
from paceline.data.sources import SourceError
from paceline.errors import ConfigError


class Unreachable:
    """A machine without programs, whose network is down."""

    def has(self, program: str) -> bool:
        return False

    def run(self, command, folder, timeout_s) -> None:
        raise AssertionError("nothing can be run here")

    def download(self, address, path, timeout_s) -> None:
        raise SourceError("no route")


class Forbidden(Unreachable):
    """A machine whose network must not be asked."""

    def has(self, program: str) -> bool:
        raise AssertionError("nobody allowed a fetch")

    def download(self, address, path, timeout_s) -> None:
        raise AssertionError("nobody allowed a fetch")


@pytest.mark.parametrize("compress", [False, True])
def test_samples_are_those_of_the_files(tiny, compress: bool) -> None:
    tiny.put(tiny.root / "tiny", compress=compress)
    splits = load("tiny", env=tiny.env)
    assert (len(splits.train), len(splits.test)) == (4, 2)
    image, label = splits.train[1]
    assert torch.equal(image, (torch.arange(16, 32.0) * (1 / 255)).view(1, 4, 4))
    assert (label.dtype, label.item()) == (torch.int64, 1)
    assert splits.source == "Tiny (4 + 2 images)"
    assert splits.classes == ("a", "b", "c")


def test_a_missing_data_set_is_an_error_that_says_how_to_get_it(tiny) -> None:
    with pytest.raises(ConfigError, match=r"tiny is not here \(looked in .*data get tiny` fetches"):
        load("tiny", env=tiny.env)


def test_an_incomplete_folder_is_an_error_that_names_what_is_missing(tiny) -> None:
    tiny.put(tiny.root / "tiny")
    (tiny.root / "tiny" / "test-images").unlink()
    with pytest.raises(ConfigError, match="is incomplete: no test-images; `paceline data get"):
        load("tiny", env=tiny.env)


def test_without_permission_to_fetch_digits_stand_in_and_no_network_is_used(tiny) -> None:
    choice = choose("tiny", fetch_missing=False, env=tiny.env, outside=Forbidden())
    assert choice.name == STAND_IN
    assert choice.note.startswith("Tiny is not here (`paceline data get tiny` fetches it): ")
    assert "\n" not in choice.note


def test_digits_stand_in_when_a_fetch_fails_and_the_reasons_are_given(tiny) -> None:
    notes: list[str] = []
    choice = choose(
        "tiny", fetch_missing=True, env=tiny.env, outside=Unreachable(), say=notes.append
    )
    assert choice.name == STAND_IN
    assert "could not be fetched" in choice.note
    assert "first.invalid: no route" in notes[-1]


def test_the_stand_in_is_loaded_instead(tiny) -> None:
    splits, note = load_or_fallback(
        "tiny", fetch_missing=False, side_px=28, env=tiny.env, outside=Forbidden()
    )
    assert splits.source.startswith("Digits 8x8 (1,437 + 360")
    assert note


def test_a_present_data_set_is_used_without_a_note(tiny) -> None:
    tiny.put(tiny.root / "tiny")
    splits, note = load_or_fallback("tiny", fetch_missing=True, env=tiny.env, outside=Forbidden())
    assert (splits.source, note) == ("Tiny (4 + 2 images)", "")


def test_damaged_files_are_never_replaced_by_the_stand_in(tiny) -> None:
    tiny.put(tiny.root / "tiny")
    (tiny.root / "tiny" / "train-labels").write_bytes(b"rotten")
    with pytest.raises(ConfigError, match="train-labels is damaged"):
        load_or_fallback("tiny", fetch_missing=False, env=tiny.env, outside=Forbidden())
    with pytest.raises(ConfigError, match="could not be fetched"):
        choose("tiny", fetch_missing=True, env=tiny.env, outside=Unreachable())
