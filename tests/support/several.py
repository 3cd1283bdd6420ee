"""Loops of several models and optimizers, run by Paceline as scripts and plainly by the tests.

    python several.py CASE FOLDER UPDATES SLOW_S       results go to FOLDER/result-N.pt

In float64, over numbers, which seed all draws. Each case describes a block in phases: a backward
pass and the optimizer that steps after it. In plain PyTorch a phase is done for all mini-batches of
an update before a step on their mean; so is full-sync.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

Results = dict[str, Tensor]


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


@dataclass
class Parts:
    """The objects a script prepares."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)

    @classmethod
    def of_gan(cls) -> "Parts":
        torch.manual_seed(3)
        maker, judge = _mlp(2, 8, 3), _mlp(3, 8, 1)
        making = Adam(maker.parameters(), lr=0.02, betas=(0.5, 0.999))
        return cls([maker, judge], [making, SGD(judge.parameters(), lr=0.05, momentum=0.9)])

    @classmethod
    def of_actor(cls) -> "Parts":
        torch.manual_seed(4)
        body, actor, critic = _mlp(3, 6), _mlp(6, 6, 2), _mlp(6, 6, 1)
        acting = Adam([*body.parameters(), *actor.parameters()], lr=0.01)
        return cls([body, actor, critic], [acting, SGD(critic.parameters(), lr=0.1, momentum=0.5)])


Phase = tuple[Callable[[Parts, int], Tensor | None], Sequence[int]]
"""The loss of the mini-batch of this number (None: skipped), and the optimizer that then steps."""


def _real() -> Tensor:
    return torch.rand(4, 3, dtype=torch.float64) + torch.tensor([0.0, 1.0, 2.0])


def _noise() -> Tensor:
    return torch.randn(4, 2, dtype=torch.float64)


def _judging(parts: Parts, number: int) -> Tensor:
    maker, judge = parts.models
    bce, ones = nn.functional.binary_cross_entropy_with_logits, torch.ones(4, 1).double()
    real, made = judge(_real()), judge(maker(_noise()).detach())
    return bce(real, ones) + bce(made, 0 * ones)


def _making(parts: Parts, number: int) -> Tensor:
    maker, judge = parts.models
    ones = torch.ones(4, 1).double()
    return nn.functional.binary_cross_entropy_with_logits(judge(maker(_noise())), ones)


def _criticising(parts: Parts, number: int) -> Tensor:
    maker, judge = parts.models
    return judge(maker(_noise()).detach()).mean() - judge(_real()).mean()


def _now_and_then(parts: Parts, number: int) -> Tensor | None:
    """The generator of a WGAN, whose critic has stepped five times since."""
    maker, judge = parts.models
    return -judge(maker(_noise())).mean() if number % 5 == 4 else None


def _acting(parts: Parts, number: int) -> Tensor:
    body, actor, critic = parts.models
    inputs = torch.rand(4, 3, dtype=torch.float64)
    hidden, reward = body(inputs), inputs.sum(1)
    chosen = actor(hidden).log_softmax(1)[:, 0]
    value = critic(hidden)[:, 0]
    return -(chosen * (reward - value).detach()).mean() + (reward - value).square().mean()


CASES: dict[str, tuple[Callable[[], Parts], Sequence[Phase]]] = {
    "gan": (Parts.of_gan, [(_judging, [1]), (_making, [0])]),
    "wgan": (Parts.of_gan, [(_criticising, [1]), (_now_and_then, [0])]),
    "actor": (Parts.of_actor, [(_acting, [0, 1])]),
}


ODD = ("by turns", "loading", "outside")
"""The GAN with a variation."""


def block(parts: Parts, phases: Sequence[Phase], number: int) -> None:
    """The actions of a script in its block."""
    for loss_of, steps in phases:
        loss = loss_of(parts, number)
        if loss is None:
            continue
        for part in steps:
            parts.optimizers[part].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for part in steps:
            parts.optimizers[part].step()


