"""Tensors in the block that a step of a user's own optimizer class has replaced.

    p.data = p.data - lr * p.grad            state["m"] = 0.9 * state["m"] + p.grad
      a private tensor -> copied into the block; the name is bound to the block again

Torch's own classes work in place and need none of this. State without a place in the block, because
the class makes it after its first step, is refused by name: it would differ between members. This
module must not know gradients, updates, or who steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Bound:
    """One parameter of a twin, and the places of it and its state in the block.

    Attributes:
        kind: the name of the class that steps it.
        name: the parameter's name in the model.
        place: its elements in the block.
        state: by key, the place of each tensor of its state.
        numbers: keys of its state that are numbers.
        made: keys of its state before the step.
    """

    kind: str
    name: str
    parameter: nn.Parameter
    place: Tensor
    state: Mapping[str, Tensor]
    numbers: frozenset[str]
    made: set[str] = field(default_factory=set)


class Replaced:
    """Checks a twin of a user's own class after each of its steps."""

    def __init__(self, twin: Optimizer, bound: Sequence[Bound]) -> None:
        self._twin, self._bound = twin, bound

    def begin(self) -> None:
        """Before a step, note the state's keys, which must still exist after it."""
        for bound in self._bound:
            bound.made = _made(self._twin.state.get(bound.parameter) or {})

    def take_back(self) -> None:
        """Copy replaced tensors into the block, and bind their names to it again.

        Raises:
            ConfigError: a tensor has no place there, or another shape or type.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for bound in self._bound:
            if not _is_at(bound.parameter, bound.place):
                value = self._fitting(bound, "", bound.parameter.data, bound.place)
                pairs.append((bound.place, value))
                bound.parameter.data = bound.place
            state = self._twin.state.get(bound.parameter) or {}
            pairs += self._state_of(bound, state)
        places = {place.untyped_storage().data_ptr() for place, _ in pairs}
        values = [  # a value may be the old memory of another, which is overwritten here
            value.clone() if value.untyped_storage().data_ptr() in places else value
            for _, value in pairs
        ]
        for (place, _), value in zip(pairs, values, strict=True):
            place.copy_(value)

    def _state_of(self, bound: Bound, state: dict[str, object]) -> list[tuple[Tensor, Tensor]]:
        """Bind a parameter's state to its places again; returns places and the new tensors."""
        pairs = []
        for key, value in state.items():
            place = bound.state.get(key)
            if value is None or (place is not None and _is_at(value, place)):
                continue
            if place is not None:
                pairs.append((place, self._fitting(bound, key, value, place)))
                state[key] = place
            elif key not in bound.numbers:
                raise self._late(bound, key)
        if dropped := bound.made - _made(state):
            raise ConfigError(
                f"{bound.kind}.step has removed {min(dropped)!r} from the state of {bound.name!r}, "
                "but the worker that makes the next update would still have it: set it to zeros "
                "instead, state[...].zero_()"
            )
        return pairs

    def _fitting(self, bound: Bound, key: str, value: object, place: Tensor) -> Tensor:
        what = f"{key!r} of {bound.name!r}" if key else repr(bound.name)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{bound.kind}.step has replaced the tensor {what} by a {type(value).__name__}: "
                "keep it a tensor, torch.tensor(...), from the first step on"
            )
        if (value.shape, value.dtype) != (place.shape, place.dtype):
            raise ConfigError(
                f"{bound.kind}.step has changed {what} to {value.dtype} of shape "
                f"{tuple(value.shape)}, but it was {place.dtype} of shape {tuple(place.shape)}: "
                "keep its type and shape"
            )
        return value.detach()

    def _late(self, bound: Bound, key: str) -> ConfigError:
        return ConfigError(
            f"{bound.kind} has made {key!r} for {bound.name!r} later than in its first step, so it "
            "would differ between workers and be in no checkpoint: make it in the first step, as "
            f"self.state[p][{key!r}] = torch.zeros_like(p)"
        )


def _is_at(value: object, place: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == place.dtype and bool(value.is_set_to(place))


def _made(state: Mapping[str, object]) -> set[str]:
    return {key for key, value in state.items() if value is not None}
