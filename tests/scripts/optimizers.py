"""Scripts that differ in their optimizer: every common one, one of the user's own, and those that
cannot be carried.

Longer than a file should be: one script after the other, each to be read by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

import paceline

from .base import Record, Refusal, Script, everywhere, loose, pushed, several
from .usual import loss_of, network, one_epoch, points


def training(record: Record, make: Callable[..., Optimizer], **options: Any) -> None:
    """The loop of the README with this optimizer, weights with decay and biases without."""
    pace = paceline.connect()
    model = network()
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.01},
        {"params": [one for one in model.parameters() if one.ndim == 1]},
    ]
    optimizer = make(groups, **options)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def sgd(record: Record) -> None:
    """SGD."""
    training(record, SGD, lr=0.3)


def nesterov(record: Record) -> None:
    """SGD with Nesterov's momentum."""
    training(record, SGD, lr=0.1, momentum=0.9, nesterov=True)


def dampened(record: Record) -> None:
    """SGD with dampening: its first step is another."""
    training(record, SGD, lr=0.2, momentum=0.9, dampening=0.5)


def adam(record: Record) -> None:
    """Adam."""
    training(record, torch.optim.Adam, lr=0.03)


def adamw_amsgrad(record: Record) -> None:
    """AdamW with amsgrad."""
    training(record, torch.optim.AdamW, lr=0.03, amsgrad=True)


def adam_foreach(record: Record) -> None:
    """Adam with foreach=True."""
    training(record, torch.optim.Adam, lr=0.03, foreach=True)


def adam_fused(record: Record) -> None:
    """AdamW with fused=True."""
    training(record, torch.optim.AdamW, lr=0.03, fused=True)


def adamax(record: Record) -> None:
    """Adamax."""
    training(record, torch.optim.Adamax, lr=0.03)


def nadam(record: Record) -> None:
    """NAdam."""
    training(record, torch.optim.NAdam, lr=0.03)


def radam(record: Record) -> None:
    """RAdam."""
    training(record, torch.optim.RAdam, lr=0.05)


def rmsprop(record: Record) -> None:
    """RMSprop, centred, with momentum."""
    training(record, torch.optim.RMSprop, lr=0.003, momentum=0.5, centered=True)


def adagrad(record: Record) -> None:
    """Adagrad."""
    training(record, torch.optim.Adagrad, lr=0.1)


def adadelta(record: Record) -> None:
    """Adadelta."""
    training(record, torch.optim.Adadelta, lr=1.0)


def asgd(record: Record) -> None:
    """ASGD."""
    training(record, torch.optim.ASGD, lr=0.2)


def rprop(record: Record) -> None:
    """Rprop, whose steps depend on signs alone."""
    pace = paceline.connect()
    model = network()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.001)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def adafactor(record: Record) -> None:
    """Adafactor, which needs whole matrices."""
    training(record, torch.optim.Adafactor, lr=0.03)


