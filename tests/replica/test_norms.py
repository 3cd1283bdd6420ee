"""Batch norm sees a mini-batch, not the batch of an update, and the plan says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from paceline.replica.layers import batch_norm_note
from runs import run_script

SCRIPT = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
"""
NOTE = "batch norm normalises each mini-batch of {} samples by itself, not the 16 of an update"


@pytest.mark.parametrize(
    ("protocol", "size"), [("full-sync", 8), ("k-batch-sync:3", 6), ("async", None)]
)
def test_the_plan_says_how_many_samples_batch_norm_sees(
    protocol: str, size: int | None, say: Callable[[str], tuple[int, str, str]]
) -> None:
    Path("train.py").write_text(SCRIPT)
    code, *output = say(f"launch --workers 2 --protocol {protocol} --dry-run train.py")
    assert code == 0
    words = " ".join("".join(output).split())
    assert (NOTE.format(size) in words) if size else ("batch norm" not in words)


def test_without_an_active_batch_norm_nothing_is_noted() -> None:
    assert batch_norm_note(nn.Linear(2, 2), 16, 2) == ()
    assert batch_norm_note(nn.Sequential(nn.BatchNorm1d(2)).eval(), 16, 2) == ()
    assert batch_norm_note(nn.Sequential(nn.InstanceNorm1d(2)), 16, 2) == ()


MEMORY = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader

class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(16, 4))

    def forward(self, inputs):
        outputs = self.layer(inputs)
        with torch.no_grad():
            LINE
        return outputs

pace = paceline.connect()
model = nn.Sequential(Remembering(), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(32, 4), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for inputs in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
"""


@pytest.mark.parametrize("protocol", ["full-sync", "async", "local-sgd:2"])
@pytest.mark.parametrize(
    ("line", "is_said"), [("self.bank[: len(outputs)] = outputs", True), ("pass", False)]
)
def test_a_buffer_that_remembers_samples_is_noted_by_name(
    tmp_path: Path, protocol: str, line: str, *, is_said: bool
) -> None:
    (tmp_path / "train.py").write_text(MEMORY.replace("LINE", line))
    run = run_script(tmp_path / "train.py", tmp_path, workers=2, protocol=protocol, engine="inline")
    notes = [note for note in run.notes if note.startswith("buffer ")]
    assert len(notes) == is_said
    assert all(note.startswith("buffer '0.bank' is written in the forward") for note in notes)
