"""Twenty lives of a run are killed, and every number and every mini-batch counts once.

Readers of a stream are killed like all others.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import numbered
import streamed
from reference import differ
from runs import Run, run_script
from struck import kills

KILLS, CLOSE = 20, 1e-6
UPDATES, SIZE = 80, 2
SETTINGS: dict[str, Any] = {"respawn": True, "stall_after": 60.0, "seed": 5}


def struck(script: Any, folder: Path, *words: str, workers: int, protocol: str) -> Run:
    """A run with its kills; all workers that reached its end have the same weights."""
    with kills(folder, KILLS, seed=workers) as seats:
        run = run_script(
            Path(script.__file__), folder, str(folder), *words, workers=workers,
            protocol=protocol, **SETTINGS,
        )  # fmt: skip
    assert len(seats) == KILLS
    assert len(run.left) >= KILLS
    assert set(seats) == set(range(workers))
    first, *others = [torch.load(path) for path in sorted(folder.glob("result-*.pt"))]
    assert all(differ(first, other) < CLOSE for other in others)
    return run


CASES = [(2, "full-sync", 2), (4, "full-sync", 4), (3, "k-batch-async:2", 2), (4, "async", 1)]
"""Workers, protocol, and what an update of it averages."""


@pytest.mark.parametrize(("workers", "protocol", "parts"), CASES)
def test_every_number_counts_once(tmp_path: Path, workers: int, protocol: str, parts: int) -> None:
    words = ("0", str(UPDATES))
    run = struck(numbered, tmp_path, *words, workers=workers, protocol=protocol)
    assert run.used() == [Counter(range(UPDATES * parts))]
    assert run.summary.updates == UPDATES
    if protocol == "full-sync":
        result = torch.load(next(tmp_path.glob("result-*.pt")))
        assert differ(result, numbered.twin(5, UPDATES, parts)) < CLOSE


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize(("workers", "protocol", "parts"), CASES[1:3])
def test_every_mini_batch_of_a_stream_counts_once(
    tmp_path: Path, workers: int, protocol: str, parts: int, is_stateful: bool
) -> None:
    size = SIZE * parts * UPDATES
    options = {
        "size": size, "batch_size": SIZE * parts, "is_stateful": is_stateful, "struck_over": UPDATES
    }  # fmt: skip
    words = json.dumps(options)
    run = struck(streamed, tmp_path, words, workers=workers, protocol=protocol)
    assert run.used() == [Counter(range(UPDATES * parts))]
    assert run.summary.samples == size
    if protocol == "full-sync":
        result = torch.load(next(tmp_path.glob("result-*.pt")))
        assert differ(result, streamed.twin(5, 1, parts, size, SIZE * parts)) < CLOSE
