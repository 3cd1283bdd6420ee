"""Memory limits are found in every kind of control group and named."""

import errno
import resource
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError
from paceline.system import limits
from paceline.system.limits import (
    allow,
    available_bytes,
    count_kills,
    describe_limits,
    group_limits,
    is_out_of_memory,
)

MIB = 1 << 20


def make_machine(root: Path, groups: str, *, free_mib: int = 4096) -> Path:
    """The files of a machine; ``groups``: text of /proc/self/cgroup."""
    write_files(root / "proc", {"meminfo": f"MemTotal: 1 kB\nMemAvailable: {free_mib * 1024} kB\n"})
    write_files(root / "proc/self", {"cgroup": groups})
    (root / "sys/fs/cgroup").mkdir(parents=True)
    return root


def write_files(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def write_group_v2(
    folder: Path, most: str, used_mib: int, *, kept_mib: int = 0, kills: int = 0
) -> None:
    """Write the files of a cgroup v2."""
    stat = f"anon 5\ninactive_file {kept_mib * MIB}\n"
    write_files(folder, {
        "memory.max": f"{most}\n", "memory.current": f"{used_mib * MIB}\n", "memory.stat": stat,
        "memory.events": f"low 0\noom 1\noom_kill {kills}\n",
    })  # fmt: skip


def test_machine_without_groups_has_no_limit(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "")
    assert available_bytes(root) == 4096 * MIB
    assert describe_limits(root) == ""
    assert count_kills(root) == 0


def test_memory_is_unlimited_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 1 << 60


def test_cgroup_v2_outer_group_may_be_narrower(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0::/jobs/7/step\n")
    top = root / "sys/fs/cgroup"
    write_files(top, {"cgroup.controllers": "memory"})
    write_group_v2(top / "jobs/7/step", "max", 100, kills=3)
    write_group_v2(top / "jobs/7", str(512 * MIB), 300, kept_mib=50)
    write_group_v2(top / "jobs", str(1024 * MIB), 1000)
    assert [one.name for one in group_limits(root)] == [
        "the control group jobs/7", "the control group jobs",
    ]  # fmt: skip
    assert available_bytes(root) == 24 * MIB
    assert describe_limits(root).startswith("512.0 MiB by the control group jobs/7, 1.0 GiB by")
    assert count_kills(root) == 3


def test_cgroup_v2_container_may_see_its_group_as_root(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0::/docker/0123456789abcdef\n")
    top = root / "sys/fs/cgroup"
    write_files(top, {"cgroup.controllers": "memory"})
    write_group_v2(top, str(256 * MIB), 56)
    assert available_bytes(root) == 200 * MIB


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n")
    write_files(root / "sys/fs/cgroup/memory", {
        "memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n",
    })  # fmt: skip
    write_files(root / "sys/fs/cgroup/memory/job", {
        "memory.limit_in_bytes": f"{300 * MIB}\n", "memory.usage_in_bytes": f"{250 * MIB}\n",
        "memory.stat": f"total_inactive_file {30 * MIB}\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    })  # fmt: skip
    assert available_bytes(root) == 80 * MIB
    assert describe_limits(root).startswith("300.0 MiB by the control group memory/job")
    assert count_kills(root) == 2


def test_kills_are_read_from_vmstat_without_group_counts(tmp_path: Path) -> None:
    root = make_machine(tmp_path, "0::/\n")
    (root / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
    assert count_kills(root) == 4


def test_each_out_of_memory_kill_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 5
    monkeypatch.setattr(limits, "count_kills", lambda: count)
    monkeypatch.setattr(limits, "describe_limits", lambda: "2.0 GiB by the control group job")
    toll = limits.Toll(0.0)
    assert toll.explain(1.0) == ""
    count = 7
    told = ", out of memory (allowed: 2.0 GiB by the control group job)"
    assert [toll.explain(2.0) for _ in range(3)] == [told, told, ""]


def test_earlier_kill_of_another_process_explains_no_later_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another run in the same group, or a process that a worker has started."""
    count = 5
    monkeypatch.setattr(limits, "count_kills", lambda: count)
    toll = limits.Toll(0.0)
    count = 6
    for now_s in range(1, 60):
        toll.look(float(now_s))
    assert toll.explain(60.0) == ""
    count = 7
    toll.look(61.0)
    assert toll.explain(64.0).startswith(", out of memory")


@pytest.mark.parametrize(
    ("error", "is_end"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("no words"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"), True),
        (RuntimeError("could not create a primitive"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch.so: failed to map segment from shared object"), True),
        (ImportError("libgomp.so.1: cannot allocate memory in static TLS block"), False),
        (OSError(errno.ENOENT, "No such file", "out of memory.txt"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_is_distinguished_from_other_errors(error: Exception, is_end: bool) -> None:
    assert is_out_of_memory(error) == is_end


def test_too_many_workers_for_memory_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(limits, "describe_limits", lambda: "128.0 MiB by the control group job")
    allow(8)
    with pytest.raises(ConfigError) as told:
        allow(9)
    assert str(told.value) == (
        "9 workers need at least 108.0 MiB, but 100.0 MiB are free (allowed: 128.0 MiB by the "
        "control group job); use fewer workers"
    )


def test_open_file_limit_is_raised_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda number: (64, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda number, pair: requests.append(pair))
    allow(4)
    assert requests == []
    allow(16)
    assert requests == [(96, 100)]
    with pytest.raises(ConfigError, match=r"20 workers need 108 open files, but 100 are allowed"):
        allow(20)
