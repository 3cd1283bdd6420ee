"""The fixes that are tried between two steps of a running script, and their order.

`knobs_for` yields the fixes that can change something here, in the order in which they are tried. A
fix that can only remove a part under 2 % of the step is reported, but not tried. This module must
not know how fixes are measured.
"""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from ...tuning import allocator
from . import observation as parts
from .feed import WatchedFeed
from .hooks import Hooks
from .knob import Knob
from .pairs import WORTH
from .patches import NOWHERE, Place
from .ways import Bfloat16, ChannelsLastWay, Compiled, Ways

_IDLE = 0.5
"""With less than this share of CPU time a loader waits for something else, and may have more
workers than cores."""
_WAITING_PER_CORE = 4
_MOSTLY = 0.5
"""Share of a step; if its input takes more, the loader's fixes are tried first."""


class Setting(Knob):
    """A fix that one call sets and another call puts back."""

    def __init__(
        self, name: str, fix: str, on: Callable[[], object], off: Callable[[], object],
        *, changes: bool = False, place: Place = NOWHERE, bound: float = 1.0,
    ) -> None:  # fmt: skip
        self.name, self.fix, self._on, self._off = name, fix, on, off
        self.changes, self.place, self.bound = changes, place, bound

    def turn(self, is_on: bool) -> None:
        (self._on if is_on else self._off)()


class Loader(Knob):
    """Batches from a copy of the training loader with changed settings, beside those kept before.

    Each copy has batches ready when it is turned to, so blocks begin after as many as it can hold.
    """

    def __init__(self, feed: WatchedFeed, bound: float, **settings: Any) -> None:
        code = ", ".join(f"{name}={value}" for name, value in settings.items())
        self.name, self.fix, self.place = code, f"{code} in the DataLoader", feed.place
        self.bound, self._feed, self.words = bound, feed, settings
        workers = int(settings.get("num_workers", feed.num_workers))
        self.stride = max(1, workers)
        self.settle, self.settle_off = 3 * workers + 1, 3 * feed.num_workers + 1

    def turn(self, is_on: bool) -> None:
        self._feed.turn(self.words, is_on)

    def close(self) -> None:
        self._feed.release(self.words)


class OptimizerFlags(Knob):
    """Flags of an optimizer's parameter groups, such as ``fused``."""

    def __init__(self, optimizer: Optimizer, place: Place, bound: float, **flags: bool) -> None:
        code = ", ".join(f"{name}={value}" for name, value in flags.items())
        self.name, self.fix = f"optimizer {code}", f"{code} in {type(optimizer).__name__}(...)"
        self.bound, self.place, self._optimizer, self.words = bound, place, optimizer, flags
        self._old = [{name: group[name] for name in flags} for group in optimizer.param_groups]

    def turn(self, is_on: bool) -> None:
        for group, old in zip(self._optimizer.param_groups, self._old, strict=True):
            group.update(self.words if is_on else old)


Share: TypeAlias = Callable[..., float]
"""The share of a step that given parts take now, with the fixes that are kept."""


def knobs_for(
    hooks: Hooks, feed: WatchedFeed, share: Share, fetch_cpu: float, *, on_cpu: bool
) -> Iterator[Knob]:
    """Yield every fix that could change something here, each made when its turn comes.

    Args:
        share: the share of a step that given parts take now.
        fetch_cpu: share of the time of fetching a batch in which this process uses the CPU.
        on_cpu: whether the script trains on the CPU.
    """
    is_fed = share(parts.INPUT) > _MOSTLY
    if is_fed:
        yield from _loaders(feed, share, fetch_cpu, on_cpu)
    yield from _of_process(on_cpu)
    if not is_fed:
        yield from _loaders(feed, share, fetch_cpu, on_cpu)
    if hooks.optimizer is not None:
        yield from _of_optimizer(hooks.optimizer, hooks.place, share, on_cpu)
    if hooks.longest_skippable is not None:  # late, since an old number may end the script
        yield _without_waits(hooks, *hooks.longest_skippable, share, on_cpu)
    model = main_model(hooks)
    if model is not None:  # last, since to compile it may take all the time that is left
        yield from _of_model(model, share, on_cpu)


def main_model(hooks: Hooks) -> nn.Module | None:
    """Return the model with the most trained parameters, of those that the script calls itself."""
    if hooks.optimizer is None:
        return None
    trained = {id(p) for group in hooks.optimizer.param_groups for p in group["params"]}
    sizes = {
        key: sum(p.numel() for p in model.parameters() if id(p) in trained)
        for key, model in hooks.models.items()
    }
    largest = max(sizes, key=lambda key: sizes[key], default=None)
    return hooks.models[largest] if largest is not None and sizes[largest] else None


