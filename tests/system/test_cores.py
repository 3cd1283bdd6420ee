"""The number of cores is limited by the quota of the container."""

import os
from pathlib import Path

import pytest

from paceline.system.control_groups import control_groups
from paceline.system.processors import num_cores


def mount_cgroups(root: Path) -> Path:
    groups = root / "sys" / "fs" / "cgroup"
    groups.mkdir(parents=True)
    return groups


@pytest.mark.parametrize(
    ("text", "wanted"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_cgroup_v2_quota_limits_cores(tmp_path: Path, text: str, wanted: int | None) -> None:
    groups = mount_cgroups(tmp_path)
    (groups / "cpu.max").write_text(text)
    assert num_cores(tmp_path) == (wanted or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota_us", "wanted"), [("100000", 1), ("-1", None)])
def test_cgroup_v1_quota_limits_cores(tmp_path: Path, quota_us: str, wanted: int | None) -> None:
    groups = mount_cgroups(tmp_path)
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text(quota_us)
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000")
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
def test_quota_of_a_nested_group_limits_cores(
    tmp_path: Path, line: str, folder: str, files: dict[str, str]
) -> None:
    groups, own = mount_cgroups(tmp_path), tmp_path / "proc" / "self" / "cgroup"
    own.parent.mkdir(parents=True)
    path = line.rpartition(":")[2].lstrip("/")
    (groups / ("cpu" if "cpu" in line else "") / path).mkdir(parents=True)
    (groups / "cgroup.controllers").touch()
    for name, text in files.items():
        (groups / folder / name).write_text(text)
    own.write_text(f"{line}\n")
    assert num_cores(tmp_path) == 1
    own.write_text("0::/../outside\nbroken\n")
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_affinity_limits_cores_without_control_groups(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_innermost_group_comes_first_then_its_parents(tmp_path: Path) -> None:
    groups, own = mount_cgroups(tmp_path), tmp_path / "proc" / "self" / "cgroup"
    own.parent.mkdir(parents=True)
    assert not [*control_groups("cpu", tmp_path)]
    own.write_text("5:memory:/batch/job\n4:cpu,cpuacct:/batch/job\n")
    (groups / "cpu,cpuacct" / "batch" / "job").mkdir(parents=True)
    names = [one.relative_to(groups).as_posix() for one in control_groups("cpu", tmp_path)]
    assert names == ["cpu,cpuacct/batch/job", "cpu,cpuacct/batch", "cpu,cpuacct"]
