"""Loops on a small network with convolutions, to be computed in several ways: CASE FOLDER.

Results go to FOLDER/CASE-N.pt, with the strides that the parameters have at the end. It must not
know how anything is run.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loops import Results, gather, loss_of
from tiny import EPOCHS

NUM_SAMPLES, BATCH_SIZE = 40, 12


def network() -> nn.Module:
    """(B, 2, 6, 6) -> logits (B, 3), in double precision so that ways can be told apart."""
    torch.manual_seed(11)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def loader(**options: Any) -> "DataLoader[Any]":
    """40 samples in batches of 12: an epoch's last one has 4."""
    generator = torch.Generator().manual_seed(12)
    images = torch.randn(NUM_SAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH_SIZE, **options)


def train(pace: Any, **options: Any) -> Results:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = pace.prepare(model, optimizer, loader(), **options)
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in batches:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    weight = next(model.parameters())
    is_last = weight.is_contiguous(memory_format=torch.channels_last)
    return {**gather(model, optimizer), "channels last": torch.tensor(float(is_last))}


CASES: dict[str, Callable[[Any], Results]] = {"train": train}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save(CASES[case](pace), Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
