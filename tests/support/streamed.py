"""A loop over a stream, run by Paceline as a script and plainly by the tests.

    python streamed.py FOLDER {JSON}         results go to FOLDER/result-N.pt

In float64, so that the order of sums does not matter. Samples follow from their number.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from struck import has_stepped, wait_for_kills

Results = dict[str, Tensor]


def sample(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.rand(3, dtype=torch.float64, generator=generator)
    return inputs, inputs.sum().reshape(1) + torch.rand(1, dtype=torch.float64, generator=generator)


class Stream(IterableDataset[Any]):
    """Samples 0, 1, ...; its loader workers share them out.

    Args:
        size: number of samples; -1: endless.
        kind: what a sample is: "tuple" or "dict".
        count: a file whose length is the number of samples read.
        fails_at: a sample that cannot be read.
        slow_s: duration of a sample.
    """

    def __init__(
        self,
        size: int,
        kind: str = "tuple",
        count: Path | None = None,
        fails_at: int = -1,
        slow_s: float = 0.0,
    ) -> None:
        self.size, self.kind, self.count = size, kind, count
        self.fails_at, self.slow_s = fails_at, slow_s

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.size < 0 or number < self.size:
            if number == self.fails_at:
                raise ValueError(f"sample {number} is broken")
            if self.count is not None:
                with self.count.open("a") as file:
                    file.write(".")
            time.sleep(self.slow_s)
            inputs, targets = sample(number)
            yield {"inputs": inputs, "targets": targets} if self.kind == "dict" else (
                inputs, targets
            )  # fmt: skip
            number += step


class Stateful(Stream):
    """A stream that knows its position and counts its samples over all lives."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.size:
            if self.count is not None:
                with self.count.open("a") as file:
                    file.write(".")
            time.sleep(self.slow_s)
            self.position += 1
            yield sample(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch.values() if isinstance(batch, dict) else batch
    return nn.functional.mse_loss(model(inputs), targets)


def gather(model: nn.Module) -> Results:
    return {name: value.clone() for name, value in model.state_dict().items()}


def twin(
    seed: int, epochs: int, parts: int, size: int, batch_size: int, accumulate: int = 1
) -> Results:
    """The same in plain PyTorch: update v averages the mini-batches v K to v K + K - 1.

    Args:
        parts: mini-batches of a batch; K is these, times ``accumulate``.
    """
    from paceline import step_seed

    model, optimizer = make()
    for epoch in range(epochs):
        batches = list(DataLoader(Stream(size), batch_size=batch_size // parts))
        each = parts * accumulate
        for first in range(0, len(batches), each):
            some = batches[first : first + each]
            num_samples = sum(len(inputs) for inputs, _ in some)
            optimizer.zero_grad()
            for number, batch in enumerate(some, first):
                torch.manual_seed(step_seed(seed, epoch, number))
                (loss_of(model, batch) * len(batch[0]) / num_samples).backward()
            optimizer.step()
    return gather(model)


def train(pace: Any, loader: Any, options: dict[str, Any], folder: Path | None = None) -> Results:
    model, optimizer = make()
    batch, accumulate = options.get("batch", "global"), options.get("accumulate", 1)
    model, optimizer, loader = pace.prepare(
        model, optimizer, loader, batch=batch, accumulate=accumulate
    )

    def step(batch: Any) -> None:
        with pace.step():
            time.sleep(options.get("step_s", 0.0))
            if "struck_over" in options and folder is not None:
                wait_for_kills(folder, pace.version / options["struck_over"])
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        if folder is not None:
            has_stepped(folder, pace.worker)
        if folder is not None and pace.version >= options.get("say_at", 1 << 60):
            (folder / "is-there").touch()

    if "updates" in options:
        for updates in options["updates"]:
            for one in pace.updates(updates, loader):
                step(one)
    else:
        for _ in pace.epochs(options.get("epochs", 1)):
            for one in loader:
                step(one)
    return gather(model)


def loader_of(options: dict[str, Any], folder: Path | None = None) -> Any:
    kind = Stateful if options.get("is_stateful") else Stream
    chosen = {name: options[name] for name in ("kind", "fails_at", "slow_s") if name in options}
    if folder is not None and options.get("counts"):
        chosen["count"] = folder / "read"
    return DataLoader(
        kind(options["size"], **chosen),
        batch_size=options.get("batch_size", 4),
        num_workers=options.get("num_workers", 0),
        drop_last=options.get("drop_last", False),
    )


if __name__ == "__main__":
    import paceline

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    pace = paceline.connect()
    results = train(pace, loader_of(options, folder), options, folder)
    torch.save(results, folder / f"result-{pace.worker}.pt")
