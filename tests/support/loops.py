"""Loops of users, run by Paceline as a script and plainly by the tests.

    python loops.py CASE FOLDER       one worker's part of a run; results go to FOLDER/CASE-N.pt

The plain run has a stand-in for ``pace`` that does nothing, so that the code is shared and only
Paceline's work differs. Sequential order, so that batches are the same.

Longer than a file should be: one loop after the other, each to be read by itself.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

from tiny import BATCH_SIZE, EPOCHS, NUM_SAMPLES, Tied, grouped, samples

Results = dict[str, Tensor]
Case = Callable[[Any], Results]
loss_of = nn.functional.cross_entropy
CLIPPED_NORM = 0.45


class Plain:
    """A stand-in for ``pace`` without Paceline: one process, nothing shared."""

    worker = 0
    is_main = True
    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)
    clip_grad_value_ = staticmethod(nn.utils.clip_grad_value_)

    def prepare(self, *objects: Any) -> Any:
        return objects

    def epochs(self, num_epochs: int) -> range:
        return range(num_epochs)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        yield

    def evaluate(self, fn: Any, loader: Any) -> Any:
        totals: dict[str, tuple[float, float]] = {}
        with torch.no_grad():
            for batch in loader:
                for name, (value, count) in fn(batch).items():
                    old = totals.get(name, (0.0, 0.0))
                    totals[name] = (old[0] + float(value), old[1] + count)
        return totals


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return Tied()


def make_loader(**options: Any) -> "DataLoader[Any]":
    options.setdefault("batch_size", BATCH_SIZE)
    return DataLoader(samples().train, **options)


def gather(model: nn.Module, optimizer: Optimizer) -> Results:
    """The model and the whole state of the optimizer."""
    results = {name: value.clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                results[f"{number} {key}"] = torch.as_tensor(value, dtype=torch.float64).clone()
    return results


def one_epoch(
    pace: Any, model: nn.Module, optimizer: Optimizer, loader: Any, after: Any = lambda: None
) -> None:
    """The loop of the README, with ``after`` called after each step."""
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            after()


def with_optimizer(pace: Any, make: Any, learning_rate: float = 0.05) -> Results:
    model = make_model()
    optimizer = grouped(model.parameters(), learning_rate, make)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(EPOCHS):
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


class Centred(Optimizer):
    """A custom optimizer that needs whole tensors: the step is centred in each of them."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    step = parameter.grad - parameter.grad.mean()
                    parameter.data.add_(step, alpha=-group["lr"] / state["count"])


def with_epoch_schedule(pace: Any) -> Results:
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
    return gather(model, optimizer)


def with_version_schedule(pace: Any) -> Results:
    model = make_model()
    optimizer = grouped(model.parameters(), 0.5)
    scheduler = ExponentialLR(optimizer, 0.8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, make_loader(), scheduler)
    for _ in pace.epochs(EPOCHS):
        one_epoch(pace, model, optimizer, loader, after=scheduler.step)
    return gather(model, optimizer)


def with_plateau(pace: Any) -> Results:
    model = make_model()
    optimizer = grouped(model.parameters(), 2.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, make_loader(), scheduler)
    test = DataLoader(samples().test, batch_size=5)  # type: ignore[arg-type]

    def measure(batch: tuple[Tensor, Tensor]) -> dict[str, tuple[float, float]]:
        loss = loss_of(model(batch[0]), batch[1], reduction="sum")
        return {"loss": (float(loss), float(len(batch[1])))}

    for _ in pace.epochs(4):
        one_epoch(pace, model, optimizer, loader)
        total, count = pace.evaluate(measure, test)["loss"]
        scheduler.step(total / count)
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
    assert rates[0] < 2.0, "the plateau was never met: the case shows nothing"
    return {**gather(model, optimizer), "rates": rates}


def with_clipping(pace: Any) -> Results:
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    norms = []
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                norm = pace.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
                optimizer.step()
                norms.append(float(norm))
    return {**gather(model, optimizer), "norms": torch.tensor(norms)}


def with_scaler(pace: Any) -> Results:
    """The second half of the second batch overflows: its update is skipped by all."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    poison = samples().train[23][0]
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                if bool((inputs == poison).all(dim=1).any()):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return gather(model, optimizer)


def accumulating(pace: Any, *, drops_rest: bool) -> Results:
    """Two mini-batches per push; an epoch's last one is left over, and rides on or is dropped."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(EPOCHS):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                (loss_of(model(inputs), targets) / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        if drops_rest:
            optimizer.zero_grad()
    return gather(model, optimizer)


