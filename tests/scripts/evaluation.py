"""Scripts that evaluate: between epochs and inside them, by Paceline and by hand, with loaders of
every kind; and that read the prepared loader where they do not train."""

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

import paceline

from .base import Record, Script, several
from .usual import count_right, held_out, loss_of, network, one_epoch, points


def between_epochs(record: Record) -> None:
    """pace.evaluate after every epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        totals = pace.evaluate(count_right(model), DataLoader(held_out(), batch_size=5))
        record.fact(count=totals["right"][1])
        record.epoch(right=totals["right"][0], loss=totals["loss"][0])
    record.state(model, optimizer)


def before_training(record: Record) -> None:
    """pace.evaluate of the untrained network, after prepare."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    record.fact(**pace.evaluate(count_right(model), DataLoader(held_out(), batch_size=5)))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def before_prepare(record: Record) -> None:
    """pace.evaluate before prepare."""
    pace = paceline.connect()
    model = network()
    record.fact(**pace.evaluate(count_right(model), DataLoader(held_out(), batch_size=5)))
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def inside_an_epoch(record: Record) -> None:
    """pace.evaluate after every third batch, inside the block's loop."""
    pace = paceline.connect()
    model = network(nn.Dropout(0.0))
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            if number % 3 == 2:
                totals = pace.evaluate(count_right(model), DataLoader(held_out(), batch_size=5))
                record.step(loss=totals["loss"], trains=model.training)
    record.state(model, optimizer)


def by_hand(record: Record) -> None:
    """Each worker evaluates by a loop of its own under no_grad."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    test = DataLoader(held_out(), batch_size=5)
    for _ in pace.epochs(3):
        model.train()
        one_epoch(pace, model, optimizer, loader)
        model.eval()
        right = count = 0
        with torch.no_grad():
            for inputs, targets in test:
                right += int((model(inputs).argmax(dim=1) == targets).sum())
                count += len(targets)
        record.fact(count=count)
        record.epoch(right=right)
    record.state(model, optimizer)


def by_the_main_worker(record: Record) -> None:
    """The main worker alone evaluates by hand."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        if pace.is_main:
            with torch.no_grad():
                loss = loss_of(model(held_out()[:][0]), held_out()[:][1])
            record.fact(finite=bool(loss.isfinite()))
    record.state(model, optimizer)


def evaluated_with(record: Record, test: "DataLoader[object]") -> None:
    """pace.evaluate over this loader, after every epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        totals = pace.evaluate(count_right(model), test)
        record.fact(count=totals["right"][1])
        record.epoch(right=totals["right"][0], loss=totals["loss"][0])
    record.state(model, optimizer)


def subset_sampler(record: Record) -> None:
    """Validation on a SubsetRandomSampler of the training data."""
    evaluated_with(record, DataLoader(points(), 4, sampler=SubsetRandomSampler(range(8, 18))))


def own_batches(record: Record) -> None:
    """Validation with a batch sampler."""
    batches = BatchSampler(SequentialSampler(range(10)), batch_size=4, drop_last=False)
    evaluated_with(record, DataLoader(held_out(), batch_sampler=batches))


def dropped_rest(record: Record) -> None:
    """Validation with drop_last."""
    evaluated_with(record, DataLoader(held_out(), batch_size=5, drop_last=True))


def one_sample_at_a_time(record: Record) -> None:
    """Validation without a batch size: one sample at a time."""
    evaluated_with(record, DataLoader(held_out(9)))


def no_batching(record: Record) -> None:
    """Validation with batch_size=None over batches that the data set makes."""
    inputs, targets = held_out()[:]
    batches = [(inputs[:9], targets[:9]), (inputs[9:], targets[9:])]
    evaluated_with(record, DataLoader(batches, batch_size=None))


def accuracy_on_training_data(record: Record) -> None:
    """The prepared loader is read under no_grad between epochs."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        count = right = 0
        with torch.no_grad():
            for inputs, targets in loader:
                right += int((model(inputs).argmax(dim=1) == targets).sum())
                count += len(targets)
        record.fact(count=count)
        record.epoch(right=right)
    record.state(model, optimizer)


def inside_its_own_loop(record: Record) -> None:
    """The prepared loader is read again inside its own loop, under no_grad."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            if number == 2:
                with torch.no_grad():
                    losses = [float(loss_of(model(one), two)) for one, two in loader]
                record.fact(batches=len(losses))
                record.step(loss=sum(losses))
    record.state(model, optimizer)


def nested(record: Record) -> None:
    """next(iter(loader)) inside the loader's own loop, with gradients on."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                others, classes = next(iter(loader))
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets) + 0.1 * loss_of(model(others), classes)
                loss.backward()
                optimizer.step()
        record.fact(size=len(others))
    record.state(model, optimizer)


def a_first_look(record: Record) -> None:
    """next(iter(loader)) before the first epoch, to see a batch's shape."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    inputs, _ = next(iter(loader))
    record.fact(width=inputs.shape[1], length=len(loader), samples=len(loader.dataset))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def a_first_look_by_the_main_worker(record: Record) -> None:
    """next(iter(loader)) before the first epoch, by the main worker alone."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    if pace.is_main:
        inputs, _ = next(iter(loader))
        record.fact(width=inputs.shape[1])
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def sum_over_workers(record: Record) -> None:
    """Right answers in training, added up by pace.sum."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        right = 0.0
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                outputs = model(inputs)
                loss_of(outputs, targets).backward()
                optimizer.step()
                right += float((outputs.argmax(dim=1) == targets).sum())
        record.epoch(right=pace.sum(right))
    record.state(model, optimizer)


SCRIPTS = (
    Script(between_epochs),
    Script(before_training),
    Script(before_prepare, refused=several("before pace.prepare", is_early=True)),
    Script(inside_an_epoch),
    Script(by_hand),
    Script(by_the_main_worker),
    Script(subset_sampler),
    Script(own_batches),
    Script(dropped_rest),
    Script(one_sample_at_a_time),
    Script(no_batching),
    Script(accuracy_on_training_data),
    Script(inside_its_own_loop),
    Script(nested, is_exact=False),
    Script(a_first_look, epochs=4, uses_all=False),
    Script(a_first_look_by_the_main_worker, refused=several("loader", is_sure=False)),
    Script(sum_over_workers),
)
