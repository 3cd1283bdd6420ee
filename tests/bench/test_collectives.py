"""Collectives timed between real processes, and the report for known times."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench import collective_seat, collectives
from paceline.bench.collectives import (
    CollectivesQuestion,
    MeasuredCollective,
    MeasuredCollectives,
    render_collectives,
    sizes_of,
)
from paceline.bench.samples import Timing
from paceline.collectives import transfers
from paceline.collectives.choose import candidates
from paceline.collectives.host import HostCost
from paceline.collectives.transfers import Action, Operation
from paceline.errors import ConfigError
from paceline.exchange import SHARED
from paceline.run.collective import SECTION, keep_measured, read_measured
from paceline.system.ceilings import read_ceilings

Say = Callable[[str], tuple[int, str, str]]

COST = HostCost(
    num_ranks=8,
    rounds={
        (kind, action): ((1 << 10, 50e-6), (1 << 24, factor * 17e-3))
        for kind, factor in {"alone": 1, "ring": 1, "fan": 7, "all": 7}.items()
        for action in Action
    },
)
"""50 us per message and 1 ns per byte, at each end."""


def test_doctests_pass() -> None:
    assert doctest.testmod(collectives).failed == doctest.testmod(transfers).failed == 0


def row(name: str, num_bytes: int, seconds: float, predicted_s: float | None) -> MeasuredCollective:
    share = transfers.moved_share(Operation.ALL_REDUCE, 8)
    return MeasuredCollective(
        name=name,
        num_bytes=num_bytes,
        timing=Timing(name=name, samples_s=(0.9 * seconds, seconds, 1.2 * seconds)),
        bus_bytes_per_s=num_bytes * share / seconds,
        predicted_s=predicted_s,
    )


def test_meeting_path_may_contain_a_hash(tmp_path: Path) -> None:
    folder = tmp_path / "a#b?c"
    folder.mkdir()
    seat = collective_seat.CollectiveSeat(rank=0, num_ranks=1, meeting=str(folder / "meeting"))
    try:
        assert (folder / "meeting").is_file()
    finally:
        seat.close()


def test_known_times_are_printed_with_crossovers() -> None:
    small, large = 1 << 10, 1 << 24
    result = MeasuredCollectives(
        operation=Operation.ALL_REDUCE,
        num_ranks=8,
        num_cores=2,
        cost=COST,
        copy_bytes_per_s=8e9,
        rows=(
            row("ring", small, 900e-6, 842e-6),
            row("tree", small, 300e-6, 366e-6),
            row("gloo", small, 200e-6, None),
            row("ring", large, 32e-3, 30e-3),
            row("tree", large, 120e-3, 110e-3),
            row("gloo", large, 20e-3, None),
        ),
    )
    text = "\n".join(render_collectives(result))
    assert "all-reduce between 8 processes of one thread" in text
    assert "fastest at 1.0 KiB: tree" in text
    assert "fastest at 16.0 MiB: ring" in text
    assert "the one predicted fastest takes at most 1.00 times as long as the fastest" in text
    (crossing,) = result.crossings()
    assert (crossing.below, crossing.above) == ("tree", "ring")
    assert "ring from tree" in text
    assert "predicted within a factor of 2: " in text
    assert "8 processes share 2 cores, so they also wait for one another" in text
    assert "a message of 1.0 KiB: 50 us alone, 50 us where each rank sends one" in text
    assert "one process copies memory at 8 GB/s" in text
    (gloo,) = [line for line in text.splitlines() if line.startswith("gloo") and "16.0 MiB" in line]
    assert gloo.split()[-1] == f"{1.75 * large / 20e-3 / 1e9:.3g}"  # bus GB/s; no formula
    assert "0.94" in text  # 30 ms / 32
    assert json.loads(json.dumps(result.to_json()))["crossings"][0]["below"] == "tree"


def test_times_of_two_processes_are_measured_and_saved(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = say("bench collectives --sizes 4,1MiB --rounds 1 --json")
    assert code == 0, err
    report = json.loads(out)
    sizes, names = [4, 1 << 20], candidates(2)
    assert [(one["name"], one["num_bytes"]) for one in report["rows"]] == [
        (name, size) for size in sizes for name in (*names, SHARED, collective_seat.NATIVE)
    ]
    assert all(one["timing"]["median_s"] > 0 for one in report["rows"])
    assert "all-reduce of 1.0 MiB" in err
    section, why = read_ceilings(SECTION)
    assert why == ""
    kept = read_measured(2, section, why).cost
    assert kept is not None
    assert kept == HostCost.read(report["cost"])
    assert [size for size, _ in kept.native_s] == sizes
    assert "native" in kept.beside_s
    assert kept.beside_s.keys() - {"native"} <= {*names}
    assert len(kept.beside_s) > 1
    assert all([size for size, _ in value] == sizes for value in kept.beside_s.values())
    assert f"kept in {tmp_path / 'paceline' / 'ceilings.json'}" in err


def test_partial_measurement_leaves_saved_times_unchanged(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_measured(COST)
    before = read_ceilings(SECTION)
    code, out, err = say("bench collectives --names ring,tree --sizes 4,8KiB --rounds 1 --json")
    assert code == 0, err
    assert [(one["name"], one["num_bytes"]) for one in json.loads(out)["rows"]] == [
        (name, size)
        for size in (4, 8192)
        for name in ("ring", "tree", SHARED, collective_seat.NATIVE)
    ]
    assert "not kept: --collective auto needs all collectives" in err
    assert read_ceilings(SECTION) == before


@pytest.mark.parametrize(
    ("names", "sizes", "is_whole"),
    [
        (None, "1KiB,16KiB,256KiB,4MiB", True),
        (None, "64KiB,1MiB", True),
        (None, "1KiB", False),
        (None, "4MiB", False),
        (None, "1KiB,64KiB", False),
        ("hub", "1KiB,4MiB", False),
    ],
)
def test_only_complete_measurements_are_used_by_runs(
    names: str | None, sizes: str, is_whole: bool
) -> None:
    question = CollectivesQuestion.read("all-reduce", workers=2, names=names, sizes=sizes, rounds=1)
    assert question.is_whole == is_whole


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--sizes 1GB", "--sizes '1GB' must be sizes such as 1KiB,64KiB,4MiB"),
        ("--sizes 2", "--sizes must be 4 B or more"),
        ("--workers 1", "needs --workers >= 2 and --rounds >= 1, got 1 and 5"),
        ("--names rings", "unknown collective 'rings'; did you mean 'ring'?"),
        ("broadcast --names ring", "ring has no broadcast; it has all-reduce, reduce-scatter"),
        ("all-reduced", "unknown operation 'all-reduced'; did you mean 'all-reduce'?"),
    ],
)
def test_invalid_options_are_refused_before_measuring(say: Say, line: str, said: str) -> None:
    code, _, err = say(f"bench collectives {line}")
    assert code != 0
    assert said in err


def test_size_may_omit_the_b() -> None:
    assert sizes_of("64Ki, 1Mi,64,8B") == (8, 64, 65536, 1 << 20)
    for text in ("64K", "KiB", "1KiMiB", "1.5MiB"):
        with pytest.raises(ConfigError, match="must be sizes such as"):
            sizes_of(text)


def test_all_collectives_with_the_operation_are_measured_by_default() -> None:
    def fitting(operation: Operation, num_ranks: int) -> list[str]:
        return CollectivesQuestion(
            num_ranks=num_ranks, operation=operation, names=(), sizes_bytes=(4,)
        ).fitting()

    assert fitting(Operation.ALL_TO_ALL, 3) == ["fully-connected"]
    assert fitting(Operation.BROADCAST, 3) == ["tree", "hub"]
    assert fitting(Operation.BROADCAST, 4) == ["tree", "hub", "halving-doubling", "bine"]
    with pytest.raises(ConfigError):
        sizes_of("")
