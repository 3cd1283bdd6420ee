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


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/user.slice/run.scope", "user.slice/run.scope", {"cpu.max": "100000 100000"}),
        ("0::/user.slice/run.scope", "user.slice", {"cpu.max": "100000 100000"}),
        (
            "4:cpu,cpuacct:/batch/job",
            "cpu/batch/job",
            {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_a_quota_of_a_group_that_lies_deeper_counts(
    tmp_path: Path, line: str, folder: str, files: dict[str, str]
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / folder).mkdir(parents=True)
    (root / "cgroup.controllers").touch()
    for name, text in files.items():
        (root / folder / name).write_text(text)
    own.write_text(f"{line}\n")
    assert num_cores(root, own) == 1
    own.write_text("0::/../outside\nbroken\n")
    assert num_cores(root, own) == len(os.sched_getaffinity(0))


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))
