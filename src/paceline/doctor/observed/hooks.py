"""Notice where a script's steps end and, while it is observed, time the parts of a step.

    optimizer.step()   a step has ended                              always
    next(loader)       input, timed                                  always; two clock readings
    model(...), .backward(), zero_grad() and step(), .to(device), collectives, .item(), print()
                                                                     only while it is observed

On an accelerator each observed part waits for the device's queue, so that its seconds are the
device's, too. This module must not know what the seconds are for.
"""

import builtins
import gc
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import observation as parts
from .clock import PartsClock
from .patches import NOWHERE, Patches, Place, called_by_user, user_place

_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__",
          "__format__", "__repr__")  # fmt: skip
_SKIPPABLE = {"item()", "__float__()", "__int__()", "__format__()", "__repr__()", "print()",
              "gc.collect()", "torch.cuda.synchronize()", "torch.cuda.empty_cache()"}  # fmt: skip
"""Calls that may return an old value: no tensor, which has an old graph, and no condition or index."""
_EVERY = 100
"""A read that is skipped is made once in so many times, so that a loop that waits for it ends."""
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "reduce",
                "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object",
                "all_to_all", "send", "recv")  # fmt: skip


def synchronize() -> None:
    """Wait for the accelerator, if the process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Hooks:
    """The hooks of one process.

    Args:
        on_step: called when a step has ended, in the script's own thread.

    Attributes:
        optimizer: the optimizer whose steps are counted.
        models: the modules that the script itself calls, by their id.
        clock: the time of each part while the script is observed.
        is_observing: whether parts are timed.
        waits: how often, and for how many seconds, the script waits at each place and call.
        skips_waits: whether the script's reads and prints return an old value at once.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._thread = threading.get_ident()
        self._patches = Patches()
        self._before_step: Any = None
        self._others = 0
        self.clock = PartsClock()
        self.is_observing = self.skips_waits = False
        self.optimizer: Optimizer | None = None
        self.models: dict[int, nn.Module] = {}
        self.waits: dict[tuple[Place, str], list[float]] = {}
        self._known: dict[tuple[Place, str], Any] = {}
        self._num_skipped: dict[tuple[Place, str], int] = {}
        self._places: dict[int, Place] = {}
        Patches().wrap(Optimizer, "__init__", self._recorded)
        register_optimizer_step_post_hook(self._stepped)

    def _recorded(self, init: Callable[..., None]) -> Callable[..., None]:
        def initialize(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._places[id(optimizer)] = user_place()
            init(optimizer, *args, **kwargs)

        return initialize

    @property
    def place(self) -> Place:
        """The line where the optimizer was made."""
        return self._places.get(id(self.optimizer), NOWHERE)

    # -- steps ----------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count a step, and count another optimizer once only that one goes on stepping."""
        if threading.get_ident() != self._thread:
            return
        if self.is_observing:
            self._end()
        if self.optimizer is None or self._others > 2:
            self.optimizer, self._others = optimizer, 0
        if optimizer is self.optimizer:
            self._others = 0
            self._on_step()
        else:
            self._others += 1

    @property
    def longest_skippable(self) -> tuple[Place, str] | None:
        """The place and call of the longest waits that may be skipped; None if there are none."""
        seconds = {at: spent for at, (_, spent) in self.waits.items() if at[1] in _SKIPPABLE}
        return max(seconds, key=lambda at: seconds[at], default=None)

    # -- parts ----------------------------------------------------------------------------------

    def waited(self, begins: bool) -> None:
        """Time the input; called before and after each fetch of a batch."""
        if self.is_observing:
            self._begin(parts.INPUT) if begins else self._end()

    def _begin(self, part: str) -> None:
        synchronize()
        self.clock.begin(part, perf_counter())

    def _end(self) -> None:
        synchronize()
        self.clock.end(perf_counter())

    def taken(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        return self.clock.taken(perf_counter())

    def observe(self) -> None:
        """Time the parts of steps from now on."""
        wrap = self._patches.wrap
        wrap(nn.Module, "__call__", self._model_called)
        wrap(torch.autograd, "backward", self._part(parts.BACKWARD))
        wrap(torch.autograd, "grad", self._part(parts.BACKWARD))
        wrap(Optimizer, "zero_grad", self._part(parts.OPTIMIZER))
        wrap(nn.Module, "zero_grad", self._part(parts.OPTIMIZER))
        wrap(nn.utils, "clip_grad_norm_", self._part(parts.OPTIMIZER))
        for name in ("to", "cuda"):
            wrap(Tensor, name, self._copied)
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                wrap(torch.distributed, name, self._part(parts.EXCHANGE))
        self.watch_waits()
        self._before_step = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: self._begin(parts.OPTIMIZER)
        )
        self.clock = PartsClock()
        self.clock.taken(perf_counter())
        self.is_observing = True

    def leave(self) -> None:
        """Stop timing, and put everything back."""
        self.is_observing = False
        self._patches.undo()
        if self._before_step is not None:
            self._before_step.remove()
            self._before_step = None

    def watch_waits(self) -> None:
        """Watch reads of numbers, prints, and other calls that wait for the device."""
        wrap = self._patches.wrap
        for name in _READS:
            wrap(Tensor, name, self._waiting(f"{name}()", parts.WAITS))
        wrap(builtins, "print", self._waiting("print()", parts.PRINTS))
        wrap(gc, "collect", self._waiting("gc.collect()", parts.WAITS))
        wrap(torch.cuda, "synchronize", self._waiting("torch.cuda.synchronize()", parts.WAITS))
        wrap(torch.cuda, "empty_cache", self._waiting("torch.cuda.empty_cache()", parts.WAITS))

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread or not self.is_observing

    def _part(self, part: str) -> Callable[[Any], Any]:
        def make(call: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if self._is_elsewhere() or self.clock.part == part:
                    return call(*args, **kwargs)
                self._begin(part)
                try:
                    return call(*args, **kwargs)
                finally:
                    self._end()

            return timed

        return make

    def _model_called(self, call: Any) -> Any:
        def timed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.clock.part or self._is_elsewhere():
                return call(module, *args, **kwargs)
            self.models[id(module)] = module
            self._begin(parts.FORWARD)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._end()

        return timed

    def _copied(self, call: Any) -> Any:
        def timed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.clock.part or self._is_elsewhere():
                return call(tensor, *args, **kwargs)
            self._begin(parts.COPY)
            try:
                return call(tensor, *args, **kwargs)
            finally:
                self._end()

        return timed

    def _waiting(self, what: str, part: str) -> Callable[[Any], Any]:
        def make(call: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread:
                    return call(*args, **kwargs)
                place = called_by_user()
                if not place.line or self.clock.part == parts.INPUT:
                    return call(*args, **kwargs)
                if self.skips_waits:
                    if what not in _SKIPPABLE:
                        return call(*args, **kwargs)
                    return self._remembered((place, what), call, args, kwargs)
                return self._wait((place, what), part, call, args, kwargs)

            return timed

        return make

    def _wait(self, at: tuple[Place, str], part: str, call: Any, args: Any, kwargs: Any) -> Any:
        start_s = perf_counter()
        if self.is_observing:
            self.clock.begin(part, start_s)
        try:
            return call(*args, **kwargs)
        finally:
            end_s = perf_counter()
            if self.is_observing:
                self.clock.end(end_s)
            times_and_seconds = self.waits.setdefault(at, [0.0, 0.0])
            times_and_seconds[0] += 1
            times_and_seconds[1] += end_s - start_s

    def _remembered(self, at: tuple[Place, str], call: Any, args: Any, kwargs: Any) -> Any:
        number = self._num_skipped.get(at, 0)
        if number % _EVERY == 0:
            self._known[at] = call(*args, **kwargs)
        self._num_skipped[at] = number + 1
        return self._known[at]