def gather(parts: Parts) -> Results:
    """All parameters and optimizer states."""
    results = {
        f"{i}.{name}": value.detach().clone()
        for i, model in enumerate(parts.models)
        for name, value in model.state_dict().items()
    }
    for i, optimizer in enumerate(parts.optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                results[f"{i}:{number}.{key}"] = torch.as_tensor(value, dtype=torch.float64)
    return results


def train(
    pace: Any, case: str, updates: int, folder: Path | None = None, slow_s: float = 0.0
) -> Results:
    make, phases = CASES["gan" if case in ODD else case]
    parts = make()
    pace.prepare(*parts.models, *parts.optimizers)
    if case == "loading":
        _load(parts.optimizers[0])
    if case == "by turns" and pace.worker:
        phases = phases[::-1]
    for turn, number in enumerate(pace.updates(updates)):
        with nullcontext() if case == "outside" else pace.step():
            time.sleep(slow_s)
            # Within a step the loop index is that of the update in all workers.
            block(parts, phases, turn if case == "wgan" else number)
        if folder is not None and turn == 5:
            (folder / "is-there").touch()
    return gather(parts)


def _load(optimizer: Optimizer) -> None:
    """Load a state as after 100 steps."""
    state = optimizer.state_dict()
    held = [one for group in optimizer.param_groups for one in group["params"]]
    state["state"] = {
        number: {"step": torch.tensor(100.0), **{key: torch.zeros_like(one) for key in _MOMENTS}}
        for number, one in enumerate(held)
    }
    optimizer.load_state_dict(state)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _each_seeded(seed: int, version: int, parts: int) -> Iterator[int]:
    from paceline import step_seed

    for number in range(version * parts, (version + 1) * parts):
        drawn = step_seed(seed, 0, number)
        random.seed(drawn)
        torch.manual_seed(drawn)
        yield number


def twin(case: str, seed: int, updates: int, workers: int, *, is_at_once: bool = False) -> Results:
    """The same in plain PyTorch: block v is of the numbers v K to v K + K - 1.

    Args:
        is_at_once: all optimizers of a block step at its end, on gradients of before.
    """
    make, phases = CASES[case]
    parts = make()
    states: dict[int, Tensor] = {}
    for version in range(updates):
        waiting: dict[Tensor, Tensor] = {}
        for place, (loss_of, steps) in enumerate(phases):
            for part in steps:
                parts.optimizers[part].zero_grad()
            losses = 0
            for number in _each_seeded(seed, version, workers):
                if place:
                    torch.set_rng_state(states[number])
                loss = loss_of(parts, version if case == "wgan" else number)
                if loss is not None:
                    (loss / workers).backward()  # type: ignore[no-untyped-call]
                    losses += 1
                states[number] = torch.get_rng_state()
            for part in steps if losses else ():
                if is_at_once:
                    waiting |= _gradients(parts.optimizers[part])
                else:
                    parts.optimizers[part].step()
        if is_at_once:
            for one, gradient in waiting.items():
                one.grad = gradient
            for optimizer in parts.optimizers:
                optimizer.step()
    return gather(parts)


def _gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    held = (one for group in optimizer.param_groups for one in group["params"])
    return {one: one.grad.clone() for one in held if one.grad is not None}


def local_twin(
    case: str, seed: int, updates: int, *, workers: int, num_steps: int
) -> list[Results]:
    """The same for local steps: blocks per worker, with parameters averaged after some of them."""
    make, phases = CASES[case]
    every = [make() for _ in range(workers)]
    for update in range(updates):
        for place, number in enumerate(_each_seeded(seed, update, workers * num_steps)):
            block(every[place // num_steps], phases, number)
        with torch.no_grad():
            for shared in zip(*map(_parameters, every), strict=True):
                mean = torch.stack(shared).mean(0)
                for one in shared:
                    one.copy_(mean)
    return [gather(parts) for parts in every]


def _parameters(parts: Parts) -> list[nn.Parameter]:
    return [one for model in parts.models for one in model.parameters()]


if __name__ == "__main__":
    import paceline

    case, target, count, slow_s = sys.argv[1:]
    pace = paceline.connect()
    results = train(pace, case, int(count), Path(target), float(slow_s))
    torch.save(results, Path(target) / f"result-{pace.worker}.pt")
