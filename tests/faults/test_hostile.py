"""Eight prepared folders and two races: bench/hostile.py, in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "support" / "planting.py"


@pytest.mark.skipif(sys.platform != "linux", reason="it forks what has imported torch")
def test_planted_files_are_neither_written_through_run_nor_awaited() -> None:
    verbs = ("train", "resume", "auto", "report", "config")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--tries", "8", "--races", "2", "--verbs", *verbs],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert sum(result["tries"].values()) == 8
    assert sum(result["races"].values()) == 2
