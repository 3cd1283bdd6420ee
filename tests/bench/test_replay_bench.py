"""``bench/replay.py`` on a small run: its row reports bitwise equality."""

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_bench_finds_the_replay_of_a_small_run_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    measure = runpy.run_path(str(BENCH / "replay.py"))["measure"]
    row = measure("quadratic", "async", 2, 8, 10)
    assert row[:4] == ["quadratic", "async", "2", "10"]
    assert row[-1] == "yes"
