"""Eight prepared folders and two races: bench/hostile.py, in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "support" / "planting.py"


@pytest.mark.skipif(sys.platform != "linux", reason="it forks what has imported torch")
def test_nothing_that_is_planted_is_written_through_run_or_waited_for() -> None:
    verbs = ("train", "resume", "auto", "report", "config")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--tries", "8", "--races", "2", "--verbs", *verbs],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert sum(found["tries"].values()) == 8
    assert sum(found["races"].values()) == 2
