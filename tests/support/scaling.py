"""Loops with the user's own GradScaler: ``python scaling.py CASE FOLDER``.

Each step's scale after ``scaler.update()`` goes to FOLDER/CASE-N.pt. The plain way is that of
``loops.py``. It must not know how anything is run.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from dying import Fault, arm
from loops import Results, gather, loss_of, make_loader, make_model
from tiny import EPOCHS, grouped, samples

INIT_SCALE = 1024.0
Overflows = Callable[[Any, int, Tensor], bool]


def scaled(
    pace: Any,
    overflows: Overflows,
    update: Any = GradScaler.update,
    lingers: int = 0,
    fault: Fault | None = None,
    **options: Any,
) -> Results:
    """The README's loop in mixed precision.

    Args:
        overflows: (pace, number of the step, its inputs) -> whether its gradient is inf.
        update: called with the scaler.
        lingers: so many first steps of worker 1 go on until they are superseded; worker 0 pushes
            none of its own before the other's has begun, which thus hears of one at a time.
        fault: where a worker dies.
    """
    model = make_model()
    optimizer = grouped(model.parameters(), 0.3)
    scaler = GradScaler("cpu", init_scale=INIT_SCALE, **options)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    scales, left, number = [], [], 0
    if fault is not None and pace.worker == fault.worker:
        arm(model, fault)
    for _ in pace.epochs(EPOCHS):
        for inputs, targets in loader:
            number += 1
            with pace.step() as step:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                if overflows(pace, number, inputs):
                    loss = loss * float("inf")
                if number <= lingers:
                    _begin_together(pace.worker, number)
                while pace.worker == 1 and number <= lingers:
                    scaler.scale(loss_of(model(inputs), targets)).backward()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update() if update is GradScaler.update else update(scaler)
            scales.append(scaler.get_scale())
            left.append(int(getattr(step, "was_superseded", False)))
    tracker = torch.tensor(scaler._get_growth_tracker())
    ends = {"left": torch.tensor(left), "tracker": tracker}
    return {**gather(model, optimizer), "scales": torch.tensor(scales), **ends}


def _begin_together(worker: int, number: int) -> None:
    begun = Path(sys.argv[2]) / f"begun-{number}"
    if worker == 1:
        begun.touch()
    while not begun.exists():
        time.sleep(0.001)


def in_one_sample(pace: Any, number: int, inputs: Tensor) -> bool:
    """The second half of the second batch of each epoch."""
    poison = samples().train[23][0]
    return bool((inputs == poison).all(dim=1).any())


def in_one_worker(pace: Any, number: int, inputs: Tensor) -> bool:
    return bool(pace.worker == 0 and number == 2)


def in_every_workers_first_step(pace: Any, number: int, inputs: Tensor) -> bool:
    return number == 1


def _set_by_hand(scaler: Any) -> None:
    scaler.update(64.0)


def _load_back(scaler: Any) -> None:
    scaler.load_state_dict(scaler.state_dict())


def _hurry(scaler: Any) -> None:
    scaler.set_growth_interval(1)
    scaler.update()


CASES: dict[str, Callable[[Any], Results]] = {
    "growing": functools.partial(scaled, overflows=in_one_sample, growth_interval=3),
    "dying": functools.partial(
        scaled,
        overflows=in_one_sample,
        growth_interval=3,
        fault=Fault(point="after it brought the scale", call=2),
    ),
    "one overflow": functools.partial(scaled, overflows=in_one_worker),
    "lingering": functools.partial(scaled, overflows=in_one_worker, lingers=3),
    "overflow in all": functools.partial(scaled, overflows=in_every_workers_first_step),
    "set by hand": functools.partial(scaled, overflows=in_one_worker, update=_set_by_hand),
    "loaded": functools.partial(scaled, overflows=in_one_worker, update=_load_back),
    "other rule": functools.partial(scaled, overflows=in_one_worker, update=_hurry),
}


def main() -> None:
    import paceline

    case, folder = sys.argv[1:]
    pace = paceline.connect()
    results = CASES[case](pace)
    torch.save(results, Path(folder) / f"{case}-{pace.worker}.pt")


if __name__ == "__main__":
    main()
