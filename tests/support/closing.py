"""Loops whose optimizers call the model again inside ``step``, run by Paceline and plainly.

    python closing.py CASE FOLDER NUM_SAMPLES [SLOW_S]       results go to FOLDER/result-N.pt

In float64, in order, without random numbers: several workers under full-sync get the same result
as one process with whole batches.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS = 16, 3


class Sam(Optimizer):
    """Sharpness-aware minimization as it is commonly written: two gradients a step.

    Source: P. Foret et al., ICLR 2021. As in public code, weights get other memory on the way back.
    """

    def __init__(self, params: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    def _moving(self) -> Iterator[Tensor]:
        every = (one for group in self.param_groups for one in group["params"])
        return (one for one in every if one.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if all(one.grad is None for group in self.param_groups for one in group["params"]):
            loss = torch.enable_grad()(closure)()
        norm = torch.stack([one.grad.norm() for one in self._moving()]).norm()
        for one in self._moving():
            self.state[one]["old"] = one.data.clone()
            one.add_(one.grad * (self.param_groups[0]["rho"] / norm))
        second = torch.enable_grad()(closure)()
        for one in self._moving():
            one.data = self.state[one]["old"]
        self.base.step()
        self.zero_grad()
        return second if loss is None else loss


class Holding(Optimizer):
    """Steps on the difference of two gradients, and keeps the first without a copy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        parameters = self.param_groups[0]["params"]
        first = [one.grad for one in parameters]
        for one, gradient in zip(parameters, first, strict=True):
            one.sub_(gradient, alpha=self.param_groups[0]["lr"])
        torch.enable_grad()(closure)()
        for one, gradient in zip(parameters, first, strict=True):
            one.sub_(one.grad + 0.5 * gradient, alpha=self.param_groups[0]["lr"])
        return loss


class Twice(SGD):
    """Computes two gradients per step if given a closure."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            super().step(closure)
        return super().step(closure)


@dataclass
class Loop:
    """One case: what is prepared, and what a block does.

    Attributes:
        is_first_outside: whether the first gradient is computed before ``step``.
        clips: whether the closure clips what it has computed.
        has_two: whether the last layer has an optimizer of its own.
        steps_each: how often a block steps.
        is_given: whether ``step`` is given the closure; else it is called before.
    """

    make: Callable[[Any], Optimizer]
    closures: bool = False
    is_first_outside: bool = False
    clips: bool = False
    is_scheduled: bool = False
    has_two: bool = False
    steps_each: int = 1
    has_block: bool = True
    is_given: bool = True


def _hooked(params: Any) -> Optimizer:
    """Clips the whole gradient before its step; shrinks and clamps weights after it."""
    optimizer = SGD(params, lr=0.1, momentum=0.9)

    def held(one: Optimizer) -> list[nn.Parameter]:
        return [each for group in one.param_groups for each in group["params"]]

    def behind(one: Optimizer, *_: Any) -> None:
        for each in held(one):
            each.data.mul_(0.98).clamp_(-0.3, 0.3)

    def before(one: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(held(one), 0.5)

    optimizer.register_step_post_hook(behind)
    optimizer.register_step_pre_hook(before)
    return optimizer


def _lbfgs(params: Any) -> Optimizer:
    return LBFGS(params, lr=1.0, max_iter=5, history_size=4, line_search_fn="strong_wolfe")


def _small_lbfgs(params: Any) -> Optimizer:
    """An LBFGS whose steps do not amplify rounding."""
    return LBFGS(params, lr=0.1, max_iter=3)


CASES = {
    "lbfgs": Loop(_lbfgs),
    "lbfgs without a search": Loop(_small_lbfgs),
    "lbfgs without a block": Loop(_lbfgs, has_block=False),
    "lbfgs twice": Loop(_small_lbfgs, steps_each=2),
    "lbfgs, scheduled": Loop(lambda p: LBFGS(p, lr=0.2, max_iter=2), is_scheduled=True),
    "lbfgs and sgd": Loop(_small_lbfgs, has_two=True),
    "sam": Loop(lambda params: Sam(params, lr=0.05), closures=True),
    "sam, first outside": Loop(
        lambda params: Sam(params, lr=0.05), closures=True, is_first_outside=True
    ),
    "sam, clipped": Loop(lambda params: Sam(params, lr=0.05), closures=True, clips=True),
    "holding": Loop(lambda params: Holding(params, lr=0.05), closures=True),
    "sgd": Loop(lambda params: SGD(params, lr=0.1, momentum=0.9)),
    "hooks": Loop(_hooked, is_given=False),
    "hooks and sgd": Loop(_hooked, is_given=False, has_two=True),
    "hooks, scheduled": Loop(_hooked, is_given=False, is_scheduled=True),
    "sgd, together": Loop(lambda params: SGD(params, lr=0.1, momentum=0.9), closures=True),
}
FIRST_ORDER = ["sgd"]
TOGETHER = [one for one in CASES if one not in FIRST_ORDER]


class Plain:
    """A stand-in for ``pace`` without Paceline."""

    def prepare(self, *objects: Any, **_: Any) -> Any:
        return objects

    def keep(self, **_: Any) -> None:
        """Nothing is."""

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def step(self) -> Any:
        return nullcontext()

    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def points(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], dim=1)
    return TensorDataset(inputs, targets)


def train(
    pace: Any,
    case: str,
    num_samples: int,
    epochs: int = EPOCHS,
    after_step: Callable[[int], None] = lambda num_steps: None,
) -> dict[str, Tensor]:
    """Return the parameters, the results of each ``step``, and the number of model calls."""
    loop, model = CASES[case], network()
    head = list(model[2].parameters())
    mine = [one for one in model.parameters() if not any(one is its for its in head)]
    optimizers = [loop.make(mine if loop.has_two else list(model.parameters()))]
    if loop.has_two:
        optimizers.append(SGD(head, lr=0.05, momentum=0.9))
    schedules = [StepLR(optimizers[0], 4, gamma=0.5)] if loop.is_scheduled else []
    loader: Any = DataLoader(points(num_samples), batch_size=BATCH)
    ready = pace.prepare(model, *optimizers, loader, *schedules, closures=loop.closures)
    loader = ready[1 + len(optimizers)]
    if isinstance(optimizers[0], Sam):  # its state_dict() omits the inner optimizer
        pace.keep(base=optimizers[0].base)
    losses, num_calls = [], 0

    def evaluated(inputs: Tensor, targets: Tensor, optimizer: Optimizer) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if loop.clips:
            pace.clip_grad_norm_(model.parameters(), 0.3)
        return loss

    for _ in pace.epochs(epochs):
        for inputs, targets in loader:
            with pace.step() if loop.has_block else nullcontext():
                for optimizer in optimizers * loop.steps_each:
                    if loop.is_first_outside:
                        evaluated(inputs, targets, optimizer)

                    def closure(optimizer: Optimizer = optimizer) -> Tensor:
                        return evaluated(inputs, targets, optimizer)  # noqa: B023  called at once

                    if loop.is_given:
                        losses.append(optimizer.step(closure).item())
                        continue
                    losses.append(closure().item())
                    optimizer.step()
            for one in schedules:
                one.step()
            after_step(len(losses))
    found = {name: one.clone() for name, one in model.state_dict().items()}
    return found | {"losses": torch.tensor(losses), "calls": torch.tensor(float(num_calls))}


def twin(case: str, num_samples: int, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """The same loop in plain PyTorch."""
    return train(Plain(), case, num_samples, epochs)


def clips_by_torch(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """Clip in the closure, which has one worker's part of the gradient."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def edits_behind_torch(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """As ``clips_by_torch``, so that torch does not count it."""
    for one in model.parameters():
        one.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