def maximize(record: Record) -> None:
    """maximize=True, on the negative of the loss."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3, maximize=True)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                (-loss_of(model(inputs), targets)).backward()
                optimizer.step()
    record.state(model, optimizer)


def tensor_rate(record: Record) -> None:
    """The learning rate is a tensor."""
    pace = paceline.connect()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.03, dtype=torch.float64))
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


class Lion(Optimizer):
    """A user's own: steps by the sign of an interpolation."""

    def __init__(self, params: Any, lr: float = 0.003, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                both = state["mean"].mul(0.9).add(parameter.grad, alpha=0.1)
                parameter.add_(both.sign(), alpha=-group["lr"])
                state["mean"].mul_(0.99).add_(parameter.grad, alpha=0.01)


def own_optimizer(record: Record) -> None:
    """An optimizer class of the user's own (Lion)."""
    training(record, Lion, lr=0.003)


class Subclassed(SGD):
    """A user's own on top of torch's: counts its steps."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().step(closure)


def subclass_of_sgd(record: Record) -> None:
    """A subclass of SGD with a step of its own."""
    training(record, Subclassed, lr=0.2, momentum=0.9)


class Anew(Optimizer):
    """A user's own that changes nothing in place: its weights and momentum are made anew."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state["mean"] = 0.9 * state.get("mean", 0.0) + one.grad
                    one.data = one.data - group["lr"] * state["mean"]


def makes_all_anew(record: Record) -> None:
    """A class of the user's own that assigns p.data and its state instead of changing them."""
    training(record, Anew, lr=0.1)


class Remembering(Optimizer):
    """A user's own that keeps something from its third step on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state["number"] = state.get("number", 0) + 1
                    if state["number"] >= 3:
                        state.setdefault("slow", one.clone()).lerp_(one, 0.5)
                        one.copy_(state["slow"])
                    one.add_(one.grad, alpha=-group["lr"])


def keeps_more_later(record: Record) -> None:
    """A class of the user's own whose state has more from its third step on."""
    training(record, Remembering, lr=0.2)


class Fading(Optimizer):
    """A user's own whose steps grow shorter: it counts them in its groups, as many do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["t"] += 1
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-group["lr"] / group["t"])


def counts_in_its_groups(record: Record) -> None:
    """A class of the user's own that keeps a number in its param_groups."""
    training(record, Fading, lr=0.5)


class Clipped(SGD):
    """A user's own that clips all its gradients by their norm before each step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.05)
        return super().step(closure)


def clips_in_its_step(record: Record) -> None:
    """A class of the user's own whose step looks at all parameters."""
    training(record, Clipped, lr=0.5)


def momentum_later(record: Record, first: float) -> None:
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=first)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    optimizer.param_groups[0]["momentum"] = 0.0
    for epoch in pace.epochs(3):
        if epoch == 1:
            optimizer.param_groups[0]["momentum"] = 0.9
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def momentum_from_the_second_epoch(record: Record) -> None:
    """SGD without momentum, which is given some later."""
    momentum_later(record, 0.0)


def momentum_held_back(record: Record) -> None:
    """SGD with momentum, of which nothing is used in the first epoch."""
    momentum_later(record, 0.9)


def step_hook(record: Record) -> None:
    """A hook behind every optimizer step shrinks the weights a little."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)

    def shrink(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.99)

    optimizer.register_step_post_hook(shrink)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def passes(
    model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor
) -> Callable[[], Tensor]:
    """The closure that everybody writes."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss

    return closure


def lbfgs(record: Record) -> None:
    """LBFGS, which calls the model several times."""
    pace = paceline.connect()
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            closure = passes(model, optimizer, inputs, targets)
            with pace.step():
                record.step(loss=optimizer.step(closure).detach())
    record.state(model)


