"""A loop over a range in each epoch: its numbers are shared out, and each comes once an epoch."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.script import worker
from runs import run_script

TEXT = """\
import torch
from torch import nn
import paceline

pace = paceline.connect()
inputs = torch.randn(42, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
torch.manual_seed(4)
model = nn.Linear(5, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
model, optimizer, starts = pace.prepare(model, optimizer, range(0, 40, 4))
for epoch in pace.epochs(2):
    for start in starts:
        with pace.step():
            optimizer.zero_grad()
            model(inputs[start : start + 4]).square().mean().backward()
            optimizer.step()
if pace.is_main:
    torch.save(model.state_dict(), "end.pt")
"""


def twin(num_workers: int) -> dict[str, torch.Tensor]:
    """One process, with a gradient that is the mean of as many numbers."""
    inputs = torch.randn(42, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(4)
    model = nn.Linear(5, 2).double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        for first in range(0, 40, 4 * num_workers):
            optimizer.zero_grad()
            starts = range(first, min(40, first + 4 * num_workers), 4)
            for start in starts:
                loss = model(inputs[start : start + 4]).square().mean() / len(starts)
                loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_an_update_averages_one_number_per_worker(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TEXT)
    run = run_script(script, tmp_path, workers=num_workers)
    assert [set(epoch.values()) for epoch in run.used()] == [{1}] * 2
    assert [len(epoch) for epoch in run.used()] == [10] * 2
    result, wanted = torch.load("end.pt"), twin(num_workers)
    for key, value in wanted.items():
        torch.testing.assert_close(result[key], value, rtol=0, atol=1e-12)


def test_a_lone_worker_iterates_the_range_and_draws_nothing() -> None:
    worker.start_context(None, Context())  # type: ignore[arg-type]
    pace = paceline.connect()
    model = nn.Linear(2, 1)
    model, _, numbers = pace.prepare(model, SGD(model.parameters(), lr=0.1), range(3, 20, 4))
    state = torch.get_rng_state()
    assert [list(numbers) for _ in pace.epochs(2)] == [[3, 7, 11, 15, 19]] * 2
    assert len(numbers) == 5
    assert torch.equal(torch.get_rng_state(), state)
    worker.start_context(None, Context())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "batch", "sentence"),
    [
        (range(0), None, "was given range(0, 0), which has no numbers"),
        (range(4), "global", "prepare(batch='global') with a range: each number is one worker's"),
    ],
)
def test_a_range_that_cannot_be_shared_is_refused_by_name(
    given: range, batch: str | None, sentence: str
) -> None:
    worker.start_context(None, Context())  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError) as caught:
        paceline.connect().prepare(model, SGD(model.parameters(), lr=0.1), given, batch=batch)
    assert sentence in str(caught.value)
    worker.start_context(None, Context())  # type: ignore[arg-type]
