"""What a compressor is, and the operations between members that its exchange is made of.

    begin     x = share * own + residual
    exchange  encode; yield an operation -> what came of it; ... ; decode into ``out``
              meanwhile x becomes x - sent: what this member has not sent
    keep      the update stands: x is the residual of the next one; without it nothing has changed

    operation   a member gives              and gets
    Sum         (n,)                        the sum over members, (n,), in place
    Swap        (P, n): row j for member j  (P, n): row j of member j
    Gather      (n,)                        (P, n): row j is what member j gave

An exchange is a generator, so it knows no link: who drives it may have many under way, and do each
operation when and how it likes, in the same order in all members. ``out`` is the same in all
members, to the last bit.

Invariant (error feedback): nothing is lost. Over all members the sum of what went in, weighted
gradients and residuals, is ``out`` and the new residuals (tests/compression).

Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, section 3 (what
is lost goes into the next gradient); S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019 (why that converges). The
residual here is one of the weighted gradient, so that members with unlike shares add up.
"""

import abc
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Sum(NamedTuple):
    """Becomes the sum over all members."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        """What a member sends, where each adds up its part for all (ring, fully-connected)."""
        return 2 * (num_members - 1) / num_members * self.tensor.nbytes


class Swap(NamedTuple):
    """Row j is for member j."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) / num_members * self.tensor.nbytes


class Gather(NamedTuple):
    """For all."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) * self.tensor.nbytes


Operation: TypeAlias = Sum | Swap | Gather
Exchanging: TypeAlias = Generator[Operation, Tensor, None]


class Matrix(NamedTuple):
    """Numbers of a stretch that make a matrix, in memory row by row.

    Attributes:
        start: of its first number.
        number: of its parameter, the same in all members.
    """

    start: int
    rows: int
    columns: int
    number: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Numbers that are compressed together, as the member at ``seat`` has them.

    Attributes:
        size: n, how many.
        dtype: of the computation: float32, or float64 where the gradient is that.
        matrices: in it, in order; what lies in none are vectors, and padding.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    seat: int
    num_members: int
    matrices: Sequence[Matrix] = ()


class Compressor(abc.ABC):
    """One member's side of one stretch.

    Args:
        value: the number in its name; of a percentage in millionths.

    Attributes:
        residual: what was not sent yet, ``(n,)``; zeros at first.
    """

    def __init__(self, stretch: Stretch, value: int | None = None) -> None:
        self.stretch = stretch
        self.value = value
        self.residual = torch.zeros(stretch.size, dtype=stretch.dtype, device=stretch.device)
        self._next = torch.zeros_like(self.residual)

    def begin(self, own: Tensor, share: float, out: Tensor) -> Exchanging:
        """The exchange of an update; nothing has changed until ``keep``, so it can begin anew.

        Args:
            own: this member's gradient, ``(n,)``; it is read before the first operation.
            share: of it in the mean; 0: there is none, and only the residual is sent.
            out: becomes the mean, ``(n,)``, of the stretch's dtype; may be ``own``.
        """
        if share:
            torch.add(self.residual, own, alpha=share, out=self._next)
        else:
            self._next.copy_(self.residual)
        return self._exchange(self._next, out)

    @abc.abstractmethod
    def _exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        """Send x, which becomes what was not sent, and fill ``out``."""

    def keep(self) -> None:
        """The update stands."""
        self.residual, self._next = self._next, self.residual

    def sent_bytes(self) -> float:
        """What this member sends for an update: a closed formula of the stretch and P."""
        return sum(self._operation_bytes())

    @abc.abstractmethod
    def _operation_bytes(self) -> Sequence[float]:
        """Of each operation, in order."""

    def state(self) -> dict[str, Tensor]:
        """What else is remembered from update to update, the same in all members."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on with what ``state`` gave, of whatever compressor; what is not known is left."""
        return


def joined(parts: Sequence[Tensor]) -> Tensor:
    """As bytes, one after the other, ``(bytes,)``."""
    return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in parts])
