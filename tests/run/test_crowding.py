"""The plan says when more threads compute at once than cores and quota allow, and what helps."""

import dataclasses
from pathlib import Path

import pytest

from paceline.config import RunSettings
from paceline.engines.base import Traits
from paceline.machine.ceilings import write_machine
from paceline.plan import Plan
from paceline.protocols import parse
from paceline.run import describe
from paceline.run.describe import Description, make_plan

LOCAL = Traits(name="local", cancels=True, loses_members=True, has_store=True, is_spmd=True)
DESCRIPTION = Description(
    digest="", task="paper", source="", program="task paper", threads=1, device="cpu",
    num_parameters=10, update_bytes=1 << 20, arena_bytes=80, pinned_bytes=0, num_samples=64,
    batch_size=8, drop_last=False, has_own_batches=False, order="shuffled", lookahead=0,
    learning_rates=(0.1,), epochs=1, grain="", can_share=True, notes=(),
)  # fmt: skip


def planned(workers: int, traits: Traits = LOCAL, **changes: object) -> Plan:
    settings = RunSettings(workers=workers, protocol="full-sync")
    first = dataclasses.replace(DESCRIPTION, **changes)  # type: ignore[arg-type]
    return make_plan(first, parse("full-sync", workers), settings, traits)


@pytest.fixture(autouse=True)
def _four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "num_cores", lambda: 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_load_within_the_cores_is_not_noted() -> None:
    assert planned(4).notes == ()
    assert planned(2, threads=2).notes == ()
    assert planned(2, num_loading=1).notes == ()


def test_threads_workers_and_loader_workers_are_counted_together() -> None:
    (note,) = planned(2, threads=2, num_loading=3).notes
    assert note == (
        "10 want to compute at once (2 x 2 threads + 3 that load), and 4 cores carry them: they "
        "take turns; with a smaller num_workers of the DataLoader or fewer workers they need not"
    )


def test_too_many_threads_are_noted_with_a_limit() -> None:
    (note,) = planned(2, threads=4).notes
    assert "(2 x 4 threads)" in note
    assert "--threads 2 or fewer workers" in note


def test_a_lone_worker_is_never_told_to_use_fewer_workers() -> None:
    (note,) = planned(1, num_loading=8).notes
    assert "(1 x 1 thread + 8 that load)" in note
    assert "fewer workers" not in note


def test_torch_threads_do_not_count_where_a_device_computes() -> None:
    assert planned(2, threads=8, device="cuda:0", num_loading=1).notes == ()


def test_inline_members_and_other_machines_do_not_crowd() -> None:
    assert planned(8, dataclasses.replace(LOCAL, name="inline")).notes == ()
    assert planned(8, dataclasses.replace(LOCAL, is_one_machine=False)).notes == ()


def test_the_plan_shows_the_measured_memory_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dict(planned(2).rows())["bytes an update"] == "2.0 MiB"
    monkeypatch.setattr("paceline.machine.ceilings.num_cores", lambda: 4)
    write_machine({"memory_copy_bytes_per_s": 4.0 * (1 << 30)})
    row = dict(planned(2).rows())["bytes an update"]
    assert row.startswith("2.0 MiB, at least 977 us through this memory (paceline probe, 2")
    assert dict(planned(1).rows())["bytes an update"] == "1.0 MiB"
