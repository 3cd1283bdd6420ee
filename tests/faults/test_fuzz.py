"""Damaged files of every kind are refused with a message, or loaded unchanged; bench/fuzz.py
tries a hundred thousand."""

from pathlib import Path

import pytest

from fuzzing import READERS, Reader, attack


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.name)
def test_damaged_files_are_refused_or_load_consistent_values(
    reader: Reader, tmp_path: Path
) -> None:
    tally = attack(reader, tmp_path, 150, seed=1)
    assert not tally.faults
    assert tally.refused > 5
    if reader.seal is not None:
        assert 0.4 * tally.tried < tally.sealed < 0.6 * tally.tried
