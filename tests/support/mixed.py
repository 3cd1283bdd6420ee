"""Mixed precision as a script writes it: ``python mixed.py CASE FOLDER``.

The lesson's loop: autocast around forward pass and loss, backward outside it, clipping, a scheduler
a step. ``plainly`` is the same by hand in torch. Results go to FOLDER/CASE-N.pt. It must not know
how anything is run.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ExponentialLR

from loops import CLIPPED_NORM, Results, gather, loss_of, make_loader, make_model
from scaling import in_one_sample, in_one_worker
from tiny import EPOCHS, grouped

LEARNING_RATE, GAMMA = 0.3, 0.9
Overflows = Callable[[Any, int, Tensor], bool]


def never(pace: Any, number: int, inputs: Tensor) -> bool:
    return False


def mixed(pace: Any, overflows: Overflows, as_float: bool = False) -> Results:
    """In fp16; the model is of double precision, which autocast leaves alone, unless as_float."""
    model = make_model().float() if as_float else make_model()
    optimizer = grouped(model.parameters(), LEARNING_RATE)
    scheduler = ExponentialLR(optimizer, GAMMA)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, make_loader(), scheduler)
    number = 0
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            number += 1
            with pace.step():
                optimizer.zero_grad()
                with pace.autocast():
                    outputs = model(inputs.float() if as_float else inputs)
                    loss = loss_of(outputs, targets)
                if overflows(pace, number, inputs):
                    loss = loss * float("inf")
                pace.backward(loss)
                pace.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
                optimizer.step()
                scheduler.step()
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    dtype = torch.tensor(float(outputs.dtype is torch.float16))
    return {**gather(model, optimizer), "rates": rates, "half": dtype}


def plainly(overflows: Overflows) -> Results:
    """The same by hand; the scheduler does not count a skipped update."""
    model = make_model()
    optimizer = grouped(model.parameters(), LEARNING_RATE)
    scheduler, scaler = ExponentialLR(optimizer, GAMMA), GradScaler("cpu")
    number = 0
    for _ in range(EPOCHS):
        for inputs, targets in make_loader():
            number += 1
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            if overflows(None, number, inputs):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() == before:
                scheduler.step()
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    return {**gather(model, optimizer), "rates": rates, "half": torch.tensor(0.0)}


def without_autocast(pace: Any) -> Results:
    """A loop that does not follow ``--precision``."""
    model = make_model()
    optimizer = grouped(model.parameters(), LEARNING_RATE)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            with pace.step():
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    return {}


def without_scaling(pace: Any) -> Results:
    """In autocast, but with a backward pass of its own."""
    model = make_model()
    optimizer = grouped(model.parameters(), LEARNING_RATE)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            with pace.step():
                with pace.autocast():
                    loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
    return {}


CASES: dict[str, Callable[[Any], Results]] = {
    "one sample": functools.partial(mixed, overflows=in_one_sample),
    "one worker": functools.partial(mixed, overflows=in_one_worker),
    "half": functools.partial(mixed, overflows=never, as_float=True),
    "without autocast": without_autocast,
    "without scaling": without_scaling,
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    torch.save(CASES[case](pace), Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
