"""The contract of a compressor, and the operations between members that its exchange consists of.

    begin     x = share * gradient + residual
    exchange  encode; yield an operation -> its result; ... ; decode into ``out``
              meanwhile x becomes x - sent: what this member has not sent
    keep      the update is final: x is the residual of the next one; until then nothing has changed

    operation   a member gives              and gets
    AllReduce   (n,)                        the sum over members, (n,), in place
    AllToAll    (P, n): row j for member j  (P, n): row j of member j
    AllGather   (n,)                        (P, n): row j is what member j gave

An exchange is a generator, so it need not know the link. Several may be under way at once
(`UnderWay`), in the same order in all members, so that their operations match:

    begin     segment 1: encode, its first operation begins       while the backward pass computes
              segment 0: encode, its first operation begins
    finish    segment 1: wait, its second operation begins; segment 0: likewise; ... ; decode

``out`` is the same in all members, to the last bit.

Invariant (error feedback): nothing is lost. Summed over all members, the weighted gradients and the
residuals that went in equal ``out`` plus the new residuals (tests/compression).

Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, section 3 (what
is lost goes into the next gradient); S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error
Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019 (why that converges).
Changed: the residual is that of the weighted gradient, so that members with unequal shares add up.
"""

import abc
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor


class AllReduce(NamedTuple):
    """An all-reduce: the tensor becomes the sum over all members.

    Attributes:
        at_once: whether the member waits for the sum and computes nothing meanwhile.
    """

    tensor: Tensor
    at_once: bool = False

    def sent_bytes(self, num_members: int) -> float:
        """The bytes that a member sends if each adds up its own part (ring, fully-connected)."""
        return 2 * (num_members - 1) / num_members * self.tensor.nbytes


class AllToAll(NamedTuple):
    """An all-to-all: row j of the tensor is for member j."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) / num_members * self.tensor.nbytes


class AllGather(NamedTuple):
    """An all-gather: every member gets the tensors of all."""

    tensor: Tensor

    def sent_bytes(self, num_members: int) -> float:
        return (num_members - 1) * self.tensor.nbytes


Operation: TypeAlias = AllReduce | AllToAll | AllGather
Exchanging: TypeAlias = Generator[Operation, Tensor, None]


class Matrix(NamedTuple):
    """The numbers of a segment that form a matrix, stored row by row.

    Attributes:
        start: the index of the first number in the segment.
        number: the number of the parameter, the same in all members.
    """

    start: int
    rows: int
    columns: int
    number: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix as a view, ``(rows, columns)``, of a flat segment."""
        return flat[self.start : self.start + self.size].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of numbers that are compressed together, as seen by the member at ``seat``.

    Attributes:
        size: n, the number of numbers.
        dtype: of the computation: float64 if the gradient is float64, else float32.
        matrices: those in the segment, in order; the numbers between them are vectors and padding.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    seat: int
    num_members: int
    matrices: Sequence[Matrix] = ()


class Compressor(abc.ABC):
    """Compresses one segment for one member.

    Args:
        value: the number in the compressor's name; a percentage in millionths.
    """

    def __init__(self, segment: Segment, value: int | None = None) -> None:
        self.segment = segment
        self.value = value

    @abc.abstractmethod
    def exchange(self, x: Tensor, out: Tensor) -> Exchanging:
        """Send ``x`` and receive the sum over all members; a generator of operations.

        No other state changes before ``keep``, so an exchange can be repeated.

        Args:
            x: the numbers to send, ``(n,)``; becomes what was not sent.
            out: filled with the sum, ``(n,)``.
        """

    def keep(self) -> None:
        """Make the state of the last exchange final."""
        return

    def sent_bytes(self) -> float:
        """The bytes that this member sends per update, by a closed formula of the segment and P."""
        return sum(self._operation_bytes())

    @abc.abstractmethod
    def _operation_bytes(self) -> Sequence[float]:
        """The bytes that this member sends in each operation, in order."""

    def state(self) -> dict[str, Tensor]:
        """Return what is remembered from update to update; it is the same in all members."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned; entries that do not fit are ignored."""
        return


class ErrorFeedback:
    """What one member has not sent yet, for all numbers of one type.

    Attributes:
        residual: ``(n,)``, zeros at first.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.residual = torch.zeros(size, dtype=dtype, device=device)
        self._next = torch.zeros_like(self.residual)

    def begin(
        self, compressor: Compressor, at: int, gradient: Tensor, share: float, out: Tensor
    ) -> Exchanging:
        """Return the exchange of one update for the compressor's segment.

        Args:
            at: the index of the segment's first number.
            gradient: this member's, ``(m,)``; it is read during this call.
            share: the gradient's weight in the mean; 0 if there is no gradient, so that only the
                residual is sent.
            out: becomes the mean, ``(m,)``, of the residual's type; may be ``gradient``.
        """
        part = slice(at, at + len(gradient))
        x, residual = self._next[part], self.residual[part]
        if share:
            torch.add(residual, gradient, alpha=share, out=x)
        else:
            x.copy_(residual)
        return compressor.exchange(x, out)

    def keep(self) -> None:
        """Make the update final; every number must have been in one exchange."""
        self.residual, self._next = self._next, self.residual

    def keep_part(self, at: int, size: int) -> None:
        """Make the update of ``size`` numbers from index ``at`` on final; the others had none."""
        self.residual[at : at + size].copy_(self._next[at : at + size])


class MemberLink(Protocol):
    """Carries out operations between members, which all begin them in the same order."""

    def begin(self, operation: Operation) -> Any:
        """Begin an operation, and return a handle of it."""

    def finish(self, begun: Any) -> Tensor:
        """Wait for the operation of a handle, and return its result."""


class UnderWay:
    """The exchanges between begin and finish, in the order in which they began."""

    def __init__(self, link: MemberLink) -> None:
        self._link = link
        self._pending: list[tuple[Exchanging, Any]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, exchanging: Exchanging) -> None:
        """Begin the first operation of an exchange."""
        self._pending.append((exchanging, self._link.begin(next(exchanging))))

    def finish(self) -> None:
        """Carry all exchanges to their ends, one operation of each at a time."""
        while self._pending:
            self.go_on()

    def go_on(self) -> None:
        """Wait for the current operation of each exchange, and begin its next one."""
        pending, self._pending = self._pending, []
        for exchanging, handle in pending:
            try:
                operation = exchanging.send(self._link.finish(handle))
            except StopIteration:
                continue
            self._pending.append((exchanging, self._link.begin(operation)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensors' bytes one after another, ``(bytes,)``, uint8."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
