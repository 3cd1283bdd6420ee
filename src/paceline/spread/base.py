"""One worker's side of a model that several compute together: what all ways to spread it share.

    model(x), backward()   -> meet (meeting.py) -> what a member of the family does
    model.state_dict()     -> the whole model's, from all (whole.py)

Members: model.py (parts behind one another), layered.py (layers divided over channels), shards.py
(each parameter in pieces). What a run steps
here is ``own``: to exchange, store and optimizer that is the model. This module must not know the
loop. Above 300 lines with what a whole model is to its script.
"""

import abc
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.base import End
from ..replica.held import check_names
from ..store.joint import parameters_of
from ..store.layout import Layout, TensorPlace
from ..store.optimizer_copy import EXISTS
from .group import SplitGroups
from .meeting import Intent, Meeting, PartTask
from .whole import SpreadState

STALE = (
    "backward() goes through what a split model gave before a step that is over, and of which "
    "nothing is kept: call it before optimizer.step()"
)


class OwnTensors(nn.Module):
    """What a worker holds of a model, under the model's names.

    Args:
        parameters, buffers: with their names.
        computed: whose modules compute here, and may make buffers anew.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Sequence[tuple[str, Tensor]],
        computed: nn.Module,
    ) -> None:
        super().__init__()
        self.computed = computed
        self._held, self._kept = parameters, buffers

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._held)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return iter(self._kept)


class SpreadModel(abc.ABC):
    """One worker's side.

    Args:
        module: the script's, whole.
        num_samples: of this worker's mini-batch, 0 where it has none.

    Attributes:
        own: what a run steps here.
        note, sent_bytes: for the plan: how it is divided, and what flows between workers an update.
        shared: names of parameters of this worker that others step, too.
        shared_sizes: of all such: name, type and elements.
        counted: names of those whose norm is counted here.
        sums_buffers: whether each worker has buffers of its own, whose mean is taken.
        buffers: of the module, where parts compute with them; ``changed_buffers``: which of them a
            script has changed since the last update, in any worker of the copy, a bit each.
        starts: of parameters that are pieces, where in the whole each begins (see `SpreadState`).
    """

    own: OwnTensors
    note: str
    sent_bytes: int
    shared: frozenset[str] = frozenset()
    shared_sizes: Sequence[tuple[str, torch.dtype, int]] = ()
    counted: frozenset[str]
    sums_buffers = False
    buffers: Sequence[Tensor] = ()
    changed_buffers = 0
    is_alone = False
    """Whether all others wait until this worker has gone through something."""
    starts: dict[str, int]
    whole: SpreadState
    num_hooked: Callable[[], int] = int
    """Gradients that backward passes have left; filled in when a run begins."""
    version: Callable[[], int]
    """Of the parameters that this worker holds; filled in when it joins the run."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        groups: SplitGroups,
        num_samples: Callable[[], int],
    ) -> None:
        self.groups, self._module, self._num_samples = groups, module, num_samples
        self._meeting = Meeting(groups.copy, groups.members)
        self._shares: list[float] | None = None
        self._num_back = self._num_seen = 0
        """Gradients that came through ``model(x)`` since the last step, and all until then."""
        self.starts = {}
        parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
        self._names = {id(one): name for name, one in [*parameters, *buffers]}
        self._parameter_names = {id(one): name for name, one in parameters}
        self._state_names = [
            (name, self._names.get(id(one), ""))
            for name, one in module.state_dict(keep_vars=True).items()
        ]
        if odd := [name for name, own in self._state_names if not own]:
            raise ConfigError(
                f"{odd[0]!r} of model.state_dict() is no parameter and no buffer, and a split "
                "model keeps these alone; use --split data"
            )
        self._without_memory = (
            [(name, torch.empty_like(one, device="meta")) for name, one in parameters],
            [(name, torch.empty_like(one, device="meta")) for name, one in buffers],
        )
        self._groups_of = [
            [[self._names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]

    def _stand_in(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on the module is computed by all.

        Raises:
            ConfigError: this worker would have nothing to step.
        """
        if not any(parameters_of(one) for one in optimizers):
            raise ConfigError(
                f"worker {self.groups.seat} would have nothing to train: use fewer parts"
            )
        module: Any = self._module
        module.forward = self._forward
        module.state_dict = self._state_dict
        module.load_state_dict = _refuse_to_load
        module.zero_grad = self._zero_grad

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.own.zero_grad(set_to_none)

    @abc.abstractmethod
    def _forward(self, *given: Any, **named: Any) -> Any:
        """What ``model(...)`` is; all workers of the copy call it."""

    # -- what all have come to ------------------------------------------------------------------

    def _meet(self, mine: Intent) -> list[Intent]:
        """What all have come to, once that is what this worker has; until then it serves."""
        if self.is_alone:
            raise ConfigError(
                "the model is called inside pace.once(), where all others wait, and it is split: "
                "call it outside"
            )
        while True:
            every = self._meeting.show(mine)
            doing = self._meeting.decide(every)
            if doing is mine.doing:
                return every
            self._serve(doing, every)

    @abc.abstractmethod
    def _serve(self, doing: PartTask, every: Sequence[Intent]) -> None:
        """Do this worker's part of what others have come to."""

    def _note_shares(self, every: Sequence[Intent]) -> None:
        """By what each worker's gradient is weighed, from the samples of their mini-batches: also
        of those who are through with theirs."""
        samples = [one.samples for one in every]
        self._shares = [one / max(1, sum(samples)) for one in samples]

    def _refuse_outside(self) -> None:
        if not self._num_samples():
            raise ConfigError(
                "backward() through a split model stands outside the loop over the loader, where "
                "no mini-batch says what its gradient weighs"
            )

    def come_to_end(self, why: End = End.PUSH, num_samples: int = 0) -> None:
        """A step, an epoch or an evaluation is over here: serve all others until they are there.

        Args:
            num_samples: of the mini-batch that a step was on.
        """
        has_more, changed = int(self._has_more_gradients()), self._changed_buffers()
        every = self._meet(Intent(PartTask.STEP_END, why, has_more, num_samples, seed=changed))
        self._ended()
        self.changed_buffers = functools.reduce(operator.or_, (one.seed for one in every))
        if why is End.PUSH and any(one.rows for one in every):
            self._check_gradients(has_batch=num_samples > 0)

    def _changed_buffers(self) -> int:
        """See ``changed_buffers``: of this worker."""
        return 0

    @contextmanager
    def _through_model(self) -> Iterator[None]:
        """Gradients that come meanwhile came through ``model(x)``."""
        before = self.num_hooked()
        yield
        self._num_back += self.num_hooked() - before

    def _has_more_gradients(self) -> bool:
        """Whether parameters have got gradients that do not come through ``model(x)``."""
        now = self.num_hooked()
        has_more = now - self._num_seen > self._num_back
        self._num_seen, self._num_back = now, 0
        return has_more

    def _check_gradients(self, *, has_batch: bool) -> None:
        """Some worker has such gradients; raise ConfigError where one device would have others.

        Args:
            has_batch: whether this worker has made a step on a mini-batch.
        """
        if not has_batch:
            raise ConfigError(
                f"parameters get gradients that do not come through model(x), a penalty on them, "
                f"and in this update worker {self.groups.seat} has no mini-batch whose loss gives "
                "those to its part: use drop_last=True, weight_decay, or --split data"
            )

    def _ended(self) -> None:
        """All are there: what was kept for backward passes is needed no more."""
        return

    def passed(self) -> tuple[str, float] | None:
        """An epoch is over in all workers.

        Returns:
            In the first of them, where the model is divided worse than was predicted: by how much,
            in words, and the seconds that this has cost until now.

        Raises:
            ConfigError: parameters came after ``prepare``, or are gone.
        """
        check_names(self._module, self._parameter_names)
        return self._divided_worse()

    def _divided_worse(self) -> tuple[str, float] | None:
        """See `passed`."""
        return None

    def mark_buffers(self) -> None:  # noqa: B027  most do not look at them
        """They are what they are in all workers."""

    def stepped(self) -> None:  # noqa: B027  most have nothing to do
        """The optimizer has stepped on ``own``."""

    def take_shares(self) -> list[float] | None:
        """By what gradients were weighed since the last time; None: there was no pass."""
        shares, self._shares = self._shares, None
        return shares

    # -- the whole model ------------------------------------------------------------------------

    def lay_out(self, layout: Layout, read: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        """The layout of this part is known: that of all, and who hands out what."""
        grouped = [name for one in self._groups_of for group in one for name in group]
        self.whole = SpreadState(
            self.groups, layout, self._without_memory, grouped, read, self.starts
        )
        whole = self.whole.layout
        self._place_of = {
            one.name: one for one in (*whole.parameters.places, *whole.buffers.places)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model at this worker's version."""
        return self.whole.tensors(self.version())

    def shapes(self) -> dict[str, Tensor]:
        """What ``model.state_dict()`` has, without memory."""
        every = {name: one for part in self._without_memory for name, one in part}
        return {name: every[own] for name, own in self._state_names}

    def read(self, name: str) -> Tensor:
        """One of them at this worker's version; no worker makes room for more than that one."""
        return self.read_place(self._place_of[dict(self._state_names)[name]])

    def _state_dict(self, *_: Any, prefix: str = "", **__: Any) -> "OrderedDict[str, Tensor]":
        found = self.tensors()
        return OrderedDict((prefix + name, found[own]) for name, own in self._state_names)

    def optimizer_state(self, number: int, optimizer: Optimizer) -> dict[str, Any]:
        """What ``state_dict`` of this optimizer is, over the whole model."""
        rows = self.whole.states(self.version())
        state: dict[int, dict[str, Any]] = {}
        groups, at = [], 0
        for names, group in zip(self._groups_of[number], optimizer.param_groups, strict=True):
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append({**values, "params": list(range(at, at + len(names)))})
            for index, name in enumerate(names, at):
                row = dict(rows.get(name, {}))
                if int(row.pop(EXISTS, torch.zeros(1))) and row:
                    state[index] = row
            at += len(names)
        return {"state": state, "param_groups": groups}

    def read_place(self, place: TensorPlace) -> Tensor:
        """What lies at a place of the whole layout, at this worker's version."""
        return self.whole.fetch(place, self.version())

    def keep_state_dict(self, optimizers: Sequence[Optimizer]) -> None:
        """``state_dict()`` of each optimizer is of the whole model."""
        for number, one in enumerate(optimizers):
            one.state_dict = partial(self.optimizer_state, number, one)  # type: ignore[method-assign]  # of this optimizer alone
            one.load_state_dict = _refuse_to_load_state  # type: ignore[method-assign]  # the same

    def own_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of all parameters of the model those that lie here, whose gradients are clipped as one.

        Raises:
            ConfigError: some that are trained are left out.
        """
        given = {id(one) for one in parameters}
        left = [
            self._names[id(one)]
            for one in self._module.parameters()
            if one.requires_grad and id(one) not in given
        ]
        if left:
            raise ConfigError(
                f"a clip was given without {left[0]!r}: the average is clipped as a whole, "
                "pace.clip_grad_norm_(model.parameters(), ...)"
            )
        return list(self.own.parameters())

    def close(self) -> None:
        """The run is over."""
        if hasattr(self, "whole"):
            self.whole.close()


def _refuse_to_load(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "model.load_state_dict() after prepare(): the model is split, and no worker has the whole; "
        "load before, model.load_state_dict(...); model, optimizer, loader = pace.prepare(...)"
    )


def _refuse_to_load_state(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.load_state_dict() after prepare(): the model is split, and no worker steps all "
        "of it; load before, optimizer.load_state_dict(...); pace.prepare(model, optimizer, ...)"
    )
