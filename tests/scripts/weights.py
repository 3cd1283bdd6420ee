"""Scripts that edit weights by hand, or keep an average of them beside."""

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

import paceline

from .base import Record, Script, pushed, several
from .usual import count_right, held_out, loss_of, network, one_epoch, points


def after_each_step(
    record: Record, change: Any, *, in_block: bool = True, publishes: bool = False
) -> None:
    """The loop of the README; ``change(model)`` after each step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                if in_block:
                    change(model)
                if publishes:
                    pace.publish(model)
            if not in_block:
                change(model)
    record.state(model, optimizer)


def clamped(record: Record) -> None:
    """Weights are clamped after each step (WGAN), through .data."""

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    after_each_step(record, change)


def clamped_behind_the_block(record: Record) -> None:
    """The same behind the block, under no_grad."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)

    after_each_step(record, change, in_block=False)


def weights_clipped_published(record: Record) -> None:
    """Weights are clamped after each step (WGAN), and pace.publish says that it is meant."""

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.6, 0.6)

    after_each_step(record, change, publishes=True)


def max_norm(record: Record) -> None:
    """Rows of a weight are renormalised after each step."""

    def change(model: Any) -> None:
        with torch.no_grad():
            model[0].weight.copy_(torch.renorm(model[0].weight, 2, 0, 0.5))

    after_each_step(record, change)


def reset_layer(record: Record) -> None:
    """A layer is initialised anew between epochs."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            nn.init.zeros_(model[-1].bias)
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def layer_reset_published(record: Record) -> None:
    """A layer begins again and another is pruned, before and behind a loop, with pace.publish."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            torch.manual_seed(5)
            model[2].reset_parameters()
            pace.publish(model[2])
        one_epoch(pace, model, optimizer, loader)
        if epoch == 1:
            with torch.no_grad():
                model[0].weight.mul_(model[0].weight.abs() > 0.1)
            model[0].bias.data = model[0].bias.data * 0.5
            pace.publish(model)
        record.state(model, optimizer)


def initialised_after_prepare(record: Record) -> None:
    """model.apply(init) after prepare, before the first epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def data_replaced(record: Record) -> None:
    """param.data = ... between epochs: other memory."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            model[0].weight.data = model[0].weight.data * 0.9
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def cast_after_prepare(record: Record) -> None:
    """model.double() after prepare."""
    pace = paceline.connect()
    model = network().float()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    model.double()
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def averaged_with(record: Record, **options: Any) -> None:
    """swa_utils.AveragedModel, updated after each step, evaluated each epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    averaged = AveragedModel(model, **options)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                averaged.update_parameters(model)
        total, count = pace.evaluate(count_right(averaged), DataLoader(held_out(), 5))["loss"]
        record.fact(count=count)
        record.step(averaged=total)
    for parameter in averaged.module.parameters():
        record.step(parameter=parameter)
    record.state(model, optimizer)


def swa(record: Record) -> None:
    """AveragedModel: an equal average of all steps."""
    averaged_with(record)


def ema(record: Record) -> None:
    """AveragedModel with an exponential average."""
    averaged_with(record, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def ema_by_hand(record: Record) -> None:
    """A deep copy from before prepare, moved towards the model after each step."""
    pace = paceline.connect()
    model = network()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                with torch.no_grad():
                    for old, new in zip(target.parameters(), model.parameters(), strict=True):
                        old.lerp_(new, 0.1)
        for parameter in target.parameters():
            record.step(parameter=parameter)
    record.state(model, optimizer)


def swa_each_epoch(record: Record) -> None:
    """AveragedModel updated once an epoch, its batch norm by update_bn at the end."""
    pace = paceline.connect()
    model = network(nn.BatchNorm1d(12))
    optimizer = SGD(model.parameters(), lr=0.1)
    averaged = AveragedModel(model)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        averaged.update_parameters(model)
    update_bn(DataLoader(points(), batch_size=8), averaged)
    record.state(averaged)


def teacher(record: Record) -> None:
    """A frozen network beside, not prepared, teaches (distillation)."""
    pace = paceline.connect()
    wise = network(seed=9).eval().requires_grad_(False)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                outputs = model(inputs)
                taught = nn.functional.mse_loss(outputs, wise(inputs))
                (loss_of(outputs, targets) + 0.1 * taught).backward()
                optimizer.step()
    record.state(model, optimizer)


def second_network(record: Record) -> None:
    """A second network that is not prepared gets gradients and plain SGD by hand."""
    pace = paceline.connect()
    model, extra = network(), network(seed=9)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                extra.zero_grad()
                loss_of(model(inputs) + extra(inputs), targets).backward()
                optimizer.step()
                with torch.no_grad():
                    for parameter in extra.parameters():
                        parameter -= 0.1 * parameter.grad
    record.state(model, optimizer)


def weights_read(record: Record) -> None:
    """Weights are read after each step and left alone."""
    norms: list[float] = []

    def change(model: nn.Module) -> None:
        norms.append(
            float(torch.cat([one.detach().flatten() for one in model.parameters()]).norm())
        )

    after_each_step(record, change)
    record.step(norms=norms)


def written_into_a_state_dict(record: Record) -> None:
    """Pretrained weights are copied into model.state_dict(), tensor by tensor, after prepare."""
    pace = paceline.connect()
    model, pretrained = network(), network(seed=9).state_dict()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    own = model.state_dict()
    for name, value in pretrained.items():
        own[name].copy_(value)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def written_and_loaded(record: Record) -> None:
    """The same, and model.load_state_dict of it."""
    pace = paceline.connect()
    model, pretrained = network(), network(seed=9).state_dict()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    own = model.state_dict()
    for name, value in pretrained.items():
        own[name].copy_(value)
    model.load_state_dict(own)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        own = model.state_dict()
    record.state(model, optimizer)


def clamped_in_a_state_dict(record: Record) -> None:
    """Weights are clamped after each step through model.state_dict()."""

    def change(model: nn.Module) -> None:
        for value in model.state_dict().values():
            value.clamp_(-0.3, 0.3)

    after_each_step(record, change)


EDITED = "weights|parameters|edited|changed"

SCRIPTS = (
    Script(clamped, refused=several(EDITED), falls=False),
    Script(clamped_behind_the_block, refused=several(EDITED), falls=False),
    Script(
        weights_clipped_published,
        refused=pushed(r"pace.publish\(model\) is called inside the loop"),
    ),
    Script(layer_reset_published),
    Script(max_norm, refused=several(EDITED)),
    Script(reset_layer, refused=several(EDITED)),
    Script(initialised_after_prepare),
    Script(
        written_into_a_state_dict, refused=several(r"state_dict\(\)\['0.weight'\]", is_early=True)
    ),
    Script(written_and_loaded),
    Script(clamped_in_a_state_dict, refused=several(r"state_dict\(\)\["), falls=False),
    Script(data_replaced, refused=several(EDITED + "|memory")),
    Script(cast_after_prepare, refused=several(EDITED + "|memory|prepare", is_early=True)),
    Script(swa),
    Script(ema),
    Script(ema_by_hand),
    Script(swa_each_epoch, is_exact=False),
    Script(teacher),
    Script(second_network, refused=several("not prepared|prepare")),
    Script(weights_read),
)
