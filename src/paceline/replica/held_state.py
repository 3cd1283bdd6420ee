"""The state of the user's optimizers, which the run keeps, behind torch's own interface.

    optimizer.state             access raises an error that says how to read it
    optimizer.state_dict()      the whole state at one version, in any member
    optimizer.load_state_dict   kept until the first epoch, which begins with it; ignored if a run
                                resumes, since that begins with its saved state

The optimizers stay the user's objects. This module must not know where a version is stored.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.joint import parameters_of

State = dict[Tensor, dict[str, Any]]

_HELD = (
    "optimizer.state is kept by the run for all workers: read it by "
    "optimizer.state_dict()['state'], and load it before the first epoch by "
    "optimizer.load_state_dict(...)"
)


class HeldState(defaultdict[Any, Any]):
    """Replaces ``optimizer.state``: access raises an error that says how to read the state.

    Copies and pickles hold the true state.
    """

    def __init__(self, read: Callable[[], State]) -> None:
        super().__init__(dict)
        self.read = read

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(_HELD)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = items = keys = values = pop = popitem = clear = update = setdefault = copy = _refuse
    __copy__ = __reversed__ = __or__ = __ror__ = __ior__ = _refuse

    def __bool__(self) -> bool:
        raise ConfigError(_HELD)

    def __repr__(self) -> str:
        return "kept by the run: optimizer.state_dict()['state']"

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.read()))

    def __reduce_ex__(self, _: Any) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "defaultdict[Any, Any]":
        return defaultdict(dict, copy.deepcopy(dict(self.read()), memo))


class SharedState:
    """The state of the user's optimizer, which the store keeps.

    ``optimizer.state_dict()`` in any member gives the whole state at one version.

    Args:
        read: returns the newest version's state, of all optimizers' parameters.
        has_begun: whether the first epoch was opened: from then on nothing can be loaded.
        leaves_out: whether a state that is loaded now is ignored.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        read: Callable[[], State],
        has_begun: Callable[[], bool],
        leaves_out: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizer = optimizer
        self._read = read
        self._has_begun, self._leaves_out = has_begun, leaves_out
        self._state_dict = optimizer.state_dict
        self._load = optimizer.load_state_dict
        self._loaded: State | None = None
        self._prepared = self._lists()
        self._held = HeldState(self._newest)
        optimizer.state = self._held
        optimizer.state_dict = self._whole_state  # type: ignore[method-assign]  # of this optimizer only, until it is released
        optimizer.load_state_dict = self._note_loaded  # type: ignore[method-assign, assignment]  # the same
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]  # the same

    def take_loaded(self) -> State | None:
        """The state loaded since ``prepare``; None: nothing."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def check(self) -> None:
        """Raise ConfigError if the script has replaced the state or changed the groups."""
        if self._optimizer.state is not self._held:
            raise ConfigError(
                "optimizer.state was replaced after prepare(), but the run keeps the true one: to "
                "begin with a new state, build a new optimizer in a new run"
            )
        prepared, current = self._prepared, self._lists()
        if len(current) != len(prepared):
            _refuse_group()
        pairs = zip(current, prepared, strict=True)
        if any(
            params is not prepared_params or size != prepared_size
            for (params, size), (prepared_params, prepared_size) in pairs
        ):
            _refuse_parameters()

    def _lists(self) -> list[tuple[list[Tensor], int]]:
        """Each group's list of parameters, and its length."""
        return [(group["params"], len(group["params"])) for group in self._optimizer.param_groups]

    def _newest(self) -> State:
        if self._loaded is not None:
            return self._loaded
        state = self._read()
        parameters = parameters_of(self._optimizer)
        return {parameter: state[parameter] for parameter in parameters if parameter in state}

    def _whole_state(self) -> dict[str, Any]:
        self._optimizer.state = defaultdict(dict, self._newest())
        try:
            return self._state_dict()
        finally:
            self._optimizer.state = self._held

    def _note_loaded(self, state: dict[str, Any]) -> None:
        if self._has_begun():
            raise ConfigError(
                "load the optimizer's state before the first epoch: from then on the run keeps it"
            )
        if self._leaves_out():
            return
        self._optimizer.state = defaultdict(dict)
        try:
            self._load(state)
            self._loaded = dict(self._optimizer.state)
        finally:
            self._optimizer.state = self._held


class SharedStates:
    """A `HeldState` for each of a script's optimizers; ``read`` gives the state of all of them."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        read: Callable[[], State],
        has_begun: Callable[[], bool],
        leaves_out: Callable[[], bool] = lambda: False,
    ) -> None:
        self._each = [
            SharedState(optimizer, read, has_begun, leaves_out) for optimizer in optimizers
        ]

    def take_loaded(self) -> State | None:
        """The state loaded since ``prepare``, by parameter; None: nothing."""
        loaded = [rows for state in self._each if (rows := state.take_loaded()) is not None]
        return {key: row for rows in loaded for key, row in rows.items()} if loaded else None

    def check(self) -> None:
        """See ``SharedState.check``."""
        for state in self._each:
            state.check()


def _refuse_parameters() -> None:
    raise ConfigError(
        "optimizer.param_groups[...]['params'] was changed after prepare(), but the run continues "
        "with the prepared ones: give the optimizer all parameters before prepare(), freeze with "
        "body.requires_grad_(False), and thaw later with body.requires_grad_(True)"
    )


def _refuse_group(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "optimizer.add_param_group() is not supported after prepare(): give the optimizer all "
        "parameters before prepare(), torch.optim.SGD([{'params': head.parameters()}, {'params': "
        "body.parameters()}]), freeze with body.requires_grad_(False), and thaw later with "
        "body.requires_grad_(True)"
    )
