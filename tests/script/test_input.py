"""Seconds of waiting for batches are told apart from those of computing, on every path.

worker 0   samples that are there at once
worker 1   each takes SAMPLE_S, in its own process or in one of its loader's workers
"""

from pathlib import Path
from typing import Any

import pytest

from paceline.report.terminal import render_summary
from runs import run_script

SAMPLE_S, SAMPLES, BATCH, EPOCHS = 0.01, 64, 8, 2
SCRIPT = f"""\
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
import paceline

pace, case = paceline.connect(), sys.argv[1]

def sample(index):
    if pace.worker == 1:
        time.sleep({SAMPLE_S})
    return torch.full((2,), float(index))

class Samples(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        return sample(index)

class Stream(IterableDataset):
    def __iter__(self):
        for index in range({SAMPLES}):
            time.sleep({SAMPLE_S})
            yield torch.full((2,), float(index))

model = nn.Linear(2, 1)
data = Stream() if case == "stream" else Samples()
loader = DataLoader(data, batch_size={BATCH}, num_workers=int(case == "loader worker"))
other = DataLoader(Samples(), batch_size={BATCH})
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
if case == "second loader":
    loader = DataLoader(torch.zeros({SAMPLES}, 2), batch_size={BATCH})
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    other = pace.prepare(other)
else:
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs({EPOCHS}):
    others = iter(other)
    for x in loader:
        with pace.step():
            if case == "second loader":
                x = x + next(others)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
"""


def _run(folder: Path, case: str, **settings: Any) -> Any:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_script(script, folder, case, **{"workers": 2, "protocol": "full-sync", **settings})


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("samples", {"path": "peers"}),
        ("samples", {"path": "store"}),
        ("samples", {"protocol": "local-sgd:2"}),
        ("samples", {"accumulate": 2}),
        ("loader worker", {}),
        ("second loader", {}),
    ],
    ids=str,
)
def test_a_workers_time_waiting_for_batches_is_reported(
    tmp_path: Path, case: str, settings: dict[str, Any]
) -> None:
    summary = _run(tmp_path, case, **settings).summary
    first, second = summary.per_worker
    slept_s = SAMPLE_S * second.samples
    assert second.samples == SAMPLES * EPOCHS / 2
    # A loader's worker makes its batches while others are computed.
    assert (0.3 if case == "loader worker" else 0.95) * slept_s <= second.input_s
    assert second.input_s <= second.compute_s
    if case != "loader worker":  # to begin one takes the first worker as long
        assert first.input_s < 0.5 * second.input_s
    (head,) = (line for line in render_summary(summary) if line.startswith("worker "))
    assert head.split()[3:] == ["input", "compute", "wait", "push"]


def test_waiting_for_a_stream_counts_as_input(tmp_path: Path) -> None:
    summary = _run(tmp_path, "stream").summary
    assert sum(worker.input_s for worker in summary.per_worker) > SAMPLE_S * SAMPLES
