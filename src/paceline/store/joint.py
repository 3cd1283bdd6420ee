"""Several optimizers of one script as the one that a run steps with.

    prepare(G, D, opt_g, opt_d)      opt_g: group 0   opt_d: group 1     the user's, each by itself
                                          `-------.------'
    JointOptimizer                        groups 0, 1                    the same dicts, in order

A group, and a parameter's state, belong to one of them, so what reads groups or state need not know
how many there are. What steps must: each steps if a gradient of its own came, as none of torch's
optimizers, nor a user's, need expect to be called otherwise. One optimizer alone is never wrapped.
This module must not know blocks, updates, or when a script steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """Optimizers over different parameters, as one.

    Args:
        parts: at least two, over disjoint parameters.
        state: that all of them keep theirs in; None: each has its own.
    """

    state: Any

    def __init__(self, parts: Sequence[Optimizer], state: Any = None) -> None:
        # Not torch's, which would make groups of its own: these stay the parts' own dicts.
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        self.state = _JointState(self.parts) if state is None else state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # torch has an attribute
        """The parts' own dicts, as they are now: whoever loads a part's state gives it new ones."""
        return [group for one in self.parts for group in one.param_groups]

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(type(one).__name__ for one in self.parts)})"


class _JointState(Mapping[Tensor, Any]):
    """The state of each parameter, in the optimizer that has it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        self._owners = {
            parameter: one
            for one in parts
            for group in one.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self._owners[parameter].state.get(parameter, default)

    def __iter__(self) -> Iterator[Tensor]:
        return (one for part in self._parts for one in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """All of them as one; the only one is itself."""
    return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """What it is made of."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """What it steps, in its groups' order."""
    return [one for group in optimizer.param_groups for one in group["params"]]
