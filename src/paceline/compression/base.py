"""What a compressor is, and the operations between members that its exchange is made of.

    begin     x = share * own + residual
    exchange  encode; yield an operation -> what came of it; ... ; decode into ``out``
              meanwhile x becomes x - sent: what this member has not sent
    keep      the update stands: x is the residual of the next one; without it nothing has changed

    operation   a member gives              and gets
    AllReduce   (n,)                        the sum over members, (n,), in place
    AllToAll    (P, n): row j for member j  (P, n): row j of member j
    AllGather   (n,)                        (P, n): row j is what member j gave

An exchange is a generator, so it knows no link. Many may be under way at once (`UnderWay`), in the
same order in all members, so operations fit:

    begin     segment 1: encode, its first operation begins       while the backward pass computes
              segment 0: encode, its first operation begins
    finish    segment 1: wait, its second operation begins; segment 0: the same; ... ; decode

``out`` is the same in all members, to the last bit.

Invariant (error feedback): nothing is lost. Over all members the sum of what went in, weighted
gradients and residuals, is ``out`` and the new residuals (tests/compression).

Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, section 3 (what
is lost goes into the next gradient); S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019 (why that converges). The
residual here is one of the weighted gradient, so that members with unlike shares add up.
"""

import abc
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor


class AllReduce(NamedTuple):
    """Becomes the sum over all members.

    Attributes:
        at_once: whether nothing is computed until it has.
    """

    tensor: Tensor
    at_once: bool = False

    def sent_bytes(self, num_members: int) -> float:
        """What a member sends, where each adds up its part for all (ring, fully-connected)."""
        return 2 * (num_members - 1) / num_members * self.tensor.nbytes


class AllToAll(NamedTuple):
    """Row j is for member j."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) / num_members * self.tensor.nbytes


class AllGather(NamedTuple):
    """For all."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) * self.tensor.nbytes


Operation: TypeAlias = AllReduce | AllToAll | AllGather
Exchanging: TypeAlias = Generator[Operation, Tensor, None]


class Matrix(NamedTuple):
    """Numbers of a segment that make a matrix, in memory row by row.

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
class Segment:
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
    """One member's side of one segment.

    Args:
        value: the number in its name; of a percentage in millionths.
    """

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        self.segment = segment
        self.value = value

    @abc.abstractmethod
    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        """Send x, ``(n,)``, which becomes what was not sent, and fill ``out`` with the sum of all.

        Nothing else has changed until ``keep``, so it can begin anew.
        """

    def keep(self) -> None:
        """The update stands."""
        return

    def sent_bytes(self) -> float:
        """What this member sends for an update: a closed formula of the segment and P."""
        return sum(self._operation_bytes())

    @abc.abstractmethod
    def _operation_bytes(self) -> Sequence[float]:
        """Of each operation, in order."""

    def state(self) -> dict[str, Tensor]:
        """What is remembered from update to update, the same in all members."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what ``state`` gave; what is of something else is left."""
        return


class ErrorFeedback:
    """What one member has not sent yet, of numbers of one type.

    Attributes:
        residual: ``(n,)``; zeros at first.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(size, dtype=dtype, device=device)
        self._next = torch.zeros_like(self.residual)

    def begin(
        self, compressor: Compressor, at: int, own: Tensor, share: float, out: Tensor
    ) -> Exchanging:
        """The exchange of an update, of the compressor's numbers, which begin with number ``at``.

        Args:
            own: this member's gradient, ``(m,)``; it is read here and now.
            share: of it in the mean; 0: there is none, and only the residual is sent.
            out: becomes the mean, ``(m,)``, of the residual's type; may be ``own``.
        """
        x, residual = (one[at : at + len(own)] for one in (self._next, self.residual))
        if share:
            torch.add(residual, own, alpha=share, out=x)
        else:
            x.copy_(residual)
        return compressor.exchange(x, out)

    def keep(self) -> None:
        """The update stands, and every number was in one exchange: the others may be forgotten."""
        self.residual, self._next = self._next, self.residual

    def keep_part(self, at: int, size: int) -> None:
        """The update stands; ``size`` numbers from number ``at`` on were in an exchange."""
        self.residual[at : at + size].copy_(self._next[at : at + size])


class MemberLink(Protocol):
    """What does operations between members; all begin theirs in one order."""

    def begin(self, operation: Operation) -> Any:
        """It is on its way."""

    def finish(self, begun: Any) -> Tensor:
        """Wait for it; what it came to."""


class UnderWay:
    """Exchanges between begin and finish, in the order in which they began."""

    def __init__(self, link: MemberLink) -> None:
        self._link = link
        self._begun: list[tuple[Exchanging, Any]] = []

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, exchanging: Exchanging) -> None:
        self._begun.append((exchanging, self._link.begin(next(exchanging))))

    def finish(self) -> None:
        """Operation by operation, each of all exchanges before the next one of the first."""
        while self._begun:
            self.go_on()

    def go_on(self) -> None:
        """Wait for the operation of each exchange, and begin its next one."""
        begun, self._begun = self._begun, []
        for exchanging, handle in begun:
            try:
                following = exchanging.send(self._link.finish(handle))
            except StopIteration:
                continue
            self._begun.append((exchanging, self._link.begin(following)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """As bytes, one after the other, ``(bytes,)``."""
    return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in parts])
