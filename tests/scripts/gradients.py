"""Scripts that do something with gradients between backward and step: clip, edit, forget, keep."""

from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import paceline

from .base import Record, Script, gathered, several
from .usual import loss_of, network, points

MAX_NORM = 0.3


def with_each_gradient(record: Record, change: Any, learning_rate: float = 0.3) -> None:
    """The loop of the README; ``change(pace, model)`` between backward and step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=learning_rate, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                change(pace, model)
                optimizer.step()
    record.state(model, optimizer)


def clip_norm(record: Record) -> None:
    """pace.clip_grad_norm_ of all parameters."""
    with_each_gradient(record, lambda pace, m: pace.clip_grad_norm_(m.parameters(), MAX_NORM))


def clip_norm_read(record: Record) -> None:
    """The norm that pace.clip_grad_norm_ returns is read after the step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                norm = pace.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                record.step(norm=norm)
    record.state(model, optimizer)


def clip_norm_of_a_part(record: Record) -> None:
    """pace.clip_grad_norm_ of the last layer alone."""
    with_each_gradient(record, lambda pace, m: pace.clip_grad_norm_(m[-1].parameters(), 0.1))


def clip_each_layer(record: Record) -> None:
    """pace.clip_grad_norm_ once a layer."""

    def change(pace: Any, model: Any) -> None:
        pace.clip_grad_norm_(model[0].parameters(), 0.2)
        pace.clip_grad_norm_(model[-1].parameters(), 0.1)

    with_each_gradient(record, change)


def clip_value(record: Record) -> None:
    """pace.clip_grad_value_."""
    with_each_gradient(record, lambda pace, m: pace.clip_grad_value_(m.parameters(), 0.05))


def clip_norm_by_torch(record: Record) -> None:
    """torch.nn.utils.clip_grad_norm_."""
    with_each_gradient(record, lambda _, m: nn.utils.clip_grad_norm_(m.parameters(), MAX_NORM))


def clip_value_by_torch(record: Record) -> None:
    """torch.nn.utils.clip_grad_value_."""
    with_each_gradient(record, lambda _, m: nn.utils.clip_grad_value_(m.parameters(), 0.05))


def scaled_by_hand(record: Record) -> None:
    """Each .grad is scaled in place."""

    def change(_: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    with_each_gradient(record, change)


def replaced_by_hand(record: Record) -> None:
    """Each .grad is replaced by its sign (signSGD)."""

    def change(_: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.sign()

    with_each_gradient(record, change, learning_rate=0.005)


def with_noise(record: Record) -> None:
    """Noise is added to each .grad."""

    def change(_: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)

    with_each_gradient(record, change)


def gradient_set_to_none(record: Record) -> None:
    """The first layer's .grad is None by hand, so that it stays as it is."""

    def change(_: Any, model: Any) -> None:
        model[0].weight.grad = None

    with_each_gradient(record, change)


def norm_looked_at(record: Record) -> None:
    """Gradients are looked at and left alone."""
    seen = []

    def change(_: Any, model: nn.Module) -> None:
        seen.append(sum(float(one.grad.norm()) for one in model.parameters()))

    with_each_gradient(record, change)
    record.fact(finite=all(one > 0 for one in seen))


def linear_hook(record: Record) -> None:
    """A hook on a parameter halves its gradient."""
    pace = paceline.connect()
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def zero_grad_by(record: Record, forget: Any, *, is_after: bool = False) -> None:
    """The loop of the README with another way to forget gradients, before or after the step."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                if not is_after:
                    forget(model, optimizer)
                loss_of(model(inputs), targets).backward()
                optimizer.step()
                if is_after:
                    forget(model, optimizer)
    record.state(model, optimizer)


def zeros_kept(record: Record) -> None:
    """zero_grad(set_to_none=False)."""
    zero_grad_by(record, lambda _, optimizer: optimizer.zero_grad(set_to_none=False))


def model_zero_grad(record: Record) -> None:
    """model.zero_grad() and not the optimizer's."""
    zero_grad_by(record, lambda model, _: model.zero_grad())


def zero_grad_after(record: Record) -> None:
    """zero_grad() after the step."""
    zero_grad_by(record, lambda _, optimizer: optimizer.zero_grad(), is_after=True)


def none_by_hand(record: Record) -> None:
    """Each .grad is set to None by hand, and there is no zero_grad."""

    def forget(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    zero_grad_by(record, forget)


def zeroed_by_hand(record: Record) -> None:
    """Each .grad is zeroed in place after the step."""

    def forget(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    zero_grad_by(record, forget, is_after=True)


def never_zeroed(record: Record) -> None:
    """No zero_grad at all: gradients add up for ever."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.005)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                loss_of(model(inputs), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def kept_over_zero_grad(record: Record) -> None:
    """Gradients of a first loss are kept over zero_grad(), and added to those of a second."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                kept = [one.grad for one in model.parameters()]
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                with pace.edit_gradients():
                    for parameter, first in zip(model.parameters(), kept, strict=True):
                        parameter.grad = 0.1 * parameter.grad + first
                optimizer.step()
    record.state(model, optimizer)


def kept_from_step_to_step(record: Record) -> None:
    """The gradient of the step before is kept, flat, and compared with this one's."""
    before: list[torch.Tensor] = []
    alike = []

    def change(_: Any, model: nn.Module) -> None:
        now = [one.grad.view(-1) for one in model.parameters()]
        alike.append(any(map(torch.equal, before, now)))
        before[:] = now

    with_each_gradient(record, change)
    record.fact(alike=any(alike))


def differentiated_again(record: Record) -> None:
    """backward(create_graph=True), and a product with the Hessian of what lies in .grad."""

    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    mine = list(model.parameters())
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward(create_graph=True)
                grads = [one.grad for one in mine]
                ones = [torch.ones_like(one) for one in mine]
                products = torch.autograd.grad(grads, mine, grad_outputs=ones)
                record.part(curvature=sum(float(one.sum()) for one in products))
                optimizer.step()
    record.state(model, optimizer)


OWN_CLIP = r"pace\.clip_grad_norm_"
EDITED = r"\.grad|gradient"

SCRIPTS = (
    Script(clip_norm),
    Script(clip_norm_read),
    Script(clip_norm_of_a_part, refused=several(r"clip_grad_norm_", is_sure=False)),
    Script(clip_each_layer, refused=several(r"clip_grad_norm_", is_sure=False)),
    Script(clip_value),
    Script(clip_norm_by_torch, refused=gathered(OWN_CLIP)),
    Script(clip_value_by_torch, refused=gathered(r"pace\.clip_grad_value_")),
    Script(scaled_by_hand, refused=gathered(EDITED)),
    Script(replaced_by_hand, refused=gathered(EDITED), falls=False),
    Script(with_noise, refused=gathered(EDITED), falls=False),
    Script(gradient_set_to_none, refused=several(EDITED, is_sure=False)),
    Script(norm_looked_at),
    Script(linear_hook),
    Script(kept_over_zero_grad, falls=False),
    Script(kept_from_step_to_step),
    Script(differentiated_again),
    Script(zeros_kept),
    Script(model_zero_grad),
    Script(zero_grad_after),
    Script(none_by_hand),
    Script(zeroed_by_hand),
    Script(never_zeroed, refused=several("zero_grad|add up", is_sure=False)),
)
