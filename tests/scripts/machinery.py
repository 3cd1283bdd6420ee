"""Scripts that use more of PyTorch around the step: scalers, autocast, compiled models, hooks,
checkpointing, functional calls, devices, copies of things to keep.

Longer than a file should be: one script after the other, each to be read by itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import paceline

from .base import Record, Script, several
from .usual import CLASSES, WIDTH, loss_of, network, one_epoch, points


def grad_scaler(record: Record) -> None:
    """torch.amp.GradScaler on the CPU."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                scaler.scale(loss_of(model(inputs), targets)).backward()
                scaler.step(optimizer)
                scaler.update()
    record.fact(scale=scaler.get_scale())
    record.state(model, optimizer)


def scaler_and_clipping(record: Record) -> None:
    """GradScaler, unscale_ and pace.clip_grad_norm_."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                scaler.scale(loss_of(model(inputs), targets)).backward()
                scaler.unscale_(optimizer)
                pace.clip_grad_norm_(model.parameters(), 0.3)
                scaler.step(optimizer)
                scaler.update()
    record.state(model, optimizer)


def autocast(record: Record) -> None:
    """torch.autocast in bfloat16."""
    pace = paceline.connect()
    model = network().float()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model(inputs.float()), targets)
                loss.backward()
                optimizer.step()
    record.state(model, optimizer)


def pace_autocast(record: Record) -> None:
    """pace.autocast() and pace.backward."""
    pace = paceline.connect()
    model = network().float()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                with pace.autocast():
                    loss = loss_of(model(inputs.float()), targets)
                pace.backward(loss)
                optimizer.step()
    record.state(model, optimizer)


def compiled(record: Record) -> None:
    """torch.compile(model, backend="eager") before prepare."""
    pace = paceline.connect()
    model: Any = torch.compile(network(), backend="eager")
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def compiled_after_prepare(record: Record) -> None:
    """torch.compile after prepare."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    fast: Any = torch.compile(model, backend="eager")
    for _ in pace.epochs(3):
        one_epoch(pace, fast, optimizer, loader)
    record.state(model, optimizer)


class Deep(nn.Module):
    """Two blocks, of which the first is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.out = nn.Linear(12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.block, inputs, use_reentrant=False)
        outputs: Tensor = self.out(hidden)
        return outputs


def activation_checkpointing(record: Record) -> None:
    """torch.utils.checkpoint."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = Deep().double()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def forward_hooks(record: Record) -> None:
    """Forward and backward hooks of the user's own look at activations."""
    pace = paceline.connect()
    model = network()
    seen: list[float] = []
    model[1].register_forward_hook(lambda *args: seen.append(float(args[2].detach().mean())))
    model[1].register_full_backward_hook(lambda *args: None)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.part(seen=seen)
    record.state(model, optimizer)


def functional_call(record: Record) -> None:
    """torch.func.functional_call with the model's own parameters."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                outputs = torch.func.functional_call(model, dict(model.named_parameters()), inputs)
                loss_of(outputs, targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def device_and_non_blocking(record: Record) -> None:
    """.to(pace.device) everywhere."""
    pace = paceline.connect()
    model = network().to(pace.device)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            inputs = inputs.to(pace.device, non_blocking=True)
            targets = targets.to(pace.device, non_blocking=True)
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def other_order(record: Record) -> None:
    """prepare with its objects in another order."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader: Any = DataLoader(points(), batch_size=8)
    loader, optimizer, model = pace.prepare(loader, optimizer, model)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def results_ignored(record: Record) -> None:
    """What prepare returns is ignored but for the loader."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    _, _, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def loader_not_prepared(record: Record) -> None:
    """The loop goes over the loader that was made, and not the one that prepare gave."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    loader = DataLoader(points(), batch_size=8)
    pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def stepped_before_the_loop(record: Record) -> None:
    """A step on a batch of the user's own before the first epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    loss_of(model(points()[:8][0]), points()[:8][1]).backward()
    optimizer.step()
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def complex_weights(record: Record) -> None:
    """A layer with complex parameters."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, CLASSES, dtype=torch.complex128)
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs.to(torch.complex128)).abs(), targets).backward()
                optimizer.step()
    for parameter in model.parameters():
        record.epoch(parameter=torch.view_as_real(parameter))


def kept_things(record: Record) -> None:
    """pace.keep of a generator of the user's own."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    pace.keep(generator=generator)
    for _ in pace.epochs(3):
        record.fact(drawn=torch.rand(1, generator=generator))
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def written_once(record: Record) -> None:
    """A file is written by one worker: ``if pace.is_main``."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        if pace.is_main:
            with open(record.folder / "history.txt", "a") as history:
                history.write(f"{epoch}\n")
    if pace.is_main:
        record.fact(lines=len((record.folder / "history.txt").read_text().split()))
    record.state(model, optimizer)


OUTSIDE = "outside"

SCRIPTS = (
    Script(grad_scaler),
    Script(scaler_and_clipping),
    Script(autocast, is_exact=False),
    Script(pace_autocast, is_exact=False),
    Script(compiled),
    Script(compiled_after_prepare),
    Script(activation_checkpointing),
    Script(forward_hooks),
    Script(functional_call),
    Script(device_and_non_blocking),
    Script(other_order),
    Script(results_ignored),
    Script(loader_not_prepared, refused=several(OUTSIDE, is_early=True)),
    Script(stepped_before_the_loop, refused=several(OUTSIDE, is_early=True)),
    Script(complex_weights, refused=several("complex128", is_early=True)),
    Script(kept_things),
    Script(written_once),
)
