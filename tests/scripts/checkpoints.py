"""Scripts that read, save and load state: their own checkpoints, copies, the best model."""

import copy
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim import SGD, Adam, lr_scheduler
from torch.utils.data import DataLoader

import paceline

from .base import Record, Script, pushed, several
from .usual import count_right, held_out, loss_of, network, one_epoch, points


def loader_of_points() -> Any:
    return DataLoader(points(), batch_size=8)


def loaded_before_prepare(record: Record) -> None:
    """Model and optimizer are loaded before prepare."""
    pace = paceline.connect()
    old = network(seed=9)
    trained = Adam(old.parameters(), lr=0.02)
    loss_of(old(points()[:8][0]), points()[:8][1]).backward()
    trained.step()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    model.load_state_dict(old.state_dict())
    optimizer.load_state_dict(trained.state_dict())
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def saved_each_epoch(record: Record) -> None:
    """The main worker saves model and optimizer each epoch; plain PyTorch loads them."""
    pace = paceline.connect()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for epoch in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        if pace.is_main:
            state = {"model": model.state_dict(), "epoch": epoch}
            torch.save(state, record.folder / f"epoch-{epoch}.pt")
            again = network(seed=9)
            again.load_state_dict(torch.load(record.folder / f"epoch-{epoch}.pt")["model"])
            same = [bool((one == two).all()) for one, two in zip(
                again.parameters(), model.parameters(), strict=True
            )]  # fmt: skip
            record.fact(same=same, epoch=epoch)
        record.state(model)
    size = (record.folder / "epoch-2.pt").stat().st_size if pace.is_main else 0
    record.fact(is_small=size < 8000)


def optimizer_saved(record: Record) -> None:
    """The optimizer's state is saved after training and goes on in plain PyTorch."""
    pace = paceline.connect()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    path = record.folder / f"both-{pace.worker}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    state = torch.load(path)
    again = network()
    again.load_state_dict(state["model"])
    going_on = Adam(again.parameters(), lr=0.02)
    going_on.load_state_dict(state["optimizer"])
    record.fact(steps=float(next(iter(going_on.state.values()))["step"]))
    record.state(again, going_on)


def saved_by_pace(record: Record) -> None:
    """pace.save, and the file is loaded without Paceline."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    path = pace.save("trained.safetensors")
    if pace.is_main:
        again = network(seed=9)
        again.load_state_dict(load_file(path))
        same = zip(again.parameters(), model.parameters(), strict=True)
        record.fact(same=[bool((one == two).all()) for one, two in same])
    record.state(model, optimizer)


def best_loaded_at_the_end(record: Record) -> None:
    """The best state by evaluation is copied, and loaded after the last epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    best, kept = float("inf"), {}
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        total, count = pace.evaluate(count_right(model), DataLoader(held_out(), 5))["loss"]
        if total / count < best:
            best, kept = total / count, copy.deepcopy(model.state_dict())
        record.epoch(best=best)
    model.load_state_dict(kept)
    total, count = pace.evaluate(count_right(model), DataLoader(held_out(), 5))["loss"]
    record.epoch(again=total / count)
    record.state(model)


def loaded_between_epochs(record: Record) -> None:
    """The state after the first epoch is loaded again after the second."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    kept: Any = None
    for epoch in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        if epoch == 0:
            kept = copy.deepcopy(model.state_dict())
        if epoch == 1:
            model.load_state_dict(kept)
    record.state(model, optimizer)


def put_aside_and_back(record: Record) -> None:
    """Other weights are loaded to evaluate with between epochs, and undone."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    other = network(seed=5).state_dict()
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        mine = copy.deepcopy(model.state_dict())
        model.load_state_dict(other)
        totals = pace.evaluate(count_right(model), DataLoader(held_out(), 5))
        record.fact(others=totals["right"])
        model.load_state_dict(mine)
        record.state(model)
    record.state(model, optimizer)


def loaded_after_prepare(record: Record) -> None:
    """The model is loaded after prepare and before the first epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    model.load_state_dict(network(seed=9).state_dict())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def optimizer_loaded_after_prepare(record: Record) -> None:
    """The optimizer's state is loaded between epochs."""
    pace = paceline.connect()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for epoch in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        if epoch == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    record.state(model, optimizer)


def part_of_the_state(record: Record) -> None:
    """A layer's state_dict is kept after the first epoch and must not change."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    kept: list[Any] = []
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        state = model[0].state_dict()
        kept.append((state["weight"].clone(), copy.deepcopy(state)))
    record.fact(still=[bool((one == state["weight"]).all()) for one, state in kept])
    record.state(model, optimizer)


def part_saved(record: Record) -> None:
    """A layer's state_dict is saved by each worker: as small as the layer."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    path = record.folder / f"layer-{pace.worker}.pt"
    torch.save(model[-1].state_dict(), path)
    record.fact(is_small=path.stat().st_size < 3000)
    record.state(torch.nn.Sequential(model[0], model[-1]), optimizer)


def whole_model_saved(record: Record) -> None:
    """torch.save(model): a small file that loads and computes the same."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    path = record.folder / f"model-{pace.worker}.pt"
    torch.save(model, path)
    again = torch.load(path, weights_only=False)
    with torch.no_grad():
        same = bool((again(held_out()[:][0]) == model(held_out()[:][0])).all())
    record.fact(same=same, is_small=path.stat().st_size < 8000)
    record.state(again)


def copied_model(record: Record) -> None:
    """copy.deepcopy(model) between epochs: a model of its own that stays as it is."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, loader_of_points())
    copies = []
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        copies.append(copy.deepcopy(model))
    for one in copies:
        record.state(one)
    record.state(model, optimizer)


def gone_on_from_a_file(record: Record) -> None:
    """A script that goes on from its own checkpoint: epochs begin with the second."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    first = 1
    model, optimizer, loader, scheduler = pace.prepare(
        model, optimizer, loader_of_points(), scheduler
    )
    for epoch in pace.epochs(range(first, 4)):
        one_epoch(pace, model, optimizer, loader)
        scheduler.step()
        record.fact(epoch=epoch, rate=scheduler.get_last_lr())
    record.state(model, optimizer)


LOADED = "load|weights|parameters"

SCRIPTS = (
    Script(loaded_before_prepare),
    Script(saved_each_epoch),
    Script(optimizer_saved),
    Script(saved_by_pace),
    Script(best_loaded_at_the_end),
    Script(loaded_between_epochs, refused=several(LOADED)),
    Script(put_aside_and_back),
    Script(loaded_after_prepare),
    Script(optimizer_loaded_after_prepare, refused=pushed("load the optimizer's state before")),
    Script(part_of_the_state),
    Script(part_saved),
    Script(whole_model_saved),
    Script(copied_model),
    Script(gone_on_from_a_file),
)
