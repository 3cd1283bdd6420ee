"""The user's own optimizer, applied to parameters in a block.

Every member has a copy of the optimizer object whose parameters and state are views into the block,
so any member can execute the next update. Optimizers that work element by element may get pieces of
parameters (a member's share); all others get whole tensors. Above 300 lines, since binding the
state and stepping with it are read together. This module must not know who executes which update,
or when.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from .joint import parameters_of, parts_of
from .layout import Layout, StateEntry
from .optimizer_copy import EXISTS, is_elementwise, keeps_gradients, make_twin, twin_parts
from .replaced import Bound, Replaced

_OURS = ("params", "capturable", "fused", "foreach")
"""Keys of a group that select how to compute, not what; the twin keeps its own."""

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of parameter ``number``, in memory order."""

    number: int
    start: int
    stop: int


class Updater:
    """One optimizer over the pieces of one block.

    Args:
        optimizer: the user's; only its class, attributes and groups are used.
        parameters: the model's, in the layout's order.
        block: ``(layout.block_bytes,)`` uint8, with the parameters and the state.
        pieces: the elements to update; None: all parameters, whole. Other members update the rest
            at the same time, so their part of the state is read now and never again.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        block: Tensor,
        pieces: Iterable[Piece] | None = None,
    ) -> None:
        self._layout = layout
        self._block = block
        self._parameters = parameters
        self._entries: dict[int, list[StateEntry]] = defaultdict(list)
        for entry in layout.entries:
            self._entries[entry.parameter].append(entry)
        by_number: dict[int, list[Piece]] = defaultdict(list)
        for number, place in enumerate(layout.parameters.places):
            if pieces is None:
                by_number[number] = [Piece(number, 0, place.numel)]
        for piece in pieces or ():
            by_number[piece.number].append(piece)
        number_of = {parameter: i for i, parameter in enumerate(parameters)}
        self._held: list[tuple[Piece, nn.Parameter]] = []
        groups = []
        for group in optimizer.param_groups:
            pairs = [
                (piece, nn.Parameter(self._view(piece, block), requires_grad=False))
                for parameter in group["params"]
                for piece in by_number[number_of[parameter]]
            ]
            self._held += pairs
            groups.append({**group, "params": [parameter for _, parameter in pairs]})
        self._optimizer = make_twin(optimizer, groups)
        self._parts = twin_parts(optimizer, self._optimizer, number_of)
        self._may_change_gradients = not keeps_gradients(optimizer)
        self._unbound = [
            (piece, parameter)
            for piece, parameter in self._held
            if len(self._entries[piece.number]) > 1  # more than EXISTS: the optimizer keeps state
        ]
        self._stateless = [
            (piece, parameter)
            for piece, parameter in self._held
            if len(self._entries[piece.number]) == 1
        ]
        self._num_states = 0
        self._numbers = [
            (parameter, entry)
            for piece, parameter in self._held
            for entry in self._entries[piece.number]
            if entry.is_number
        ]
        self._gradients: dict[int, list[Tensor]] = {}
        self._replaced = None if is_elementwise(optimizer) else self._watched(optimizer)
        self._is_share = pieces is not None
        self._created: list[tuple[Piece, nn.Parameter]] = []
        if self._is_share:
            self._bind_existing()

    def state_views(self) -> list[tuple[StateEntry, Tensor]]:
        """The state of these pieces in the block."""
        rows = []
        for piece, _ in self._held:
            for entry in self._entries[piece.number]:
                view = self._state_view(entry, piece)
                if view is not None:
                    rows.append((entry, view))
        return rows

    def step(
        self,
        slot: Tensor,
        present: Sequence[int],
        groups: Groups,
        factors: Sequence[float] = (),
        *,
        first: int = 0,
    ) -> None:
        """Update with the gradients in ``slot`` (bytes, the layout's offsets).

        Args:
            first: the offset at which ``slot`` begins.
            present: per parameter, 0 if it has no gradient: it stays unchanged.
            groups: the values of the user's ``param_groups`` to use (lr, momentum, ...).
            factors: of each optimizer's gradients, if there are several; none: all 1.
        """
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                if key not in _OURS:
                    group[key] = value
        if self._unbound and not self._is_share:
            self._bind_existing()
        gradients = self._gradients_in(slot, first)
        for (piece, parameter), gradient in zip(self._held, gradients, strict=True):
            parameter.grad = gradient if present[piece.number] else None
            if self._may_change_gradients and parameter.grad is not None:
                parameter.grad = gradient.clone()  # a repetition of this step must read the same
        if self._numbers:
            self._read_numbers()
        if self._replaced is not None:
            self._replaced.begin()
        is_only = len(self._parts) == 1
        for i, part in enumerate(self._parts):
            if self._unbound:
                part.choose_kernels()
            if is_only or any(present[number] for number in part.numbers):
                part.step(factors[i] if factors else 1.0)
        self._created = []
        if len(self._optimizer.state) != self._num_states:
            self._refuse_late_state()
        if self._unbound:
            self._bind_created()
        if self._replaced is not None:
            self._replaced.take_back()
        if self._numbers:
            self._write_numbers()

    def _watched(self, optimizer: Optimizer) -> Replaced:
        """Watch what a step of a user's own class may replace; its pieces are whole."""
        kinds = {
            parameter: type(part).__name__
            for part in parts_of(optimizer)
            for parameter in parameters_of(part)
        }
        bound = []
        for piece, parameter in self._held:
            entries = [entry for entry in self._entries[piece.number] if entry.key != EXISTS]
            state = {
                entry.key: entry.place.view(self._block) for entry in entries if not entry.is_number
            }
            bound.append(
                Bound(
                    kind=kinds[self._parameters[piece.number]],
                    name=self._layout.parameters.places[piece.number].name,
                    parameter=parameter,
                    place=parameter.data,
                    state=state,
                    numbers=frozenset(entry.key for entry in entries if entry.is_number),
                )
            )
        return Replaced(self._optimizer, bound)

    def _refuse_late_state(self) -> None:
        """Raise ConfigError if a parameter that had no state has got some."""
        self._num_states = len(self._optimizer.state)
        for piece, parameter in self._stateless:
            for key in self._optimizer.state.get(parameter) or ():
                name = self._layout.parameters.places[piece.number].name
                raise ConfigError(
                    f"{type(self._optimizer).__name__} keeps {key!r} for {name!r} since a setting "
                    "was changed, but kept none when it was prepared: build it with the setting "
                    "(momentum=0.9), and switch that off after prepare(): "
                    "optimizer.param_groups[0]['momentum'] = 0.0"
                )

    def private_state(self) -> list[Tensor]:
        """Clones of the state outside the block: a piece's own copies of step counters."""
        return [value.clone() for value in self._private()]

    def revert(self, private: Sequence[Tensor]) -> None:
        """Undo the last step outside the block; ``private`` was saved before it."""
        for piece, parameter in self._created:
            del self._optimizer.state[parameter]
            self._unbound.append((piece, parameter))
        self._created = []
        for value, kept in zip(self._private(), private, strict=True):
            value.copy_(kept)

    def _private(self) -> list[Tensor]:
        return [
            self._optimizer.state[parameter][entry.key]
            for piece, parameter in self._held
            if self._is_split(piece) and self._optimizer.state.get(parameter)
            for entry in self._entries[piece.number]
            if entry.key in self._optimizer.state[parameter]
            and self._state_view(entry, piece) is None
        ]

    def _is_split(self, piece: Piece) -> bool:
        return piece.stop - piece.start < self._layout.parameters.places[piece.number].numel

    def write_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Put the state of the user's optimizer (a loaded one) into the block.

        Args:
            state: by the model's parameters.

        Raises:
            ConfigError: the state has an entry that is not in the layout.
        """
        for piece, parameter in self._held:
            row = state.get(self._parameters[piece.number])
            if row:
                self._refuse_more(piece.number, row)
                self._optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in row.items()
                }
        self._bind_created()
        self._write_numbers()

    def _refuse_more(self, number: int, row: Mapping[str, Any]) -> None:
        """Raise ConfigError for entries that are not in the layout."""
        known = {entry.key for entry in self._entries[number]}
        for key, value in row.items():
            if key not in known and value is not None:
                name = self._layout.parameters.places[number].name
                raise ConfigError(
                    f"{type(self._optimizer).__name__} keeps {key!r} for {name!r} in the state "
                    "that was loaded, but kept none when it was prepared: load it before "
                    "prepare(), optimizer.load_state_dict(...); "
                    "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
                )

    def read_state(self) -> list[dict[str, Any]]:
        """Compact clones of each parameter's state, in the groups' order."""
        self._bind_existing()
        self._read_numbers()
        rows = []
        for _, parameter in self._held:
            state = self._optimizer.state.get(parameter, {})
            rows.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
        return rows

    def _view(self, piece: Piece, block: Tensor, first: int = 0) -> Tensor:
        """The elements of a piece in a block or slot; a whole parameter has its shape."""
        place = self._layout.parameters.places[piece.number]
        if first:
            place = replace(place, offset=place.offset - first)
        if self._is_split(piece):
            return place.flat(block, piece.start, piece.stop)
        return place.view(block)

    def _gradients_in(self, slot: Tensor, first: int) -> list[Tensor]:
        views = self._gradients.get(slot.data_ptr())
        if views is None:
            views = [self._view(piece, slot, first) for piece, _ in self._held]
            self._gradients[slot.data_ptr()] = views
        return views

    def _state_view(self, entry: StateEntry, piece: Piece) -> Tensor | None:
        """The entry's memory for this piece; None if it belongs to another piece's owner."""
        place, parameter = entry.place, self._layout.parameters.places[piece.number]
        if self._is_split(piece) and place.numel == parameter.numel > 1:
            return place.flat(self._block, piece.start, piece.stop)
        return place.view(self._block) if piece.start == 0 else None

    def _exists(self, piece: Piece) -> Tensor:
        for entry in self._entries[piece.number]:
            if entry.key == EXISTS:
                return entry.place.view(self._block)
        raise AssertionError(f"no state entry for parameter {piece.number}")

    def _bind_existing(self) -> None:
        """Bind to state that another member has already made in the block."""
        rest = []
        for piece, parameter in self._unbound:
            if not self._exists(piece).item():
                rest.append((piece, parameter))
                continue
            for entry in self._entries[piece.number]:
                if entry.is_number:
                    self._optimizer.state[parameter][entry.key] = 0  # read before every step
                elif entry.key != EXISTS:
                    view = self._state_view(entry, piece)
                    value = entry.place.view(self._block).clone() if view is None else view
                    self._optimizer.state[parameter][entry.key] = value
        self._unbound = rest

    def _bind_created(self) -> None:
        """Move state that the optimizer has just made into the block."""
        rest = []
        for piece, parameter in self._unbound:
            state = self._optimizer.state.get(parameter)
            if not state:
                rest.append((piece, parameter))
                continue
            for entry in self._entries[piece.number]:
                if entry.key == EXISTS or entry.is_number:
                    continue
                view = self._state_view(entry, piece)
                if view is not None and isinstance(state.get(entry.key), Tensor):
                    view.copy_(state[entry.key])
                    state[entry.key] = view
            if piece.start == 0:  # who owns the first piece can undo it, and it only
                self._exists(piece).fill_(1)
            self._created.append((piece, parameter))
        self._unbound = rest

    def _read_numbers(self) -> None:
        for parameter, entry in self._numbers:
            if self._optimizer.state.get(parameter):
                value = entry.place.view(self._block).item()
                self._optimizer.state[parameter][entry.key] = (
                    int(value) if float(value).is_integer() else value
                )

    def _write_numbers(self) -> None:
        for parameter, entry in self._numbers:
            if self._optimizer.state.get(parameter):
                entry.place.view(self._block).fill_(
                    float(self._optimizer.state[parameter][entry.key])
                )
