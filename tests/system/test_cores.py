"""Cores are those that the container's quota leaves, not those that the machine has."""

import os
from pathlib import Path

import pytest

from paceline.system.processors import num_cores


@pytest.mark.parametrize(
    ("text", "wanted"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_quota_of_version_two_counts(tmp_path: Path, text: str, wanted: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert num_cores(tmp_path) == (wanted or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota_us", "wanted"), [("100000", 1), ("-1", None)])
def test_a_quota_of_version_one_counts(tmp_path: Path, quota_us: str, wanted: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota_us)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert num_cores(tmp_path) == (wanted or len(os.sched_getaffinity(0)))


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))
