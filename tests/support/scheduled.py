"""Loops with learning-rate schedulers, each in its own rhythm: ``python scheduled.py CASE FOLDER``.

The same code for Paceline and, with the stand-in of ``loops``, for plain PyTorch. The result of a
worker (parameters, rates, states of schedulers) goes to FOLDER/CASE-N.pt. It must not know how
anything is run.
"""

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset

Schedulers = list[Any]
After = Callable[[Schedulers, int, int, int], None]
"""(schedulers, epoch, number of the batch in the epoch, batches an epoch) after a step."""
EPOCHS, BATCH_SIZE = 3, 8
NUM_SAMPLES = {"whole": 80, "uneven": 73}
"""Ten updates per epoch; the last one has one of 73 samples: a second worker gets none."""


def make(num_samples: int) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    torch.manual_seed(7)
    model = nn.Linear(4, 1).double()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03}]
    optimizer = SGD(groups, lr=0.1, momentum=0.5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return model, optimizer, DataLoader(data, batch_size=BATCH_SIZE)


def train(
    pace: Any,
    made: Callable[[Optimizer], Schedulers],
    *,
    after: After = lambda *_: None,
    before: After = lambda *_: None,
    after_epoch: After = lambda *_: None,
    size: str = "whole",
) -> dict[str, Any]:
    model, optimizer, loader = make(NUM_SAMPLES[size])
    own = made(optimizer)
    model, optimizer, loader, *own = pace.prepare(model, optimizer, loader, *own)
    rates, number = [], len(loader)
    for epoch in pace.epochs(EPOCHS):
        for index, (inputs, targets) in enumerate(loader):
            with pace.step():
                before(own, epoch, index, number)
                optimizer.zero_grad()
                ((model(inputs) - targets) ** 2).mean().backward()
                optimizer.step()
                after(own, epoch, index, number)
                rates.append([group["lr"] for group in optimizer.param_groups])
        after_epoch(own, epoch, 0, number)
    states = [one.state_dict() for one in own]
    torch.save(states, io.BytesIO())  # a user's checkpoint
    return {
        "parameters": {name: value.clone() for name, value in model.state_dict().items()},
        "rates": rates,
        "last": [[group["lr"] for group in optimizer.param_groups]],
        "momenta": [group["momentum"] for group in optimizer.param_groups],
        "states": copy.deepcopy(states),
        "number": number,
        "version": getattr(pace, "version", 0),
    }


def scaled(pace: Any, made: Any, after: After, *, looks: bool) -> dict[str, Any]:
    """With the script's own GradScaler; the gradient of every seventh batch is inf.

    Args:
        looks: whether the loop leaves its scheduler out after a step that the scaler skipped.
    """
    model, optimizer, loader = make(80)
    own = made(optimizer)
    model, optimizer, loader, *own = pace.prepare(model, optimizer, loader, *own)
    scaler, rates = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for epoch in pace.epochs(EPOCHS):
        for index, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss = ((model(inputs) - targets) ** 2).mean()
                scaler.scale(loss * float("inf") if index % 7 == 0 else loss).backward()
                scaler.step(optimizer)
                before = scaler.get_scale()
                scaler.update()
                if not looks or scaler.get_scale() == before:
                    after(own, epoch, index, len(loader))
                rates.append([group["lr"] for group in optimizer.param_groups])
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    return {"parameters": parameters, "rates": rates}


def each(own: Schedulers, *_: int) -> None:
    for one in own:
        one.step()


def first(own: Schedulers, *_: int) -> None:
    own[0].step()


def second(own: Schedulers, *_: int) -> None:
    own[1].step()


def every_fourth(at: int) -> After:
    def after(own: Schedulers, epoch: int, index: int, _: int) -> None:
        if index % 4 == at:
            own[0].step()

    return after


def fraction(own: Schedulers, epoch: int, index: int, number: int) -> None:
    own[0].step(epoch + index / number)


def metric(own: Schedulers, epoch: int, index: int, number: int) -> None:
    if index % 2:
        own[0].step(1.0 if index % 4 == 1 else 2.0)


def warming(own: Schedulers, epoch: int, index: int, number: int) -> None:
    if epoch * number + index < 13:
        own[0].step()


def at_the_end(own: Schedulers, epoch: int, index: int, number: int) -> None:
    if index == number - 1:
        own[0].step()


def twice(own: Schedulers, *_: int) -> None:
    own[0].step()
    own[0].step()


def late(own: Schedulers, epoch: int, index: int, number: int) -> None:
    if epoch >= 1:
        own[0].step()


def sequential(optimizer: Optimizer) -> Schedulers:
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=5), lr.ExponentialLR(optimizer, 0.9)]
    return [lr.SequentialLR(optimizer, parts, milestones=[5])]


