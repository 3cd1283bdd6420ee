"""A short chaos run: real processes, many faults at random moments, respawns; seconds in all.

The long one is bench/goodput.py.
"""

import functools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.events import Joined
from paceline.trace.records import Heard, Struck
from runs import assert_each_sample_once, named_memory, train
from tiny import TASK, samples

NUM_SAMPLES = 720
EPOCHS = 3
WORKERS = 4
LONG = replace(TASK, data=functools.partial(samples, NUM_SAMPLES), epochs=EPOCHS)


def chaos(seed: int) -> tuple[str, ...]:
    """Two kills, two stops, one slow phase, spread over the first seconds and the workers."""
    rng = random.Random(seed)
    workers = rng.sample(range(WORKERS), WORKERS)
    return (
        f"kill worker {workers[0]} at {rng.uniform(0.2, 0.8):.3g}s",
        f"stop worker {workers[1]} at {rng.uniform(0.2, 0.8):.3g}s for 30s",
        f"slow worker {workers[2]} at {rng.uniform(0.2, 1.5):.3g}s for 0.5s by 5x",
        f"kill worker {workers[3]} at {rng.uniform(1.2, 1.8):.3g}s",
        f"stop worker {workers[2]} at {rng.uniform(1.8, 2.2):.3g}s for 0.3s",
    )


@pytest.mark.parametrize("protocol", ["full-sync", "k-sync:3", "k-batch-async:2"])
def test_every_sample_is_used_once_under_many_faults(tmp_path: Path, protocol: str) -> None:
    shared = named_memory()
    faults = chaos(len(protocol))
    run = train(
        LONG, tmp_path, workers=WORKERS, protocol=protocol, fault=faults, respawn=True,
        delay=("50ms",),
    )  # fmt: skip
    struck = [record.text for record in run.records if isinstance(record, Struck)]
    assert sorted(struck) == sorted(faults)
    joined = [
        record
        for record in run.records
        if isinstance(record, Heard) and isinstance(record.fact, Joined)
    ]
    assert len(joined) >= WORKERS + 2
    assert run.num_epochs_ended() == EPOCHS
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    assert named_memory() <= shared
