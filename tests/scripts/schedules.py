"""Scripts with learning-rate schedules: once an epoch, once a step, both, by a metric, by hand.

Longer than a file should be: one script after the other, each to be read by itself.
"""

import math
from typing import Any

import torch
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import DataLoader

import paceline

from .base import SEVERAL, Record, Refusal, Script, gathered, loose, several
from .usual import count_right, held_out, loss_of, network, one_epoch, points


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def step_lr_unprepared(record: Record) -> None:
    """StepLR once an epoch, not prepared."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
        record.fact(rate=scheduler.get_last_lr(), epoch=scheduler.last_epoch)
    record.state(model, optimizer)


def step_lr_prepared(record: Record) -> None:
    """StepLR once an epoch, prepared."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
        record.fact(rate=scheduler.get_last_lr(), epoch=scheduler.last_epoch)
    record.state(model, optimizer)


def stepping(record: Record, make: Any, **options: Any) -> None:
    """A prepared scheduler, stepped after every optimizer step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = make(optimizer, **options)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
        record.fact(rate=rates(optimizer))
    record.state(model, optimizer)


def exponential_each_step(record: Record) -> None:
    """ExponentialLR once a step."""
    stepping(record, lr_scheduler.ExponentialLR, gamma=0.93)


def one_cycle(record: Record) -> None:
    """OneCycleLR, which moves the momentum, too."""
    stepping(record, lr_scheduler.OneCycleLR, max_lr=0.6, total_steps=26)


def cyclic(record: Record) -> None:
    """CyclicLR, up and down."""
    stepping(record, lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=4)


def lambda_warmup(record: Record) -> None:
    """LambdaLR: warm-up, then inverse square root."""
    rule = lambda step: min((step + 1) / 5, math.sqrt(5 / (step + 1)))  # noqa: E731  a user's own
    stepping(record, lr_scheduler.LambdaLR, lr_lambda=rule)


def warmup_then_cosine(record: Record) -> None:
    """SequentialLR: linear warm-up, then a cosine."""

    def make(optimizer: Optimizer) -> Any:
        first = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
        second = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])

    stepping(record, make)


def chained(record: Record) -> None:
    """ChainedScheduler of two."""

    def make(optimizer: Optimizer) -> Any:
        first = lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=5)
        return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.95)])

    stepping(record, make)


def outside_the_block(record: Record) -> None:
    """The scheduler is stepped in the loop, after the block."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.93)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            scheduler.step()
        record.fact(rate=rates(optimizer))
    record.state(model, optimizer)


def each_step_unprepared(record: Record) -> None:
    """ExponentialLR once a step, not prepared."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
    record.state(model, optimizer)


def cosine_each_epoch(record: Record) -> None:
    """CosineAnnealingLR once an epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
        record.fact(rate=rates(optimizer))
    record.state(model, optimizer)


def step_and_epoch(record: Record) -> None:
    """Two prepared schedulers: warm-up once a step, decay once an epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=8)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, warmup, decay = pace.prepare(model, optimizer, loader, warmup, decay)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                warmup.step()
        decay.step()
        record.fact(rate=rates(optimizer), warm=warmup.last_epoch, decayed=decay.last_epoch)
    record.state(model, optimizer)


def plateau(record: Record) -> None:
    """ReduceLROnPlateau by an evaluation."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        total, count = pace.evaluate(count_right(model), DataLoader(held_out(), 5))["loss"]
        scheduler.step(total / count)
        record.epoch(rate=rates(optimizer), loss=total / count)
    record.state(model, optimizer)


def plateau_by_own_loss(record: Record) -> None:
    """ReduceLROnPlateau by the training loss that this worker has seen."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        total, count = 0.0, 0
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                total, count = total + loss.item(), count + 1
        scheduler.step(total / max(count, 1))
        record.epoch(rate=rates(optimizer))
    record.state(model, optimizer)


def plateau_and_warmup(record: Record) -> None:
    """ReduceLROnPlateau beside a warm-up once a step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.4)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)
    falling = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9)
    loader = DataLoader(points(), batch_size=8)
    prepared = pace.prepare(model, optimizer, loader, warmup, falling)
    model, optimizer, loader, warmup, falling = prepared
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                warmup.step()
        total, count = pace.evaluate(count_right(model), DataLoader(held_out(), 5))["loss"]
        falling.step(total / count)
        record.epoch(rate=rates(optimizer))
    record.state(model, optimizer)


def plateau_each_step(record: Record) -> None:
    """ReduceLROnPlateau in the loop, by the loss of the step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                scheduler.step(loss.item())
    record.state(model, optimizer)


def rate_by_own_loss(record: Record) -> None:
    """The rate is a function of the step's loss, written into the groups."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * loss.item()
                optimizer.step()
    record.state(model, optimizer)


def every_other_step(record: Record) -> None:
    """ExponentialLR at every second step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.85)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                if number % 2 == 1:
                    scheduler.step()
        record.fact(rate=rates(optimizer))
    record.state(model, optimizer)


def rate_by_hand_each_epoch(record: Record) -> None:
    """The rate is written into the groups between epochs."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * 0.7**epoch
        one_epoch(pace, model, optimizer, loader)
        record.fact(rate=rates(optimizer))
    record.state(model, optimizer)


def rate_by_hand_each_step(record: Record) -> None:
    """The rate is a function of the number of steps, written into the groups."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    number = 0
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                for group in optimizer.param_groups:
                    group["lr"] = 0.4 / (1 + 0.1 * number)
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            number += 1
    record.state(model, optimizer)


def rate_by_hand_together(record: Record) -> None:
    """The same with prepare(..., together=True), which says so before the first step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, together=True)
    number = 0
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                for group in optimizer.param_groups:
                    group["lr"] = 0.4 / (1 + 0.1 * number)
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            number += 1
    record.state(model, optimizer)


def scheduler_checkpoint(record: Record) -> None:
    """The prepared scheduler's own state, saved and loaded by a new one."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
    path = record.folder / f"scheduler-{pace.worker}.pt"
    torch.save(scheduler.state_dict(), path)
    other = lr_scheduler.StepLR(SGD(network().parameters(), lr=0.3), step_size=1, gamma=0.5)
    other.load_state_dict(torch.load(path))
    record.fact(epoch=other.last_epoch, rate=other.get_last_lr())
    record.state(model, optimizer)


CONFLICT = "different optimizer settings"
LOCAL = {one.name: Refusal(CONFLICT) for one in SEVERAL if one.is_local}
METRIC = f"{CONFLICT}|with an argument|by a metric of this worker's own"
RHYTHM = "every 2|every second|every other|rhythm"

SCRIPTS = (
    Script(step_lr_unprepared),
    Script(step_lr_prepared),
    Script(exponential_each_step),
    Script(one_cycle),
    Script(cyclic),
    Script(lambda_warmup),
    Script(warmup_then_cosine),
    Script(chained),
    Script(outside_the_block),
    Script(each_step_unprepared, refused=loose("it was not prepared")),
    Script(cosine_each_epoch),
    Script(step_and_epoch),
    Script(plateau),
    Script(plateau_by_own_loss, refused=several("with different")),
    Script(plateau_and_warmup),
    Script(plateau_each_step, refused=several(METRIC)),
    Script(rate_by_own_loss, refused={**gathered(CONFLICT), **LOCAL}),
    Script(every_other_step, refused=loose(RHYTHM)),
    Script(rate_by_hand_each_epoch),
    Script(rate_by_hand_each_step, refused=loose(CONFLICT, is_sure=False)),
    Script(rate_by_hand_together, refused=loose(r"together=True\) under")),
    Script(scheduler_checkpoint),
)
