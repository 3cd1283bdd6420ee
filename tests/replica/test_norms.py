"""Batch norm sees a mini-batch, not an update's batch, and the plan says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from paceline.replica.layers import batch_norm_note

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
    code, *said = say(f"launch --workers 2 --protocol {protocol} --dry-run train.py")
    assert code == 0
    words = " ".join("".join(said).split())
    assert (NOTE.format(size) in words) if size else ("batch norm" not in words)


def test_without_batch_norm_or_with_a_frozen_one_nothing_is_said() -> None:
    assert batch_norm_note(nn.Linear(2, 2), 16, 2) == ()
    assert batch_norm_note(nn.Sequential(nn.BatchNorm1d(2)).eval(), 16, 2) == ()
    assert batch_norm_note(nn.Sequential(nn.InstanceNorm1d(2)), 16, 2) == ()