def closure_of_sgd(record: Record) -> None:
    """SGD.step(closure), which calls it once."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            closure = passes(model, optimizer, inputs, targets)
            with pace.step():
                optimizer.step(closure)
    record.state(model, optimizer)


class Sam(Optimizer):
    """Sharpness-aware minimization: the gradient at the point that is worst nearby."""

    def __init__(self, params: Any, lr: float = 0.2, radius: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        group = self.param_groups[0]
        norm = torch.stack([one.grad.norm() for one in group["params"]]).norm()
        moves = [one.grad * (group["radius"] / norm) for one in group["params"]]
        for one, move in zip(group["params"], moves, strict=True):
            one.add_(move)
        with torch.enable_grad():
            closure()
        for one, move in zip(group["params"], moves, strict=True):
            one.sub_(move).sub_(one.grad, alpha=group["lr"])
        return loss


def sam_closure(record: Record) -> None:
    """SAM as an optimizer of the user's own: step(closure) takes two gradients."""
    pace = paceline.connect()
    model = network()
    optimizer = Sam(model.parameters())
    loader = DataLoader(points(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, closures=True)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            closure = passes(model, optimizer, inputs, targets)
            with pace.step():
                record.step(loss=optimizer.step(closure).detach())
    record.state(model, optimizer)


def two_optimizers(record: Record) -> None:
    """One optimizer a half of the network."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    loader = DataLoader(points(), batch_size=8)
    model, first, second, loader = pace.prepare(model, first, second, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                loss_of(model(inputs), targets).backward()
                first.step()
                second.step()
                model.zero_grad()
    record.state(model, first)
    record.state(model, second)


def two_clips_and_schedules(record: Record) -> None:
    """Two optimizers, each clipped by its own norm and with a scheduler of its own."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.ExponentialLR(first, 0.8)
    waving = torch.optim.lr_scheduler.StepLR(second, 2, 0.5)
    loader = DataLoader(points(), batch_size=8)
    prepared = pace.prepare(model, first, second, loader, falling, waving)
    model, first, second, loader, falling, waving = prepared
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                first.zero_grad()
                second.zero_grad()
                loss_of(model(inputs), targets).backward()
                pace.clip_grad_norm_(model[0].parameters(), 0.02)
                pace.clip_grad_norm_(model[-1].parameters(), 0.05)
                first.step()
                second.step()
        falling.step()
        waving.step()
    record.fact(rates=[one.param_groups[0]["lr"] for one in (first, second)])
    record.state(model)


def two_rhythms(record: Record) -> None:
    """One optimizer steps on every batch, the other on what two batches have accumulated."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    loader = DataLoader(points(), batch_size=8)
    model, first, second, loader = pace.prepare(model, first, second, loader)
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                first.zero_grad()
                loss_of(model(inputs), targets).backward()
                first.step()
                if number % 2:
                    second.step()
                    second.zero_grad()
    record.state(model)


def two_schedules_in_the_block(record: Record) -> None:
    """Two optimizers, whose schedulers are stepped behind them in the block."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    waving = torch.optim.lr_scheduler.StepLR(second, 2, 0.5)
    loader = DataLoader(points(), batch_size=8)
    prepared = pace.prepare(model, first, second, loader, falling, waving)
    model, first, second, loader, falling, waving = prepared
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                first.zero_grad()
                second.zero_grad()
                loss_of(model(inputs), targets).backward()
                first.step()
                falling.step()
                second.step()
                waving.step()
    record.state(model)


def two_rates_by_hand(record: Record) -> None:
    """Two optimizers, one of whose rates is lowered in the block, behind its step."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    loader = DataLoader(points(), batch_size=8)
    model, first, second, loader = pace.prepare(model, first, second, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                first.zero_grad()
                second.zero_grad()
                loss_of(model(inputs), targets).backward()
                first.step()
                first.param_groups[0]["lr"] *= 0.95
                second.step()
    record.state(model)


def two_scaled(record: Record) -> None:
    """Two optimizers that a GradScaler steps."""
    pace = paceline.connect()
    model = network()
    first, second = SGD(model[0].parameters(), lr=0.3), SGD(model[-1].parameters(), lr=0.1)
    loader = DataLoader(points(), batch_size=8)
    model, first, second, loader = pace.prepare(model, first, second, loader)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                first.zero_grad()
                second.zero_grad()
                scaler.scale(loss_of(model(inputs), targets)).backward()
                scaler.step(first)
                scaler.step(second)
                scaler.update()
    record.state(model)


def gan(record: Record) -> None:
    """Two networks that play against each other, each with its optimizer."""
    pace = paceline.connect()
    maker, judge = nn.Linear(2, 6).double(), nn.Linear(6, 1).double()
    making, judging = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (maker, judge))
    prepared = pace.prepare(maker, judge, making, judging, DataLoader(points(), batch_size=8))
    maker, judge, making, judging, loader = prepared
    for _ in pace.epochs(3):
        for inputs, _targets in loader:
            with pace.step():
                made = maker(torch.ones(len(inputs), 2, dtype=torch.float64))
                judging.zero_grad()
                (judge(made.detach()).mean() - judge(inputs).mean()).backward()
                judging.step()
                making.zero_grad()
                (-judge(made).mean()).backward()
                making.step()
    record.state(maker, making)
    record.state(judge, judging)


def unprepared_optimizer(record: Record) -> None:
    """A second optimizer is not prepared and steps in the same loop."""
    pace = paceline.connect()
    model, extra = network(), nn.Linear(6, 3).double()
    optimizer = SGD(model.parameters(), lr=0.3)
    other = SGD(extra.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                other.zero_grad()
                loss_of(model(inputs) + extra(inputs), targets).backward()
                optimizer.step()
                other.step()
    record.state(model, optimizer)


def sparse_embedding(record: Record) -> None:
    """An embedding with sparse gradients."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True)).double()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs.argmax(dim=1)), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


class Graph(nn.Module):
    """A layer over a graph whose adjacency is a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(6, dtype=torch.float64).to_sparse())
        self.head = nn.Linear(6, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.head(torch.sparse.mm(self.adjacency, inputs.T).T)
        return made


def sparse_buffer(record: Record) -> None:
    """A buffer that is a sparse tensor."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = Graph()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


class ByCurvature(SGD):
    """Divides by a guess at the Hessian's diagonal, which it takes of the graph of ``.grad``."""

    def step(self, closure: Any = None) -> None:
        held = self.param_groups[0]["params"]
        signs = [torch.ones_like(one) for one in held]
        found = torch.autograd.grad([one.grad for one in held], held, grad_outputs=signs)
        with torch.no_grad():
            for parameter, curved in zip(held, found, strict=True):
                parameter -= 0.1 * parameter.grad / (1.0 + curved.abs())


def needs_a_graph(record: Record) -> None:
    """An optimizer of its own that needs backward(create_graph=True), as AdaHessian."""
    pace = paceline.connect()
    model = network()
    optimizer = ByCurvature(model.parameters(), lr=0.1)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward(create_graph=True)
                optimizer.step()
    record.state(model, optimizer)


SCRIPTS = (
    Script(sgd),
    Script(nesterov),
    Script(dampened),
    Script(adam),
    Script(adamw_amsgrad),
    Script(adam_foreach),
    Script(adam_fused),
    Script(adamax),
    Script(nadam),
    Script(radam),
    Script(rmsprop),
    Script(adagrad),
    Script(adadelta),
    Script(asgd),
    Script(rprop),
    Script(adafactor),
    Script(maximize, falls=False),
    Script(tensor_rate),
    Script(own_optimizer),
    Script(subclass_of_sgd, refused=loose("self.num_steps", is_early=True)),
    Script(makes_all_anew),
    Script(keeps_more_later, refused=loose("later than in its first step", is_early=True)),
    Script(counts_in_its_groups, refused=loose("keeps group", is_early=True)),
    Script(clips_in_its_step),
    Script(momentum_from_the_second_epoch, refused=pushed("build it with the setting")),
    Script(momentum_held_back),
    Script(step_hook, refused=loose("step hooks", is_early=True)),
    Script(lbfgs, refused=loose("LBFGS", is_early=True)),
    Script(closure_of_sgd),
    Script(needs_a_graph, refused=pushed("cannot be made on a copy", is_early=True)),
    Script(sam_closure, refused=loose("closures=True", is_early=True)),
    Script(two_optimizers),
    Script(
        two_clips_and_schedules, refused={"k-batch-async:2, 2": Refusal("clipped once, as a whole")}
    ),
    Script(two_rhythms),
    Script(two_schedules_in_the_block),
    Script(
        two_rates_by_hand, refused=loose("was changed in the block after its step", is_sure=True)
    ),
    Script(two_scaled, refused=pushed("GradScaler steps one of several optimizers")),
    Script(gan, falls=False),
    Script(unprepared_optimizer, refused=several("not prepared")),
    Script(sparse_buffer, refused=everywhere("is a sparse tensor", is_early=True)),
    Script(sparse_embedding, refused=everywhere("sparse", is_early=True)),
)