def _loaders(feed: WatchedFeed, share: Share, cpu: float, on_cpu: bool) -> Iterator[Knob]:
    loader = feed.loader
    if loader is None or not feed.may_have_workers:
        return
    bound = share(parts.INPUT)
    if loader.num_workers == 0:
        others = max(1e-9, 1.0 - bound)
        cores = len(os.sched_getaffinity(0))
        max_workers = cores if cpu > _IDLE else cores * _WAITING_PER_CORE
        workers = max(1, min(max_workers, math.ceil(bound / others) + 1))
        yield Loader(feed, bound, num_workers=workers, persistent_workers=True)
    if not on_cpu and not loader.pin_memory:
        yield Loader(feed, share(parts.INPUT, parts.COPY), pin_memory=True)


def _without_waits(hooks: Hooks, place: Place, what: str, share: Share, on_cpu: bool) -> Knob:
    def on() -> None:
        hooks.watch_waits()
        hooks.skips_waits = True

    def off() -> None:
        hooks.skips_waits = False
        hooks.leave()

    bound = share(parts.WAITS, parts.PRINTS) if on_cpu else 1.0
    name = f"{what} every N steps"
    fix = "read and print every N steps: add up loss.detach() in between"
    return Setting(name, fix, on, off, place=place, bound=bound)


def _of_process(on_cpu: bool) -> Iterator[Knob]:
    if torch.is_anomaly_enabled():
        yield Setting("anomaly detection off", "remove torch.autograd.set_detect_anomaly",
                      partial(torch.autograd.set_detect_anomaly, False),
                      partial(torch.autograd.set_detect_anomaly, True))  # fmt: skip
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        yield Setting(
            "deterministic algorithms off",
            "remove torch.use_deterministic_algorithms if runs need not repeat to the bit",
            partial(torch.use_deterministic_algorithms, False),
            partial(torch.use_deterministic_algorithms, True, warn_only=warns), changes=True,
        )  # fmt: skip
    if not on_cpu:
        yield from _of_device()
        return
    num_threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    for count in dict.fromkeys((cores, max(1, cores // 2), 1)):
        if count != num_threads:
            yield Setting(f"{count} thread{'s' * (count > 1)}", f"torch.set_num_threads({count})",
                          partial(torch.set_num_threads, count),
                          partial(torch.set_num_threads, num_threads))  # fmt: skip
    if allocator.may_keep() and not allocator.is_kept():
        yield Setting(
            "freed memory stays",
            "start it with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776",
            partial(allocator.keep, True), partial(allocator.keep, False),
        )  # fmt: skip


def _of_device() -> Iterator[Knob]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    if cudnn.deterministic:
        yield Setting("cudnn.deterministic off",
                      "remove cudnn.deterministic if runs need not repeat to the bit",
                      partial(setattr, cudnn, "deterministic", False),
                      partial(setattr, cudnn, "deterministic", True), changes=True)  # fmt: skip
    if not cudnn.benchmark:
        yield Setting("cudnn.benchmark", "torch.backends.cudnn.benchmark = True",
                      partial(setattr, cudnn, "benchmark", True),
                      partial(setattr, cudnn, "benchmark", False))  # fmt: skip
    if not matmul.allow_tf32:
        yield Setting("TF32", 'torch.set_float32_matmul_precision("high")',
                      partial(setattr, matmul, "allow_tf32", True),
                      partial(setattr, matmul, "allow_tf32", False), changes=True)  # fmt: skip


def _of_optimizer(optimizer: Optimizer, place: Place, share: Share, on_cpu: bool) -> Iterator[Knob]:
    bound = share(parts.OPTIMIZER)
    groups = optimizer.param_groups
    if on_cpu and all("fused" in group and not group["fused"] for group in groups):
        yield OptimizerFlags(optimizer, place, bound, fused=True, foreach=False)
    if any(group.get("foreach") is False and not group.get("fused") for group in groups) or (
        on_cpu and all(group.get("foreach", True) is None for group in groups)
    ):
        yield OptimizerFlags(optimizer, place, bound, foreach=True)


def _of_model(model: nn.Module, share: Share, on_cpu: bool) -> Iterator[Knob]:
    if isinstance(model, torch._dynamo.OptimizedModule):
        return
    ways, kind = Ways(model), "cpu" if on_cpu else "cuda"
    model_knobs: list[Knob] = []
    if any(isinstance(layer, nn.Conv2d) and layer.groups == 1 for layer in model.modules()):
        model_knobs.append(ChannelsLastWay(ways))
    model_knobs.append(Compiled(ways))
    if not torch.is_autocast_enabled(kind):
        model_knobs.append(Bfloat16(ways, kind))
    for knob in model_knobs:
        knob.bound = share(parts.FORWARD, parts.BACKWARD, parts.REST)
    yield from model_knobs


def is_hopeless(knob: Knob) -> bool:
    """Whether a fix cannot save 2 % whatever it does, by the budget alone."""
    return knob.bound < WORTH
