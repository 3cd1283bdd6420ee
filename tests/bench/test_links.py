"""Pairs of cores are measured by real processes; known links are printed with their rings."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench.links import (
    LOOPBACK,
    MEMORY,
    MeasuredLinks,
    MeasuredPair,
    numa_nodes,
    recorded,
    render_links,
    usual_cores,
)
from paceline.collectives.ring_search import find_rings

Say = Callable[[str], tuple[int, str, str]]


def fake_links(cores: tuple[int, ...], fast: set[tuple[int, int]]) -> MeasuredLinks:
    """The pairs run at 8 GB/s, all others at 1; loopback at a tenth of that."""
    return MeasuredLinks(
        num_bytes=1 << 24,
        nodes={core: core // 4 for core in cores},
        pairs=tuple(
            MeasuredPair(
                kind=kind, source=a, destination=b, latency_s=1e-6,
                bytes_per_s=(8e9 if (a, b) in fast or (b, a) in fast else 1e9) * factor,
            )
            for kind, factor in ((MEMORY, 1.0), (LOOPBACK, 0.1))
            for a in cores for b in cores if a != b
        ),
    )  # fmt: skip


def test_ring_uses_the_fast_pairs() -> None:
    result = fake_links((0, 2, 4, 6), {(0, 4), (4, 2), (2, 6), (6, 0)})
    lines = render_links(result)
    assert lines[1] == "NUMA nodes: 0: cores 0,2, 1: cores 4,6"
    assert lines.count("  0 - 4 - 2 - 6") == 2
    assert "1 ring of 8 GB/s, 47% of the narrowest cut:" in lines
    (row,) = [line for line in lines if line.startswith("core 0 ")][:1]
    assert row.split("  ")[-1].strip() == "8 GB/s, 1 us"


def test_numa_nodes_are_those_listed_by_the_kernel(tmp_path: Path) -> None:
    for node, cores in ((0, "0-3,8"), (1, "4-7,9-11")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes((0, 3, 4, 8, 10), tmp_path) == {0: 0, 3: 0, 4: 1, 8: 0, 10: 1}
    assert numa_nodes((5,), tmp_path / "gone") == {5: 0}


def test_default_cores_are_limited_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert usual_cores() == (0, 8, 16, 24, 32, 40, 48, 56)


def test_gain_of_nvlink_follows_from_the_rings(say: Say) -> None:
    code, out, err = say("bench links --topology dgx1 --json")
    assert code == 0, err
    with_nvlink, without = json.loads(out)["topologies"]
    assert (with_nvlink["name"], without["name"]) == ("DGX-1", "DGX-1 without NVLink")
    for one, topology in zip((with_nvlink, without), recorded("dgx1"), strict=True):
        rings = find_rings(topology, 8)
        assert one["rings"] == [list(ring) for ring in rings.rings]
        assert one["each_bytes_per_s"] == rings.each_bytes_per_s
    gain = len(with_nvlink["rings"]) * with_nvlink["each_bytes_per_s"]
    assert gain > 5 * len(without["rings"]) * without["each_bytes_per_s"]
    assert with_nvlink["bytes_per_s"][0][3] == 50e9
    assert without["bytes_per_s"][0][1] == 12e9
    code, out, _ = say("bench links --topology pcie8")
    assert code == 0
    assert out.startswith("8 PCIe cards, GB/s")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a link joins two cores")
def test_two_cores_are_measured_in_both_directions(say: Say) -> None:
    first, second = usual_cores()[:2]
    code, out, err = say(f"bench links --cores {first},{second} --mib 1 --json")
    assert code == 0, err
    report = json.loads(out)
    assert sorted(map(int, report["nodes"])) == [first, second]
    assert {(pair["kind"], pair["source"], pair["destination"]) for pair in report["pairs"]} == {
        (kind, *ends) for kind in (MEMORY, LOOPBACK) for ends in ((first, second), (second, first))
    }
    for one in report["pairs"]:
        assert 1e-8 < one["latency_s"] < 1.0
        assert 1e6 < one["bytes_per_s"] < 1e12
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline bench links`")[1].split("\n## ")[0]
    for field in (*report, *report["pairs"][0]):
        assert f"`{field}`" in section, field


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--topology dgx2", "did you mean 'dgx1'"),
        ("--topology dgx1 --cores 0,1", "so --cores has no effect"),
        ("--topology dgx1 --mib 64", "so --mib has no effect"),
        ("--cores 0", "needs 2 to 8 different cores"),
        ("--cores 0,100000", "core 100000 is not available here"),
        ("--cores here", "--cores must be whole numbers such as 0,1, got 'here'"),
        ("--mib 0", "--mib must be >= 1"),
    ],
)
def test_invalid_input_gets_a_one_line_error(say: Say, flags: str, words: str) -> None:
    code, _, err = say(f"bench links {flags}")
    assert code == 2
    assert words in err.splitlines()[-1]
