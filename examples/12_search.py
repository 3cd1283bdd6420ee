"""A search over learning rates: several models, one after another, each a run of its own.

python examples/12_search.py                                         one worker
paceline launch --workers 2 --protocol k-batch-sync:2 examples/12_search.py

If a loss explodes, an exception leaves the trial, in all workers, and the search continues.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from images import open_images

parser = argparse.ArgumentParser()
parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.1, 1.0, 1e4])
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=4096, help="number of training images to use")
arguments = parser.parse_args()

torch.manual_seed(0)
pace = paceline.connect()
train_images, test_images = open_images(arguments.samples)
accuracies: dict[float, float] = {}


def count(batch: Any) -> dict[str, tuple[float, int]]:
    inputs, targets = batch
    return {"acc": (float((model(inputs).argmax(1) == targets).sum()), len(targets))}


for rate in arguments.rates:
    try:
        with pace.trial(f"lr-{rate:g}"):
            layers = nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)
            model: Any = nn.Sequential(*layers).to(pace.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            loader = DataLoader(train_images, batch_size=64, shuffle=True)
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            for _ in pace.epochs(arguments.epochs):
                for inputs, targets in loader:
                    with pace.step():
                        optimizer.zero_grad()
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                        if not loss < 100:
                            raise ArithmeticError(f"the loss is {loss:g}")
                        loss.backward()
                        optimizer.step()
            right, num_samples = pace.evaluate(count, DataLoader(test_images, 1000))["acc"]
            accuracies[rate] = right / num_samples
            pace.print(f"learning rate {rate:g}: test accuracy {accuracies[rate]:.4f}")
    except ArithmeticError as error:
        pace.print(f"learning rate {rate:g}: left, {error}")

pace.print(f"the best learning rate is {max(accuracies, key=lambda rate: accuracies[rate]):g}")
