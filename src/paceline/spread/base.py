"""Define one worker's side of a model that several workers compute: what all splits share.

    model(x), backward()   -> meet (meeting.py) -> what a member of the family does
    model.state_dict()     -> the whole model's, from all workers (whole.py)

Members of the family: model.py (parts one after the other), layered.py (layers divided over
channels), shards.py (each parameter in pieces). A run steps ``own`` here: to exchange, store and
optimizer, that is the model. This module must not know the loop. Above 300 lines, since it also
presents the whole model to the script.
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
from .batch_norm import NormStatistics
from .group import SplitGroups
from .meeting import Intent, Meeting, PartTask
from .whole import SpreadState

STALE = (
    "backward() goes through an output of a split model from before the last step, for which "
    "nothing is kept: call it before optimizer.step()"
)


class OwnTensors(nn.Module):
    """The tensors of a model that a worker holds, under the model's names.

    Args:
        parameters, buffers: pairs of name and tensor.
        computed: the module that computes here; it may replace buffers.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Sequence[tuple[str, Tensor]],
        computed: nn.Module,
    ) -> None:
        super().__init__()
        self.computed = computed
        self._named_parameters, self._named_buffers = parameters, buffers

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named_parameters)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return iter(self._named_buffers)


class SpreadModel(abc.ABC):
    """One worker's side of a spread model.

    Args:
        module: the script's whole module.
        optimizers: over the module.
        groups: the worker's groups.
        num_samples: returns the samples of this worker's mini-batch, 0 where it has none.

    Attributes:
        own: the tensors that the run steps here.
        note: how the model is divided, for the plan.
        sent_bytes: bytes between workers per update, for the plan.
        shared: names of this worker's parameters that other workers step, too.
        shared_sizes: name, dtype and number of elements of all parameters that are shared.
        counted: names of the parameters whose norm is counted here.
        sums_buffers: whether each worker has its own buffers, whose mean is taken.
        buffers: buffers of the module, where parts compute with them.
        norms: running statistics of batch norm layers that one worker computes for all.
        changed_buffers: which of these a script has changed since the last update, in any worker of
            the copy, one bit each.
        starts: where each parameter that is a piece begins in the whole (see `SpreadState`).
    """

    own: OwnTensors
    note: str
    sent_bytes: int
    shared: frozenset[str] = frozenset()
    shared_sizes: Sequence[tuple[str, torch.dtype, int]] = ()
    counted: frozenset[str]
    sums_buffers = False
    buffers: Sequence[Tensor] = ()
    norms = NormStatistics([], [])
    changed_buffers = 0
    is_alone = False
    """Whether all other workers wait for this one (``pace.once()``)."""
    starts: dict[str, int]
    whole: SpreadState
    num_hooked: Callable[[], int] = int
    """Returns how many gradients backward passes have left; filled in when a run begins."""
    version: Callable[[], int]
    """Returns the version of this worker's parameters; filled in when it joins the run."""

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
        """Gradients through ``model(x)`` since the last step, and all gradients until then."""
        self.starts = {}
        parameters, buffers = list(module.named_parameters()), list(module.named_buffers())
        self._names = {id(tensor): name for name, tensor in [*parameters, *buffers]}
        self._parameter_names = {id(parameter): name for name, parameter in parameters}
        self._state_names = [
            (name, self._names.get(id(tensor), ""))
            for name, tensor in module.state_dict(keep_vars=True).items()
        ]
        if odd := [name for name, first_name in self._state_names if not first_name]:
            raise ConfigError(
                f"{odd[0]!r} of model.state_dict() is neither a parameter nor a buffer, and a "
                "split model keeps only these; use --split data"
            )
        self._without_memory = (
            [(name, torch.empty_like(tensor, device="meta")) for name, tensor in parameters],
            [(name, torch.empty_like(tensor, device="meta")) for name, tensor in buffers],
        )
        self._groups_of = [
            [[self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]

    def _stand_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the place of the module's methods: all workers compute it from now on.

        Raises:
            ConfigError: this worker would have nothing to step.
        """
        if not any(parameters_of(optimizer) for optimizer in optimizers):
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
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``model(...)``; all workers of the copy call it."""

    # -- meetings -------------------------------------------------------------------------------

    def _meet(self, intent: Intent) -> list[Intent]:
        """Serve other workers until all do what this one is about to do; return all intents."""
        if self.is_alone:
            raise ConfigError(
                "the split model is called inside pace.once(), where all other workers wait: call "
                "it outside"
            )
        while True:
            intents = self._meeting.show(intent)
            doing = self._meeting.decide(intents)
            if doing is intent.doing:
                return intents
            self._serve(doing, intents)

    @abc.abstractmethod
    def _serve(self, doing: PartTask, intents: Sequence[Intent]) -> None:
        """Do this worker's part of what others are about to do."""

    def _note_shares(self, intents: Sequence[Intent]) -> None:
        """Note the weights of the workers' gradients, their shares of the samples.

        Workers that are done with their mini-batches count, too.
        """
        samples = [intent.samples for intent in intents]
        self._shares = [count / max(1, sum(samples)) for count in samples]

    def _refuse_outside(self) -> None:
        if not self._num_samples():
            raise ConfigError(
                "backward() through a split model is called outside the loop over the loader, "
                "where no mini-batch gives its gradient a weight"
            )

    def come_to_end(self, why: End = End.PUSH, num_samples: int = 0) -> None:
        """Serve all other workers until they, too, reach the end of a step, epoch or evaluation.

        Args:
            num_samples: samples of the mini-batch of a step.
        """
        has_more, changed = int(self._has_more_gradients()), self._changed_buffers()
        intents = self._meet(Intent(PartTask.STEP_END, why, has_more, num_samples, seed=changed))
        self._ended()
        self.changed_buffers = functools.reduce(operator.or_, (intent.seed for intent in intents))
        if why is End.PUSH and any(intent.rows for intent in intents):
            self._check_gradients(has_batch=num_samples > 0)

    def _changed_buffers(self) -> int:
        """Return which buffers have changed in this worker, as in ``changed_buffers``."""
        return 0

    @contextmanager
    def _through_model(self) -> Iterator[None]:
        """Count the gradients that arrive in a block as those that come through ``model(x)``."""
        before = self.num_hooked()
        yield
        self._num_back += self.num_hooked() - before

    def _has_more_gradients(self) -> bool:
        """Whether parameters got gradients since the last step that bypass ``model(x)``."""
        now = self.num_hooked()
        has_more = now - self._num_seen > self._num_back
        self._num_seen, self._num_back = now, 0
        return has_more

    def _check_gradients(self, *, has_batch: bool) -> None:
        """Raise ConfigError where gradients that bypass ``model(x)`` would be wrong.

        It is called in all workers if any of them has such gradients.

        Args:
            has_batch: whether this worker's step was on a mini-batch.
        """
        if not has_batch:
            raise ConfigError(
                "parameters get gradients that do not come through model(x), such as a penalty on "
                f"them, but in this update worker {self.groups.seat} has no mini-batch whose loss "
                "gives these to its part: use drop_last=True, weight_decay, or --split data"
            )

    def _ended(self) -> None:
        """Drop what was kept for backward passes; all workers have reached a step's end."""
        return

    def passed(self) -> tuple[str, float] | None:
        """Check the model after an epoch, which is over in all workers.

        Returns:
            In the first worker, if the parts are less balanced than predicted: a message, and the
            seconds that this has cost until now; otherwise None.

        Raises:
            ConfigError: parameters were added after ``prepare``, or removed.
        """
        check_names(self._module, self._parameter_names)
        return self._divided_worse()

    def _divided_worse(self) -> tuple[str, float] | None:
        """Return what `passed` returns."""
        return None

    def mark_buffers(self) -> None:  # noqa: B027  most do not look at them
        """Note that all workers have the same buffers now."""

    def stepped(self) -> None:  # noqa: B027  most have nothing to do
        """Note that the optimizer has stepped on ``own``."""

    def take_shares(self) -> list[float] | None:
        """Return the workers' weights since the last call; None: there was no pass."""
        shares, self._shares = self._shares, None
        return shares

    # -- the whole model ------------------------------------------------------------------------

    def lay_out(self, layout: Layout, read: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        """Make the layout of the whole model, and begin to hand out this worker's part.

        Args:
            layout: of this worker's part.
            read: see `SpreadState`.
        """
        grouped = [name for groups in self._groups_of for group in groups for name in group]
        self.whole = SpreadState(
            self.groups, layout, self._without_memory, grouped, read, self.starts
        )
        whole = self.whole.layout
        self._place_of = {
            place.name: place for place in (*whole.parameters.places, *whole.buffers.places)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the whole model at this worker's version."""
        return self.whole.tensors(self.version())

    def shapes(self) -> dict[str, Tensor]:
        """Return the tensors of ``model.state_dict()`` without memory, on the meta device."""
        tensors = {name: tensor for part in self._without_memory for name, tensor in part}
        return {name: tensors[first_name] for name, first_name in self._state_names}

    def read(self, name: str) -> Tensor:
        """Return one tensor of ``model.state_dict()`` at this worker's version, and no other.

        Args:
            name: in ``model.state_dict()``.
        """
        return self.read_place(self._place_of[dict(self._state_names)[name]])

    def _state_dict(
        self,
        into: "OrderedDict[str, Tensor] | None" = None,
        before: str = "",
        *_: Any,
        destination: "OrderedDict[str, Tensor] | None" = None,
        prefix: str = "",
        **__: Any,
    ) -> "OrderedDict[str, Tensor]":
        """Do what ``module.state_dict`` does, also as a part of another module's.

        Args:
            into, before: the same as ``destination`` and ``prefix``, which may be positional.
        """
        found = into if into is not None else destination
        result = OrderedDict() if found is None else found
        tensors, start = self.tensors(), before or prefix
        for name, first_name in self._state_names:
            result[start + name] = tensors[first_name]
        return result

    def optimizer_state(self, number: int, optimizer: Optimizer) -> dict[str, Any]:
        """Return the ``state_dict`` of an optimizer over the whole model.

        Args:
            number: of the optimizer.
        """
        states = self.whole.states(self.version())
        state: dict[int, dict[str, Any]] = {}
        groups, start = [], 0
        for names, group in zip(self._groups_of[number], optimizer.param_groups, strict=True):
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append({**values, "params": list(range(start, start + len(names)))})
            for index, name in enumerate(names, start):
                parameter_state = dict(states.get(name, {}))
                if int(parameter_state.pop(EXISTS, torch.zeros(1))) and parameter_state:
                    state[index] = parameter_state
            start += len(names)
        return {"state": state, "param_groups": groups}

    def read_place(self, place: TensorPlace) -> Tensor:
        """Return the tensor at a place of the whole layout, at this worker's version."""
        return self.whole.fetch(place, self.version())

    def keep_state_dict(self, optimizers: Sequence[Optimizer]) -> None:
        """Make ``state_dict()`` of each optimizer return the whole model's state."""
        for number, optimizer in enumerate(optimizers):
            optimizer.state_dict = partial(self.optimizer_state, number, optimizer)  # type: ignore[method-assign]  # of this optimizer alone
            optimizer.load_state_dict = _refuse_to_load_state  # type: ignore[method-assign]  # the same

    def own_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return this worker's parameters, for a clip that was given all of the model's.

        Raises:
            ConfigError: trained parameters are left out.
        """
        given = {id(parameter) for parameter in parameters}
        missing = [
            self._names[id(parameter)]
            for parameter in self._module.parameters()
            if parameter.requires_grad and id(parameter) not in given
        ]
        if missing:
            raise ConfigError(
                f"a clip was given without {missing[0]!r}: the average is clipped as a whole, "
                "pace.clip_grad_norm_(model.parameters(), ...)"
            )
        return list(self.own.parameters())

    def close(self) -> None:
        """End the worker's side when the run is over."""
        if hasattr(self, "whole"):
            self.whole.close()


def _refuse_to_load(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "model.load_state_dict() after prepare(): the model is split, and no worker has all of it; "
        "load before, model.load_state_dict(...); model, optimizer, loader = pace.prepare(...)"
    )


def _refuse_to_load_state(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.load_state_dict() after prepare(): the model is split, and no worker steps all "
        "of it; load before, optimizer.load_state_dict(...); pace.prepare(model, optimizer, ...)"
    )
