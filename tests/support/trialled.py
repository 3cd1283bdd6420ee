"""Searches: several models trained one after another in one script, by Paceline and plainly.

    python trialled.py CASE FOLDER [WHAT HAPPENS]       results go to FOLDER/result-N.pt

In float64 and in order: several workers under full-sync get the same result as one process with
whole batches. WHAT HAPPENS occurs in one worker, or in all, in the second trial.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

BATCH, EPOCHS, SAMPLES = 16, 2, 64
RATES = (0.3, 0.1, 0.03)


def points() -> TensorDataset:
    numbers = torch.arange(SAMPLES * 3, dtype=torch.float64).reshape(SAMPLES, 3)
    inputs = torch.sin(numbers)
    return TensorDataset(inputs, torch.cos(inputs.sum(1, keepdim=True)))


class Points(IterableDataset):  # type: ignore[type-arg]
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points())


def network(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def count(model: nn.Module) -> Callable[[Any], Any]:
    def fn(batch: Any) -> dict[str, tuple[float, int]]:
        return {"loss": (float(loss_of(model, batch)) * len(batch[0]), len(batch[0]))}

    return fn


class Plain:
    """A stand-in for ``pace`` without Paceline."""

    worker, num_workers = 0, 1

    def trial(self, name: str | None = None) -> Any:
        return nullcontext()

    def prepare(self, *objects: Any, **_: Any) -> Any:
        return objects

    def epochs(self, epochs: int) -> Iterator[int]:
        return iter(range(epochs))

    def updates(self, updates: int, loader: Any = None) -> Iterator[Any]:
        made = 0
        while made < updates:
            for batch in [made] if loader is None else loader:
                if made == updates:
                    return
                made += 1
                yield batch

    def step(self) -> Any:
        return nullcontext()

    def evaluate(self, fn: Any, loader: Any) -> dict[str, tuple[float, float]]:
        with torch.no_grad():
            found = [fn(batch)["loss"] for batch in loader]
        return {"loss": (sum(one for one, _ in found), float(sum(num for _, num in found)))}

    def clip_grad_norm_(self, parameters: Any, most: float) -> Any:
        return nn.utils.clip_grad_norm_(parameters, most)


Happen = Callable[[Any, int, int], None]
"""Of pace, the number of the trial, and that of the batch: -1 before prepare, -2 between trials."""


def _nothing(pace: Any, number: int, batch: int) -> None:
    return None


class Search:
    """One search: its models and results.

    Args:
        happen: called where something may happen.
        rates: of the trials.
    """

    def __init__(
        self, pace: Any, happen: Happen = _nothing, rates: tuple[float, ...] = RATES
    ) -> None:
        self.pace, self.happen, self.rates = pace, happen, rates
        self.found: dict[str, Tensor] = {}
        self.data = points()
        self.test = DataLoader(self.data, batch_size=10)
        self.loader: Any = DataLoader(self.data, batch_size=BATCH)

    def note(self, number: int, model: nn.Module, **others: Any) -> None:
        for name, value in {**model.state_dict(), **others}.items():
            value = value if isinstance(value, Tensor) else torch.tensor(value)
            self.found[f"{number} {name}"] = value.detach().clone()

    def train(self, number: int, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for _ in self.pace.epochs(EPOCHS):
            for batch_number, batch in enumerate(loader):
                with self.pace.step():
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    self.happen(self.pace, number, batch_number)
                    optimizer.step()

    def evaluated(self, model: nn.Module) -> float:
        found = self.pace.evaluate(count(model), self.test)["loss"]
        return float(found[0] / found[1])

    def trials(self) -> Iterator[tuple[int, float]]:
        """The turns of the search."""
        for number, rate in enumerate(self.rates):
            self.happen(self.pace, number, -2)
            yield number, rate


def momentum(optimizer: Any) -> dict[str, Any]:
    rows = optimizer.state_dict()["state"]
    return {f"state {key} {name}": one for key, row in rows.items() for name, one in row.items()}


def _sgd(search: Search) -> None:
    """Each trial has its own model, optimizer and loader."""
    pace = search.pace
    for number, rate in search.trials():
        with pace.trial(f"lr-{rate}"):
            torch.manual_seed(0)
            model = network()
            search.happen(pace, number, -1)
            optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
            loader = DataLoader(search.data, batch_size=BATCH)
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            search.train(number, model, optimizer, loader)
            value = search.evaluated(model)
        search.note(number, model, value=value, **momentum(optimizer))


def _later(search: Search) -> None:
    """A model trained in one trial is used plainly during and after other trials."""
    pace, models = search.pace, []
    for number, rate in search.trials():
        with pace.trial():
            torch.manual_seed(0)
            model, optimizer = network(4 + 3 * number), None
            optimizer = Adam(model.parameters(), lr=rate)
            scheduler = StepLR(optimizer, 3, 0.5)
            model, optimizer, loader, scheduler = pace.prepare(
                model, optimizer, DataLoader(search.data, batch_size=BATCH), scheduler
            )
            for _ in pace.epochs(EPOCHS):
                for batch in loader:
                    with pace.step():
                        optimizer.zero_grad()
                        loss_of(model, batch).backward()
                        pace.clip_grad_norm_(model.parameters(), 0.1)
                        optimizer.step()
                    scheduler.step()
        models.append((model, optimizer, loader, scheduler))
    for number, (model, optimizer, loader, scheduler) in enumerate(models):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
        search.note(number, model, rate=scheduler.get_last_lr()[0], **momentum(optimizer))


def _again(search: Search) -> None:
    """One model, one optimizer and one loader, trained further in each trial."""
    pace, model = search.pace, network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = search.loader
    for number, rate in search.trials():
        with pace.trial():
            optimizer.param_groups[0]["lr"] = rate
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            search.train(number, model, optimizer, loader)
        search.note(number, model, **momentum(optimizer))


def _counted(search: Search) -> None:
    """Loops that count updates, over a loader and over numbers."""
    pace = search.pace
    for number, rate in search.trials():
        with pace.trial():
            torch.manual_seed(0)
            model = network()
            optimizer = SGD(model.parameters(), lr=rate)
            model, optimizer, loader = pace.prepare(model, optimizer, search.loader)
            for batch in pace.updates(6 + number, loader):
                with pace.step():
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    optimizer.step()
        search.note(number, model)


def _stream(search: Search) -> None:
    pace = search.pace
    for number, rate in search.trials():
        with pace.trial():
            torch.manual_seed(0)
            model = network()
            optimizer = SGD(model.parameters(), lr=rate)
            loader = DataLoader(Points(), batch_size=BATCH)
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            search.train(number, model, optimizer, loader)
        search.note(number, model)


def _two(search: Search) -> None:
    """Two optimizers, each with a part of the model."""
    pace = search.pace
    for number, rate in search.trials():
        with pace.trial():
            torch.manual_seed(0)
            model: Any = network()
            first = SGD(model[0].parameters(), lr=rate)
            last = SGD(model[2].parameters(), lr=rate / 2, momentum=0.5)
            loader = DataLoader(search.data, batch_size=BATCH)
            model, first, last, loader = pace.prepare(model, first, last, loader)
            for _ in pace.epochs(EPOCHS):
                for batch in loader:
                    with pace.step():
                        for one in (first, last):
                            one.zero_grad()
                            loss_of(model, batch).backward()
                            one.step()
        search.note(number, model, **momentum(last))


def _scaled(search: Search) -> None:
    """One GradScaler for all trials."""
    pace, scaler = search.pace, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for number, rate in search.trials():
        with pace.trial():
            torch.manual_seed(0)
            model = network()
            optimizer = SGD(model.parameters(), lr=rate)
            loader = DataLoader(search.data, batch_size=BATCH)
            model, optimizer, loader = pace.prepare(model, optimizer, loader)
            for _ in pace.epochs(EPOCHS):
                for batch in loader:
                    with pace.step():
                        optimizer.zero_grad()
                        scaler.scale(loss_of(model, batch)).backward()
                        scaler.step(optimizer)
                        scaler.update()
        search.note(number, model, scale=scaler.get_scale())


CASES: dict[str, Callable[[Search], None]] = {
    "sgd": _sgd, "later": _later, "again": _again, "counted": _counted, "stream": _stream,
    "two": _two, "scaled": _scaled,
}  # fmt: skip


def find(case: str, pace: Any, happen: Happen = _nothing) -> dict[str, Tensor]:
    """The results of a search."""
    torch.manual_seed(0)
    search = Search(pace, happen)
    CASES[case](search)
    return search.found


# -- events ----------------------------------------------------------------------------------------


class Pruned(Exception):
    """Raised by a script to leave a trial."""


def _dies(seat: int, at: int) -> Happen:
    def happen(pace: Any, number: int, batch: int) -> None:
        if (pace.worker, number, batch) == (seat, 1, at):
            os.kill(os.getpid(), signal.SIGKILL)

    return happen


def _fails(seats: tuple[int, ...], at: int) -> Happen:
    def happen(pace: Any, number: int, batch: int) -> None:
        if (number, batch) == (1, at) and pace.worker in seats:
            raise Pruned("no good")

    return happen


def _lingers(pace: Any, number: int, batch: int) -> None:
    """Wait in the second trial until stopped; a file reports that it waits."""
    if (number, batch) == (1, 1):
        Path(sys.argv[2], f"lingers-{pace.worker}").touch()
        time.sleep(0.2)


HAPPENS: dict[str, Happen] = {
    "nothing": _nothing,
    "1 dies": _dies(1, 2),
    "0 dies": _dies(0, 2),
    "1 dies before prepare": _dies(1, -1),
    "1 dies between": _dies(1, -2),
    "all fail": _fails((0, 1), 1),
    "1 fails": _fails((1,), 1),
    "0 fails": _fails((0,), 1),
    "1 fails before prepare": _fails((1,), -1),
    "lingers": _lingers,
}


class Catching:
    """A ``pace`` whose trials may fail: the script continues with the next one."""

    def __init__(self, pace: Any, said: list[str]) -> None:
        self._pace, self._said = pace, said

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pace, name)

    @contextmanager
    def trial(self, name: str | None = None) -> Iterator[None]:
        try:
            with self._pace.trial(name):
                yield
        except Exception as error:
            self._said.append(f"{type(error).__name__}: {error}")


def main() -> None:
    import paceline

    case, folder, what = sys.argv[1], sys.argv[2], [*sys.argv[3:], "nothing"][0]
    pace: Any = paceline.connect()
    said: list[str] = []
    if "fail" in what:
        pace = Catching(pace, said)
    search = Search(pace, HAPPENS[what])
    torch.manual_seed(0)
    try:
        CASES[case](search)
    finally:
        found = {"found": search.found, "said": said, "is_main": pace.is_main}
        torch.save(found, Path(folder, f"result-{pace.worker}.pt"))


if __name__ == "__main__":
    main()
