"""A network that learns from a stream: samples arrive one by one, and their number is unknown.

python examples/10_streaming.py                                    one worker
paceline launch --workers 2 --protocol k-async:2 examples/10_streaming.py

The stream could be a Hugging Face data set (``load_dataset(..., streaming=True)``) or shards of
files: it needs ``__iter__``. With ``state_dict`` and ``load_state_dict`` a run that is resumed, or
whose reading worker died, continues at its place; without, the stream is read again up to there.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=20_000)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()
BATCH_SIZE, WIDTH = 64, 16


class Signals(IterableDataset[Any]):
    """Noisy signals, and whether each is a sine."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < self.size:
            self.position += 1
            yield self.make(self.position)
        self.position = 0

    def make(self, number: int) -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(number)
        signal = torch.randn(WIDTH, generator=noise)
        if number % 2:
            signal += 1.5 * torch.sin(torch.arange(WIDTH) * 0.8 + number)
        return signal, torch.tensor(number % 2)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


torch.manual_seed(0)
pace = paceline.connect()
model = nn.Sequential(
    nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
).to(pace.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(Signals(arguments.samples), batch_size=BATCH_SIZE)
model, optimizer, loader = pace.prepare(model, optimizer, loader)

loss = torch.tensor(torch.nan)  # a worker may be too slow to get a mini-batch
for epoch in pace.epochs(arguments.epochs):
    for signals, targets in loader:
        with pace.step():
            loss = nn.functional.cross_entropy(model(signals), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pace.print(f"epoch {epoch + 1}: version {pace.version}, loss {loss:.3f}")
