"""What was not prepared: in a run of several workers its training is refused by name.

What they train would drift: every worker has its own copy, and trains it on its own part of the
data. Let by is what belongs to one worker alone: tensors of no module, between epochs or within
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
    """Looks at every step of an optimizer in this thread.

    Args:
        prepared: the optimizers of the run.
        mini_batch: what is the same object as long as one mini-batch is at work; None: none is.
        is_over: whether the script has no more epochs.
    """

    def __init__(
        self,
        prepared: Sequence[Optimizer],
        mini_batch: Callable[[], object | None],
        is_over: Callable[[], bool],
    ) -> None:
        self._prepared = {id(one) for one in prepared}
        self._mini_batch = mini_batch
        self._is_over = is_over
        self._is_stepping = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """From now on, in this thread."""
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
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if any(isinstance(one, nn.Parameter) for one in held):
            raise _refused(optimizer)
        if (now := self._mini_batch()) is None:
            return
        if self._seen.setdefault(optimizer, now) is not now:
            raise _refused(optimizer)


def unguard() -> None:
    """From now on this thread's optimizers step as they like."""
    _member.guard = None


class Strays:
    """Parameters that the loss depends on and that were not prepared: nobody may train them.

    Looked for in the graph of the first loss; then for a few steps, whether a loop changes them by
    hand. Frozen ones, and those that nobody changes, are the script's own affair.

    Args:
        known: the parameters of the prepared model.
    """

    _LOOKS = 8

    def __init__(self, known: Iterable[nn.Parameter]) -> None:
        self._known = {id(one) for one in known}
        self._found: list[tuple[nn.Parameter, Tensor]] | None = None
        self._num_looks = 0

    def look(self, loss: Tensor) -> None:
        """A backward pass of this loss begins.

        Raises:
            ConfigError: one of them has changed since the first.
        """
        if self._num_looks >= self._LOOKS or self._found == []:
            return
        self._num_looks += 1
        if self._found is None:
            strays = [one for one in leaves_of(loss) if id(one) not in self._known]
            self._found = [(one, one.detach().clone()) for one in strays]
            return
        for one, before in self._found:
            if one.shape != before.shape or not torch.equal(one, before):
                raise ConfigError(
                    f"a parameter of shape {tuple(one.shape)} is trained by hand and was not "
                    "prepared: it would become another in each worker; prepare its network, and an "
                    "optimizer that steps it, in the same call as the others"
                )


class StraySchedulers:
    """Schedulers of the prepared optimizer that were not prepared.

    Between epochs they may step. Inside the loop each would count the steps of its own worker, and
    an update would have the rate of whoever executes it. They are looked for when a rate changes
    inside the loop, and a few times only: it may also be changed by hand.

    Args:
        known: schedulers that were prepared.
    """

    _LOOKS = 4

    def __init__(self, optimizer: Optimizer, known: Sequence[AnyScheduler] = ()) -> None:
        self._optimizer = optimizer
        self._known = {id(one) for one in known}
        self._rates: list[Any] = []
        self._num_looks = 0

    def found(self) -> list[AnyScheduler]:
        """They, in the order in which they were made."""
        found = [one for one in _schedulers_of(self._optimizer) if id(one) not in self._known]
        return found if len(found) < 2 else _by_age(found)

    def keep(self, keep: Keep, number: int) -> list[AnyScheduler]:
        """From now on checkpoints have them; on a run that goes on they stand where they stood.

        One that was made behind ``prepare`` has set the rates back to its first ones.

        Args:
            keep: says whether it has brought a scheduler to where a checkpoint had it.
            number: of the optimizer.

        Returns:
            They.
        """
        found = self.found()
        for place, one in enumerate(found):
            rates = self._current()
            has_set_back = getattr(one, "_last_lr", None) == rates
            if keep(f"unprepared {type(one).__name__} {number} {place}", one) and has_set_back:
                for group, rate in zip(self._optimizer.param_groups, one._last_lr, strict=True):
                    group["lr"] = rate
        return found

    def open(self) -> None:
        """A loop begins."""
        self._rates = self._current()

    def check(self) -> None:
        """Raise ConfigError where one has stepped since."""
        if self._num_looks >= self._LOOKS or self._rates == (rates := self._current()):
            return
        self._rates = rates
        self._num_looks += 1
        for one in self.found():
            if getattr(one, "_last_lr", None) == rates:
                raise ConfigError(
                    f"{type(one).__name__} was stepped inside the loop, and it was not prepared: "
                    "each worker would count its own steps, and not the updates of the run; "
                    "prepare it: pace.prepare(model, optimizer, loader, scheduler)"
                )

    def _current(self) -> list[Any]:
        return [group.get("lr") for group in self._optimizer.param_groups]


def _schedulers_of(optimizer: Optimizer) -> list[AnyScheduler]:
    """Whoever holds it is found in 0.02 s among 300,000 objects; a look at each takes 0.07 s."""
    holders = gc.get_referrers(optimizer)
    # An object whose __dict__ somebody has asked for holds by that alone; a module's is its own.
    dicts = [one for one in holders if type(one) is dict and "__name__" not in one]
    holders += gc.get_referrers(*dicts) if dicts else []
    found = {id(one): one for one in holders if issubclass(type(one), AnyScheduler)}
    return [one for one in found.values() if getattr(one, "optimizer", None) is optimizer]


def _by_age(schedulers: Sequence[AnyScheduler]) -> list[AnyScheduler]:
    """The oldest first: the collector has older ones in later generations, each in turn."""
    wanted = {id(one) for one in schedulers}
    return [
        one for generation in (2, 1, 0) for one in gc.get_objects(generation) if id(one) in wanted
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
        nodes += [one for one, _ in node.next_functions]
    return list(found.values())


def _refused(optimizer: Optimizer) -> ConfigError:
    name = type(optimizer).__name__
    return ConfigError(
        f"{name} was stepped, and it was not prepared: what it trains would become another in each "
        "worker; prepare it and its model as well, in the same call: model, other, optimizer, "
        "its_optimizer, loader = pace.prepare(model, other, optimizer, its_optimizer, loader)"
    )


def _before(optimizer: Optimizer, _: Any, __: Any) -> None:
    if _member.guard is not None:
        _member.guard.before(optimizer)


def _after(optimizer: Optimizer, _: Any, __: Any) -> None:
    if _member.guard is not None:
        _member.guard.after(optimizer)