def chained(optimizer: Optimizer) -> Schedulers:
    parts = [lr.ConstantLR(optimizer, 0.5, total_iters=7), lr.ExponentialLR(optimizer, 0.95)]
    return [lr.ChainedScheduler(parts, optimizer=optimizer)]


def with_closure(optimizer: Optimizer) -> Schedulers:
    width = 30.0
    return [lr.LambdaLR(optimizer, [lambda n: 1 - n / (width + 5), lambda n: 1 / (1 + n)])]


def exponential(optimizer: Optimizer) -> Schedulers:
    return [lr.ExponentialLR(optimizer, 0.9)]


def two(optimizer: Optimizer) -> Schedulers:
    return [lr.ExponentialLR(optimizer, 0.97), lr.StepLR(optimizer, 1, gamma=0.5)]


def plateau(optimizer: Optimizer) -> Schedulers:
    return [lr.ReduceLROnPlateau(optimizer, factor=0.7, patience=1)]


def restarts(optimizer: Optimizer) -> Schedulers:
    return [lr.CosineAnnealingWarmRestarts(optimizer, T_0=7)]


def one_cycle(optimizer: Optimizer) -> Schedulers:
    return [lr.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=31)]


def loading(own: Schedulers, epoch: int, *_: int) -> None:
    """Between epochs the state of a scheduler ten steps ahead is loaded."""
    if epoch == 0:
        _, optimizer, _ = make(8)
        further = lr.CosineAnnealingLR(optimizer, T_max=40)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what step() notes for them
        for _ in range(10):
            further.step()
        own[0].load_state_dict(further.state_dict())


def loading_inside(own: Schedulers, epoch: int, index: int, number: int) -> None:
    own[0].load_state_dict(own[0].state_dict())


def loaded(optimizer: Optimizer) -> Schedulers:
    """With a state loaded before ``prepare``."""
    scheduler = lr.CosineAnnealingLR(optimizer, T_max=40)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 7, "_step_count": 8})
    return [scheduler]


def cosine(optimizer: Optimizer) -> Schedulers:
    return [lr.CosineAnnealingLR(optimizer, T_max=40)]


def nine(optimizer: Optimizer) -> Schedulers:
    return [lr.ExponentialLR(optimizer, 0.99) for _ in range(9)]


CASES: dict[str, dict[str, Any]] = {
    "each": {"made": exponential, "after": each},
    "each, before": {"made": exponential, "before": each},
    "each, from the second epoch": {"made": exponential, "after": late},
    "an epoch": {"made": exponential, "after_epoch": each},
    "sequential": {"made": sequential, "after": each},
    "chained": {"made": chained, "after": each},
    "one cycle": {"made": one_cycle, "after": each},
    "restarts": {"made": restarts, "after": each},
    "restarts, a fraction": {"made": restarts, "after": fraction},
    "closure": {"made": with_closure, "after": each},
    "two rhythms": {"made": two, "after": first, "after_epoch": second},
    "every fourth, last": {"made": exponential, "after": every_fourth(3)},
    "every fourth, first": {"made": exponential, "after": every_fourth(0)},
    "warming up": {"made": exponential, "after": warming},
    "at the end, inside": {"made": exponential, "after": at_the_end},
    "twice": {"made": exponential, "after": twice},
    "loaded before": {"made": loaded, "after": each},
    "loaded between": {"made": cosine, "after": each, "after_epoch": loading},
    "plateau inside": {"made": plateau, "after": metric},
}
EACH = [name for name in CASES if "after" in CASES[name] and CASES[name]["after"] in (each, first)]
"""Schedulers that step once per update."""
OTHER = [
    "restarts, a fraction", "every fourth, last", "every fourth, first", "warming up",
    "at the end, inside", "twice", "plateau inside",
]  # fmt: skip


REFUSED: dict[str, dict[str, Any]] = {
    "loaded inside": {"made": cosine, "after": loading_inside},
    "nine": {"made": nine},
}


def run(pace: Any, case: str) -> dict[str, Any]:
    name, _, size = case.partition(" / ")
    if name.startswith("scaled, "):
        looks, name = name.startswith("scaled, looking, "), name.rpartition(", ")[2]
        return scaled(pace, CASES[name]["made"], CASES[name]["after"], looks=looks)
    if name == "a metric of one's own":
        return train(pace, made=plateau, after=lambda own, *_: own[0].step(1.0 + pace.worker))
    return train(pace, size=size or "whole", **(CASES | REFUSED)[name])


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save(run(pace, case), Path(folder) / f"result-{pace.worker}.pt")


if __name__ == "__main__":
    main()