def nothing(pace: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """All is right."""


@dataclass
class Fault:
    """A loop with an unsupported action in its step.

    Attributes:
        after: called when the closure has computed its gradient.
        steps: how often worker 1 steps on its third batch; others once.
        factor: on the loss of worker 1.
        is_skipped, is_broken_off: what worker 1 does with that batch.
    """

    after: Callable[[Any, nn.Module, Optimizer], None] = nothing
    steps: int = 1
    factor: float = 1.0
    is_skipped: bool = False
    is_broken_off: bool = False
    make: Callable[[Any], Optimizer] = _lbfgs
    closures: bool = False


FAULTS = {
    "clipped by torch": Fault(clips_by_torch),
    "changed behind torch": Fault(edits_behind_torch),
    "not finite": Fault(factor=float("nan")),
    "stepped twice by one": Fault(steps=2),
    "skipped by one": Fault(is_skipped=True),
    "left by one": Fault(is_broken_off=True),
    "not said": Fault(make=lambda params: Sam(params, lr=0.05)),
    "not said, optional": Fault(make=lambda params: Twice(params, lr=0.05)),
    "nothing": Fault(),
}


def train_with(pace: Any, fault: Fault) -> None:
    """One epoch over 64 samples; worker 1 may deviate at its third batch."""
    model = network()
    optimizer = fault.make(list(model.parameters()))
    loader: Any = DataLoader(points(64), batch_size=BATCH)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, closures=fault.closures)
    for number, (inputs, targets) in enumerate(loader):
        is_other = number == 2 and pace.worker == 1

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)  # noqa: B023  called at once
            (loss * (fault.factor if pace.worker == 1 else 1.0)).backward()
            fault.after(pace, model, optimizer)
            return loss

        if is_other and fault.is_broken_off:
            break
        with pace.step() as step:
            if is_other and fault.is_skipped:
                step.skip()
                continue
            for _ in range(fault.steps if is_other else 1):
                optimizer.step(closure)


def main() -> None:
    import paceline

    case, folder, num_samples, *slow_s = sys.argv[1:]
    pace = paceline.connect()

    def after_step(num_steps: int) -> None:
        """Allows stopping a run in the middle of a step."""
        time.sleep(float(slow_s[0]) if slow_s else 0.0)
        if num_steps == 5:
            (Path(folder) / "is-there").touch()

    if case in FAULTS:
        train_with(pace, FAULTS[case])
        return
    found = train(pace, case, int(num_samples), after_step=after_step)
    torch.save(found, Path(folder) / f"result-{pace.worker}.pt")


if __name__ == "__main__":
    main()
