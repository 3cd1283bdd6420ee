"""Scripts that accumulate gradients over batches, evenly and with a rest at the epoch's end."""

import torch
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

import paceline

from .base import SAMPLES, Record, Script, several
from .samples import Endless
from .usual import Numbered, loss_of, network, points


def every_two(record: Record) -> None:
    """Two batches an update."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                (loss_of(model(inputs), targets) / 2).backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    record.state(model, optimizer)


def accumulating(record: Record, every: int, *, drops_rest: bool) -> None:
    """Several batches an update, which do not divide the epoch's 8."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        if drops_rest:
            optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                (loss_of(model(inputs), targets) / every).backward()
                if (number + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        record.state(model, optimizer)


def rest_dropped(record: Record) -> None:
    """Three batches an update; zero_grad drops the rest at the epoch's end."""
    accumulating(record, 3, drops_rest=True)


def rest_kept(record: Record) -> None:
    """Three batches an update; the rest rides on the next epoch's first update."""
    accumulating(record, 3, drops_rest=False)


def every_five_over_epochs(record: Record) -> None:
    """Five batches an update, counted over epochs."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    number = 0
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                (loss_of(model(inputs), targets) / 5).backward()
                number += 1
                if number % 5 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    record.state(model, optimizer)


def or_the_last(record: Record) -> None:
    """Three batches an update, and the epoch's last one steps, too: ``len(loader)``."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader, 1):
            with pace.step():
                (loss_of(model(inputs), targets) / 3).backward()
                if number % 3 == 0 or number == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
    record.state(model, optimizer)


def rest_stepped_after_the_loop(record: Record) -> None:
    """Three batches an update; the rest is stepped behind the loop."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader, 1):
            with pace.step():
                (loss_of(model(inputs), targets) / 3).backward()
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    record.state(model, optimizer)


def with_clip_and_schedule(record: Record) -> None:
    """Two batches an update, clipped, with a schedule that counts updates."""
    pace = paceline.connect()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                (loss_of(model(inputs), targets) / 2).backward()
                if number % 2 == 1:
                    pace.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    record.fact(rate=scheduler.get_last_lr())
    record.state(model, optimizer)


def two_batches_a_block(record: Record) -> None:
    """Each block takes two batches from the iterator."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        batches = iter(loader)
        for inputs, targets in batches:
            with pace.step():
                optimizer.zero_grad()
                more, others = next(batches)
                loss = loss_of(model(inputs), targets) + loss_of(model(more), others)
                (loss / 2).backward()
                optimizer.step()
    record.state(model, optimizer)


def micro_batches(record: Record) -> None:
    """Each batch goes through the network in two halves."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                for half, those in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                    (loss_of(model(half), those) / 2).backward()
                optimizer.step()
    record.state(model, optimizer)


def accumulate_flag(record: Record) -> None:
    """prepare(..., accumulate=3) and a loop that steps on each batch, clips and schedules."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader, scheduler = pace.prepare(
        model, optimizer, loader, scheduler, accumulate=3
    )
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                pace.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
        record.state(model, optimizer)
    record.fact(rate=scheduler.get_last_lr(), batches=len(loader))


def accumulated_by_hand(record: Record) -> None:
    """What that comes to: three batches an update, and the epoch's last two."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        num_added = 0
        for number, (inputs, targets) in enumerate(loader, 1):
            loss_of(model(inputs), targets).backward()
            num_added += 1
            if number % 3 == 0 or number == len(loader):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= num_added
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                num_added = 0
        record.state(model, optimizer)
    record.fact(rate=scheduler.get_last_lr(), batches=len(loader))


def accumulate_flag_two_optimizers(record: Record) -> None:
    """The same of two optimizers that step in each block, zeroed behind their steps."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.2), SGD(model[2].parameters(), lr=0.3)
    loader = DataLoader(points(), batch_size=8)
    model, first, second, loader = pace.prepare(model, first, second, loader, accumulate=2)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                loss_of(model(inputs), targets).backward()
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
        record.state(model)


def two_optimizers_by_hand(record: Record) -> None:
    """What that comes to."""
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.2), SGD(model[2].parameters(), lr=0.3)
    for _ in range(3):
        for number, (inputs, targets) in enumerate(DataLoader(points(), batch_size=8)):
            (loss_of(model(inputs), targets) / 2).backward()
            if number % 2:
                for one in (first, second):
                    one.step()
                    one.zero_grad()
        record.state(model)


def accumulate_flag_stream(record: Record) -> None:
    """prepare(..., accumulate=3) over an iterable data set."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    loader = DataLoader(Endless(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, accumulate=3)
    for _ in pace.epochs(3):
        for inputs, targets, _ in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
        record.state(model, optimizer)


def stream_by_hand(record: Record) -> None:
    """What that comes to."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    for _ in range(3):
        num_added = 0
        for number, (inputs, targets, _) in enumerate(DataLoader(Endless(), batch_size=8), 1):
            loss_of(model(inputs), targets).backward()
            num_added += 1
            if num_added == 3 or number == SAMPLES // 8:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= num_added
                optimizer.step()
                optimizer.zero_grad()
                num_added = 0
        record.state(model, optimizer)


def which_samples(record: Record) -> None:
    """Two batches an update, and which samples each block was given."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(Numbered(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets, indices) in enumerate(loader):
            with pace.step():
                (loss_of(model(inputs), targets) / 2).backward()
                record.used(indices)
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    record.state(model, optimizer)


BLOCK = "block"

# Where workers go at their own pace, what a worker has accumulated at the end stays in its .grad.
SCRIPTS = (
    Script(every_two, uses_all=False),
    Script(rest_dropped, uses_all=False),
    Script(rest_kept, uses_all=False),
    Script(every_five_over_epochs, uses_all=False, falls=False),
    Script(or_the_last, uses_all=False),
    Script(
        rest_stepped_after_the_loop,
        refused=several("outside|after the epoch's last|twice"),
        uses_all=False,
    ),
    Script(with_clip_and_schedule, uses_all=False),
    Script(two_batches_a_block, refused=several(BLOCK, is_sure=False)),
    Script(micro_batches),
    Script(which_samples, uses_all=False),
    Script(accumulate_flag, like=accumulated_by_hand),
    Script(accumulate_flag_two_optimizers, like=two_optimizers_by_hand),
    Script(accumulate_flag_stream, like=stream_by_hand),
)
