"""Gradients of a member whose script steps several optimizers in one block.

    each step is an update    D.step():  | D's |  pushed, G's removed meanwhile  | both restored
                              G.step():  | G's |  pushed, D's removed meanwhile  | both restored
    a block is an update      D.step():  a copy of D's is set aside
                              G.step():  a copy of G's is set aside        later passes may add
                              block ends: | copies | pushed together       .grad is restored

A parameter whose gradient is removed counts as one without a gradient, which an update leaves
unchanged. A step copies ``.grad`` at that moment, and ``.grad`` itself stays the script's, as in
plain PyTorch. This module must not know who pushes, or when.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from ..store.joint import parameters_of
from .replica import Replica


class SetAside:
    """The gradients of one member that are set aside.

    Args:
        replica: with its hooks registered.
        optimizers: over different parameters of the replica's model.

    Attributes:
        stepped: the optimizers whose gradients wait for the block's end, one bit each.
    """

    def __init__(self, replica: Replica, optimizers: Sequence[Optimizer]) -> None:
        self._replica = replica
        number_of = {parameter: number for number, parameter in enumerate(replica.parameters)}
        self._numbers = [
            [number_of[parameter] for parameter in parameters_of(optimizer)]
            for optimizer in optimizers
        ]
        self._taken: dict[int, Tensor] = {}
        self._num_dropped = 0
        self.stepped = 0

    def take(self, part: int) -> None:
        """Set aside copies of this optimizer's gradients."""
        for number in self._numbers[part]:
            gradient = self._replica.parameters[number].grad
            if gradient is not None:
                self._taken[number] = gradient.clone()
        self.stepped |= 1 << part

    def drop(self) -> None:
        """Drop what was set aside, and restore nothing: the work does not count."""
        self._taken = {}
        self._num_dropped += 1
        self.stepped = 0

    @contextmanager
    def only(self, part: int) -> Iterator[None]:
        """Inside, no other optimizer's parameters have gradients."""
        parameters = self._replica.parameters
        gradients = {number: parameters[number].grad for number in self._numbers[part]}
        with self._with({number: grad for number, grad in gradients.items() if grad is not None}):
            yield

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the gradients that were set aside are the only ones; none wait any more."""
        taken, self._taken, self.stepped = self._taken, {}, 0
        with self._with(taken):
            yield

    @contextmanager
    def _with(self, gradients: Mapping[int, Tensor]) -> Iterator[None]:
        """Inside, these are the gradients; afterwards the former ones, unless work was dropped."""
        replica, before, num_dropped = self._replica, {}, self._num_dropped
        for number, parameter in enumerate(replica.parameters):
            wanted = gradients.get(number)
            if parameter.grad is wanted:
                continue
            before[number] = None if parameter.grad is None else parameter.grad.clone()
            _put(replica, number, wanted)
        yield
        for number, gradient in before.items() if num_dropped == self._num_dropped else ():
            _put(replica, number, gradient)


def _put(replica: Replica, number: int, gradient: Tensor | None) -> None:
    replica.parameters[number].grad = gradient
    if gradient is not None:
        replica.take_over(number, gradient)
