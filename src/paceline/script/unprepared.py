"""Refuses by name to train what was not prepared, in a run of several workers.

Such weights would diverge: every worker has its own copy, and trains it on its own part of the
data. Allowed is what belongs to one worker: tensors of no module, between epochs or within
one mini-batch (an input that is optimized), and everything before ``prepare`` and after the last
epoch. Optimizers inside the prepared one step with it. This module must not know exchanges.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ConfigError
from ..store.optimizer_copy import is_twin

AnyScheduler = LRScheduler | ReduceLROnPlateau
Keep = Callable[[str, AnyScheduler], bool]


class _Member(threading.local):
    """The member whose thread this is; the inline engine has several in one process."""

    guard: "Guard | None" = None


_member = _Member()
_installed: list[Any] = []
"""The hooks on all optimizers, once a member is guarded."""


class Guard:
    """Checks every step of an optimizer in this thread.

    Args:
        prepared: the optimizers of the run.
        mini_batch: returns one object for each current mini-batch; None: there is none.
        is_over: whether the script has no more epochs.
    """

    def __init__(
        self,
        prepared: Sequence[Optimizer],
        mini_batch: Callable[[], object | None],
        is_over: Callable[[], bool],
    ) -> None:
        self._prepared = {id(optimizer) for optimizer in prepared}
        self._mini_batch = mini_batch
        self._is_over = is_over
        self._is_stepping = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Check steps in this thread from now on."""
        _member.guard = self
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_before))
            _installed.append(register_optimizer_step_post_hook(_after))

    def before(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._prepared:
            self._is_stepping = True
        elif not (self._is_stepping or is_twin(optimizer) or self._is_over()):
            self._refuse_training(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._prepared:
            self._is_stepping = False

    def _refuse_training(self, optimizer: Optimizer) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            raise _refused(optimizer)
        if (now := self._mini_batch()) is None:
            return
        if self._seen.setdefault(optimizer, now) is not now:
            raise _refused(optimizer)


def unguard() -> None:
    """Stop checking the steps of this thread's optimizers."""
    _member.guard = None


class Strays:
    """Refuses to train by hand parameters that the loss depends on and that were not prepared.

    They are found in the graph of the first loss and compared for a few steps after it. Frozen
    and unchanged ones are allowed.

    Args:
        known: the parameters of the prepared model.
    """

    _LOOKS = 8

    def __init__(self, known: Iterable[nn.Parameter]) -> None:
        self._known = {id(parameter) for parameter in known}
        self._found: list[tuple[nn.Parameter, Tensor]] | None = None
        self._num_looks = 0

    def look(self, loss: Tensor) -> None:
        """Check the parameters that this loss depends on.

        Raises:
            ConfigError: one that was not prepared has changed since the first loss.
        """
        if self._num_looks >= self._LOOKS or self._found == []:
            return
        self._num_looks += 1
        if self._found is None:
            strays = [leaf for leaf in leaves_of(loss) if id(leaf) not in self._known]
            self._found = [(stray, stray.detach().clone()) for stray in strays]
            return
        for stray, before in self._found:
            if stray.shape != before.shape or not torch.equal(stray, before):
                raise ConfigError(
                    f"a parameter of shape {tuple(stray.shape)} is trained by hand and was not "
                    "prepared: it would differ between workers; prepare its network, and an "
                    "optimizer that steps it, in the same call as the others"
                )


class StraySchedulers:
    """Schedulers of the prepared optimizer that were not prepared.

    Between epochs they may step. Inside the loop each would count the steps of its own worker, and
    an update would have the rate of the worker that executes it. They are searched for when a rate
    changes inside the loop, but only a few times: a rate may also be changed by hand. Where
    others were prepared, which change it, too, they are searched for when the first loops begin,
    and their counts are compared.

    Args:
        known: schedulers that were prepared; those that they hold are known, too.
    """

    _LOOKS = 4

    def __init__(self, optimizer: Optimizer, known: Sequence[AnyScheduler] = ()) -> None:
        self._optimizer = optimizer
        self._known = {id(scheduler) for scheduler in _with_inner(known)}
        self._rates: list[Any] = []
        self._num_looks = 0
        self._tracked: list[AnyScheduler] = []
        """The strays, where others were prepared."""
        self._counts: list[Any] = []
        """Of those, when the loop began."""

    def found(self) -> list[AnyScheduler]:
        """The schedulers, in the order in which they were made."""
        every = _schedulers_of(self._optimizer)
        strays = [scheduler for scheduler in every if id(scheduler) not in self._known]
        return strays if len(strays) < 2 else _by_age(strays)

    def keep(self, keep: Keep, number: int) -> list[AnyScheduler]:
        """Keep them in checkpoints from now on; restore them in a resumed run.

        One that was made after ``prepare`` has reset the rates to its first ones.

        Args:
            keep: keeps a scheduler; returns whether it was restored from a checkpoint.
            number: of the optimizer.

        Returns:
            The schedulers.
        """
        strays = self.found()
        for place, stray in enumerate(strays):
            rates = self._current()
            has_reset = getattr(stray, "_last_lr", None) == rates
            if keep(f"unprepared {type(stray).__name__} {number} {place}", stray) and has_reset:
                for group, rate in zip(self._optimizer.param_groups, stray._last_lr, strict=True):
                    group["lr"] = rate
        return strays

    def open(self) -> None:
        """Note the rates when a loop begins, or the counts."""
        self._rates = self._current()
        if self._known and self._num_looks < self._LOOKS:
            self._num_looks += 1
            self._tracked = self.found()
        self._counts = [*map(_count_of, self._tracked)]

    def check(self) -> None:
        """Raise ConfigError where one has stepped since then."""
        if self._known:
            for stray, count in zip(self._tracked, self._counts, strict=True):
                if _count_of(stray) != count:
                    raise self._refusal(stray)
            return
        if self._num_looks >= self._LOOKS or self._rates == (rates := self._current()):
            return
        self._rates = rates
        self._num_looks += 1
        for stray in self.found():
            if getattr(stray, "_last_lr", None) == rates:
                raise self._refusal(stray)

    def _refusal(self, stray: AnyScheduler) -> ConfigError:
        return ConfigError(
            f"{type(stray).__name__} was stepped inside the loop, but it was not prepared: "
            "each worker would count its own steps, not the updates of the run; "
            "prepare it: pace.prepare(model, optimizer, loader, scheduler)"
        )

    def _current(self) -> list[Any]:
        return [group.get("lr") for group in self._optimizer.param_groups]


def _count_of(scheduler: AnyScheduler) -> Any:
    return getattr(scheduler, "last_epoch", None)


def _with_inner(schedulers: Iterable[AnyScheduler]) -> list[AnyScheduler]:
    """These and the schedulers that they hold, which step with them: as SequentialLR's."""
    every, left = dict[int, AnyScheduler](), list(schedulers)
    while left:
        scheduler = left.pop()
        if id(scheduler) in every:
            continue
        every[id(scheduler)] = scheduler
        for value in vars(scheduler).values():
            inner = value.values() if isinstance(value, dict) else value
            held = inner if isinstance(value, dict | list | tuple) else [value]
            left += [each for each in held if isinstance(each, AnyScheduler)]
    return list(every.values())


def _schedulers_of(optimizer: Optimizer) -> list[AnyScheduler]:
    """Schedulers that refer to it: 0.02 s among 300,000 objects; looking at each takes 0.07 s."""
    holders = gc.get_referrers(optimizer)
    # An object whose __dict__ was read refers only by that; a module's dict has a __name__.
    dicts = [holder for holder in holders if type(holder) is dict and "__name__" not in holder]
    holders += gc.get_referrers(*dicts) if dicts else []
    found = {id(holder): holder for holder in holders if issubclass(type(holder), AnyScheduler)}
    return [each for each in found.values() if getattr(each, "optimizer", None) is optimizer]


def _by_age(schedulers: Sequence[AnyScheduler]) -> list[AnyScheduler]:
    """The oldest first: the collector has older ones in later generations, each in turn."""
    wanted = {id(scheduler) for scheduler in schedulers}
    return [
        item
        for generation in (2, 1, 0)
        for item in gc.get_objects(generation)
        if id(item) in wanted
    ]


def leaves_of(loss: Tensor) -> list[nn.Parameter]:
    """The parameters that a backward pass of ``loss`` would give gradients to."""
    found: dict[int, nn.Parameter] = {}
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return list(found.values())


def _refused(optimizer: Optimizer) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name} was stepped, but it was not prepared: what it trains would differ between "
        "workers; prepare it and its model as well, in the same call: model, other, optimizer, "
        "its_optimizer, loader = pace.prepare(model, other, optimizer, its_optimizer, loader)"
    )


def _before(optimizer: Optimizer, _: Any, __: Any) -> None:
    if _member.guard is not None:
        _member.guard.before(optimizer)


def _after(optimizer: Optimizer, _: Any, __: Any) -> None:
    if _member.guard is not None:
        _member.guard.after(optimizer)
