"""What a step of a user's own class has put in the place of what lay in the block.

    p.data = p.data - lr * p.grad            state["m"] = 0.9 * state["m"] + p.grad
      a private tensor -> copied into the block; the name is bound to the block again

Torch's own classes change what they have in place, and need none of this. What has no place in the
block, since the class makes it later than in its first step, is refused by name: every member would
have its own. This module must not know gradients, updates, or who steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Bound:
    """One parameter of a twin, and where in the block it and its state lie.

    Attributes:
        kind: the name of the class that steps it.
        name: of the parameter in the model.
        place: its elements in the block.
        state: by key, the place of each tensor of its state.
        numbers: keys of its state that are numbers.
        made: keys of its state that there were before the step.
    """

    kind: str
    name: str
    parameter: nn.Parameter
    place: Tensor
    state: Mapping[str, Tensor]
    numbers: frozenset[str]
    made: set[str] = field(default_factory=set)


class Replaced:
    """Looks at a twin of a user's own class behind each of its steps."""

    def __init__(self, twin: Optimizer, bound: Sequence[Bound]) -> None:
        self._twin, self._bound = twin, bound

    def begin(self) -> None:
        """A step comes: what there is of the state before it has to be there behind it."""
        for one in self._bound:
            one.made = _made(self._twin.state.get(one.parameter) or {})

    def take_back(self) -> None:
        """Copy what was replaced into the block, and bind it again.

        Raises:
            ConfigError: something has no place there, or has another shape or type.
        """
        found: list[tuple[Tensor, Tensor]] = []
        for one in self._bound:
            if not _lies_in(one.parameter, one.place):
                found.append((one.place, self._fitting(one, "", one.parameter.data, one.place)))
                one.parameter.data = one.place
            state = self._twin.state.get(one.parameter) or {}
            found += self._state_of(one, state)
        places = {place.untyped_storage().data_ptr() for place, _ in found}
        values = [  # one may be the old memory of another, which is written here
            value.clone() if value.untyped_storage().data_ptr() in places else value
            for _, value in found
        ]
        for (place, _), value in zip(found, values, strict=True):
            place.copy_(value)

    def _state_of(self, one: Bound, state: dict[str, object]) -> list[tuple[Tensor, Tensor]]:
        """Places and new tensors of a parameter's state, which is bound to its places again."""
        found = []
        for key, value in state.items():
            place = one.state.get(key)
            if value is None or (place is not None and _lies_in(value, place)):
                continue
            if place is not None:
                found.append((place, self._fitting(one, key, value, place)))
                state[key] = place
            elif key not in one.numbers:
                raise self._late(one, key)
        if dropped := one.made - _made(state):
            raise ConfigError(
                f"{one.kind}.step has taken {min(dropped)!r} out of the state of {one.name!r}, "
                "and the worker that makes the next update would still have it: set it to zeros in "
                "its place, state[...].zero_()"
            )
        return found

    def _fitting(self, one: Bound, key: str, value: object, place: Tensor) -> Tensor:
        what = f"{key!r} of {one.name!r}" if key else repr(one.name)
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{one.kind}.step has put a {type(value).__name__} in the place of the tensor "
                f"{what}: keep it a tensor, torch.tensor(...), from the first step on"
            )
        if (value.shape, value.dtype) != (place.shape, place.dtype):
            raise ConfigError(
                f"{one.kind}.step has made {what} {value.dtype} of shape {tuple(value.shape)}, "
                f"and it was {place.dtype} of shape {tuple(place.shape)}: keep its type and shape"
            )
        return value.detach()

    def _late(self, one: Bound, key: str) -> ConfigError:
        return ConfigError(
            f"{one.kind} has made {key!r} for {one.name!r} later than in its first step, and it "
            "would be another in each worker, and in no checkpoint: make it in the first step, as "
            f"self.state[p][{key!r}] = torch.zeros_like(p)"
        )


def _lies_in(value: object, place: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == place.dtype and bool(value.is_set_to(place))


def _made(state: Mapping[str, object]) -> set[str]:
    return {key for key, value in state.items() if value is not None}