def with_compiled_model(pace: Any, backend: str = "eager") -> Results:
    model: Any = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(
        torch.compile(model, backend=backend), optimizer, make_loader()
    )
    for _ in pace.epochs(EPOCHS):
        one_epoch(pace, model, optimizer, loader)
    if hasattr(pace, "save"):
        pace.save()
    return gather(model, optimizer)


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that contain their index; no ``__getitems__``."""

    def __init__(self) -> None:
        self.samples = samples().train

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (*self.samples[index], index)


def recording(pace: Any, **options: Any) -> Results:
    """Plain training that records which samples each step got."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    if "batch_sampler" not in options:
        options.setdefault("batch_size", BATCH_SIZE)
    loader: Any = DataLoader(Numbered(), **options)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    given = []
    for _ in pace.epochs(EPOCHS):
        for inputs, targets, index in loader:
            given.append(index)
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    lengths = torch.tensor([len(one) for one in given])
    return {**gather(model, optimizer), "given": torch.cat(given), "lengths": lengths}


class UnevenBatches:
    """Custom batches: of 5, 10, 15, ... samples, from the end."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(NUM_SAMPLES))[::-1]
        start = 0
        for size in (5, 10, 15, 20, 10):
            yield order[start : start + size]
            start += size

    def __len__(self) -> int:
        return 5


def skipping(pace: Any) -> Results:
    """Worker 0 gives its second mini-batch back."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    number = 0
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            number += 1
            with pace.step() as step:
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                if number == 2 and pace.worker == 0:
                    step.skip()
                else:
                    optimizer.step()
    return gather(model, optimizer)


def summing(pace: Any) -> Results:
    """``pace.sum`` over all workers, and which is the main one."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    sums = []
    for _ in pace.epochs(EPOCHS):
        one_epoch(pace, model, optimizer, loader)
        sums.append(pace.sum(pace.worker + 1))
    return {"sums": torch.tensor(sums), "is_main": torch.tensor(float(pace.is_main))}


OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(SGD, momentum=0.9, nesterov=True),
    "dampened": functools.partial(SGD, momentum=0.9, dampening=0.5),
    "adam": torch.optim.Adam,
    "adamw": functools.partial(torch.optim.AdamW, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "custom": Centred,
}


def stopping(pace: Any) -> Results:
    """Worker 1 stops the run while the others compute."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(1000):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                if pace.worker == 1 and pace.version == 3:
                    pace.stop()
                optimizer.step()
    results = {name: value.clone() for name, value in model.state_dict().items()}
    return {**results, "version": torch.tensor(pace.version)}


def stopped_plainly(num_updates: int) -> Results:
    """The model after this number of updates."""
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    loader = make_loader()
    while True:
        for inputs, targets in loader:
            if num_updates == 0:
                return model.state_dict()
            num_updates -= 1
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()


CASES: dict[str, Case] = {
    **{name: functools.partial(with_optimizer, make=make) for name, make in OPTIMIZERS.items()},
    "epoch schedule": with_epoch_schedule,
    "version schedule": with_version_schedule,
    "plateau": with_plateau,
    "clipping": with_clipping,
    "scaler": with_scaler,
    "accumulating": functools.partial(accumulating, drops_rest=False),
    "dropping": functools.partial(accumulating, drops_rest=True),
    "compiled": with_compiled_model,
    "compiled backward": functools.partial(with_compiled_model, backend="aot_eager"),
    "recording": recording,
    "one loader worker": functools.partial(recording, num_workers=1),
    "two loader workers": functools.partial(recording, num_workers=2, prefetch_factor=2),
    "own batches": functools.partial(recording, batch_sampler=UnevenBatches()),
    "weighted": lambda pace: recording(
        pace, sampler=WeightedRandomSampler([1.0 + i % 5 for i in range(NUM_SAMPLES)], 40)
    ),
    "subset": lambda pace: recording(pace, sampler=SubsetRandomSampler(range(10, 50))),
    "drop last": functools.partial(recording, batch_size=14, drop_last=True),
    "skipping": skipping,
    "stopping": stopping,
    "summing": summing,
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    results = CASES[case](pace)
    torch.save(results, Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
