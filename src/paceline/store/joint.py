"""Several optimizers of one script, combined into the one that a run steps with.

    prepare(G, D, opt_g, opt_d)      opt_g: group 0   opt_d: group 1     the user's, each by itself
                                          `-------.------'
    JointOptimizer                        groups 0, 1                    the same dicts, in order

A group, and a parameter's state, belong to one of them, so code that reads groups or state need not
know how many there are. Code that steps must: each optimizer steps only if one of its parameters
has a gradient, as it may not expect other calls. A single optimizer is never wrapped.
This module must not know blocks, updates, or when a script steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """Optimizers over different parameters, combined into one.

    Args:
        parts: at least two, over disjoint parameters.
        state: the common state of all parts; None: each has its own.
    """

    state: Any

    def __init__(self, parts: Sequence[Optimizer], state: Any = None) -> None:
        # Not torch's __init__, which would make new groups: these stay the parts' own dicts.
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        self.state = _JointState(self.parts) if state is None else state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # torch has an attribute
        """The parts' current dicts: loading a part's state makes new ones."""
        return [group for part in self.parts for group in part.param_groups]

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(type(part).__name__ for part in self.parts)})"


class _JointState(Mapping[Tensor, Any]):
    """Looks up the state of a parameter in the optimizer that owns it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        self._owners = {
            parameter: part
            for part in parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self._owners[parameter].state.get(parameter, default)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for part in self._parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """All optimizers as one; a single one is returned as it is."""
    return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that it combines; of any other, itself."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Its parameters, in its groups' order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
