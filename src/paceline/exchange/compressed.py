"""One member's gradient in fewer bytes: its compressors, and the residual that was not sent.

    cut      span 0 | span 1 | ...       a compressor each; one residual, however it is cut
    begin    span 1: encode, operation; span 0: encode, operation; ...
    keep     the update is final

The residual outlives the peers: a member that goes on through the store keeps it for the next
rounds, and checkpoints store it. Above 300 lines, since the bytes and the residual are cut into the
same pieces. This module must not know protocols, nor how an operation is done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression import Compression
from ..compression.base import (
    AllReduce,
    AllToAll,
    Compressor,
    ErrorFeedback,
    Exchanging,
    Matrix,
    Operation,
    Segment,
)
from ..store.fragments import Fragment, Fragments
from ..store.layout import Section, TensorPlace
from ..store.sums import wide
from .group import MemberGroup, Pending


class Span(NamedTuple):
    """A byte range of the gradients, of one dtype."""

    start: int
    stop: int
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """Return its numbers, ``(n,)``; complex numbers as real and imaginary parts."""
        flat = block[self.start : self.stop].view(self.dtype)
        return torch.view_as_real(flat).view(-1) if self.dtype.is_complex else flat

    def numbers_before(self, offset: int) -> int:
        """Return how many of its numbers lie before this byte."""
        num_bytes = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        return (offset - self.start) // num_bytes


class _Piece(NamedTuple):
    """A span with its compressor, the number of the run that it is in, and its position there."""

    span: Span
    run: int
    at: int
    compressor: Compressor


class CompressedGradient:
    """What one member sends in place of its gradient, and the residual.

    Args:
        section: where the gradients are.
        seat: of this member.
        device: of the gradients.
        num_fragments: an update covers one of so many fragments.
    """

    def __init__(
        self,
        compression: Compression,
        section: Section,
        seat: int,
        num_members: int,
        device: torch.device,
        num_fragments: int = 1,
    ) -> None:
        self._fragments = Fragments(section, num_fragments)
        self.compression, self.section = compression, section
        self._seat, self.num_members, self.device = seat, num_members, device
        self._runs = spans_of(section)
        self._feedback: list[ErrorFeedback] = []
        for run in self._runs:
            dtype, size = _numbers(run)
            self._feedback.append(ErrorFeedback(size, dtype, device))
        self._pieces: list[_Piece] = []
        self.cut(
            [
                Span(a, b, dtype)
                for part in self._fragments.each
                for dtype, a, b in part.runs(section)
            ]
        )

    def cut(self, spans: Sequence[Span]) -> None:
        """Compress each of these spans by itself from now on; together they are all gradients."""
        common = self._common()
        self._pieces = [self._piece(span) for span in spans]
        for piece in self._pieces:
            piece.compressor.load(common)

    def part(self) -> None:
        """Renew compressors as members go on through the store: new members may join later."""
        self._pieces = [self._piece(piece.span) for piece in self._pieces]

    def _piece(self, span: Span) -> _Piece:
        run = next(
            i
            for i, outer in enumerate(self._runs)
            if outer.start <= span.start < max(outer.stop, outer.start + 1)
        )
        dtype, size = _numbers(span)
        inside = [
            _matrix(place, number, span)
            for number, place in enumerate(self.section.places)
            if span.start <= place.offset < span.stop
        ]
        segment = Segment(
            size=size, dtype=dtype, device=self.device, seat=self._seat,
            num_members=self.num_members, matrices=[m for m in inside if m is not None],
        )  # fmt: skip
        compressor = self.compression.kind(segment, self.compression.value)
        return _Piece(span, run, self._runs[run].numbers_before(span.start), compressor)

    @property
    def sent_bytes(self) -> float:
        """Bytes that this member sends for an update, the mean over all fragments."""
        num_bytes = sum(piece.compressor.sent_bytes() for piece in self._pieces)
        return num_bytes / len(self._fragments.each)

    @property
    def plain_bytes(self) -> float:
        """Bytes that it would send without compression."""
        num_bytes = sum(run.stop - run.start for run in self._runs)
        whole = 2 * (self.num_members - 1) / self.num_members * num_bytes
        return whole / len(self._fragments.each)

    @property
    def largest(self) -> Fragment:
        """The fragment with the most bytes."""
        return max(self._fragments.each, key=lambda part: part.stop - part.start)

    def anew(self, section: Section | None = None) -> "CompressedGradient":
        """Return one like this with an empty residual.

        Args:
            section: compress each of its tensors by itself; None: cut as this one is.
        """
        copy = CompressedGradient(
            self.compression, section or self.section, self._seat, self.num_members, self.device
        )
        spans = [piece.span for piece in self._pieces]
        if section is not None:
            ends = [(place.offset, place.offset + place.num_bytes) for place in section.places]
            spans = [Span(*end, p.dtype) for end, p in zip(ends, section.places, strict=True)]
        copy.cut(spans)
        return copy

    def spans(self, due: Fragment) -> list[Span]:
        """Return the spans of this fragment, each compressed by itself."""
        return [p.span for p in self._pieces if due.start <= p.span.start < due.stop]

    # -- an update ------------------------------------------------------------------------------

    def begin(self, index: int, source: Tensor, share: float, mean: Tensor) -> Exchanging:
        """Begin the exchange of span ``index``, for the first time or again.

        Args:
            source: the block with the gradients, as bytes.
            share: this member's weight in the mean; 0: it has no gradient.
            mean: the block whose span becomes the mean; may be ``source``.
        """
        span, run, at, compressor = self._pieces[index]
        feedback, own, into = self._feedback[run], span.of(source), span.of(mean)
        if into.dtype is feedback.residual.dtype:
            return feedback.begin(compressor, at, own, share, into)
        out = torch.empty(len(into), dtype=feedback.residual.dtype, device=self.device)
        return _rounded(feedback.begin(compressor, at, own, share, out), out, into)

    def begin_all(
        self, source: Tensor, share: float, mean: Tensor, due: Fragment | None = None
    ) -> list[Exchanging]:
        """Begin the exchanges of all spans, in order.

        Args:
            due: only of the spans in this fragment; None: of all.
        """
        return [
            self.begin(index, source, share, mean)
            for index, piece in enumerate(self._pieces)
            if due is None or due.start <= piece.span.start < due.stop
        ]

    def keep_fragment(self, due: Fragment) -> None:
        """The update of this fragment is final."""
        for span, run, at, compressor in self._pieces:
            if due.start <= span.start < due.stop:
                compressor.keep()
                self._feedback[run].keep_part(at, _numbers(span)[1])

    def keep(self, present: Sequence[int], mean: Tensor) -> None:
        """The update of all gradients is final.

        Args:
            present: per parameter, 0 where nobody has a gradient: it is not stepped, so the first
                member adds its mean to the residual.
            mean: the block with the mean.
        """
        for piece in self._pieces:
            piece.compressor.keep()
        for feedback in self._feedback:
            feedback.keep()
        if self._seat or all(present):
            return
        for is_there, place in zip(present, self.section.places, strict=True):
            if not is_there and place.numel:
                run = next(i for i, span in enumerate(self._runs) if place.offset < span.stop)
                part = Span(place.offset, place.offset + place.num_bytes, place.dtype).of(mean)
                at = self._runs[run].numbers_before(place.offset)
                self._feedback[run].residual[at : at + len(part)] += part

    # -- checkpoints ----------------------------------------------------------------------------

    def remember(self) -> dict[str, Any]:
        """Return the residual, and the compressors' state, which is the same in all members."""
        return {
            "residual": [feedback.residual for feedback in self._feedback],
            "common": self._common(),
        }

    def _common(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for piece in self._pieces:
            state |= piece.compressor.state()
        return state

    def go_on(self, num_saved: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        """Load what ``remember`` returned in all members.

        With as many members as before each takes its own; with another number the first one takes
        the sum of all residuals.

        Args:
            num_saved: number of members that saved.
            read: returns what the member on this seat saved.
        """
        if num_saved == self.num_members:
            seats: Sequence[int] = (self._seat,)
        else:
            seats = range(num_saved if self._seat == 0 else 0)
        for seat in seats:
            saved = read(seat)["residual"]
            for feedback, residual in zip(self._feedback, saved, strict=True):
                feedback.residual += residual.to(self.device)
        common = read(min(self._seat, num_saved - 1))["common"]
        for piece in self._pieces:
            piece.compressor.load(common)


class GroupLink:
    """Does the operations of exchanges with all members of a group."""

    def __init__(self, group: MemberGroup) -> None:
        self._group = group

    def begin(self, operation: Operation) -> tuple[Pending, Tensor]:
        group, tensor = self._group, operation.tensor
        if isinstance(operation, AllReduce):
            return group.all_reduce(tensor, at_once=operation.at_once), tensor
        if isinstance(operation, AllToAll):
            out = torch.empty_like(tensor)
            return group.all_to_all(tensor.view(-1), out.view(-1)), out
        out = tensor.new_empty((group.size, tensor.numel()))
        return group.all_gather(tensor, out.view(-1)), out

    def finish(self, begun: tuple[Pending, Tensor]) -> Tensor:
        pending, tensor = begun
        pending.wait()
        return tensor


def spans_of(section: Section) -> list[Span]:
    """Return spans of all gradients, one per dtype."""
    return [Span(start, stop, dtype) for dtype, start, stop in section.runs()]


def _numbers(span: Span) -> tuple[torch.dtype, int]:
    """Return the dtype that a span is computed in, and how many numbers it has."""
    real = span.dtype.to_real() if span.dtype.is_complex else span.dtype
    return wide(torch.empty(0, dtype=real)), span.numbers_before(span.stop)


def _matrix(place: TensorPlace, number: int, span: Span) -> Matrix | None:
    """Return a parameter as a matrix in memory order; None if it has fewer than two axes."""
    if len(place.shape) < 2 or place.dtype.is_complex or not place.numel:
        return None
    outermost = max(range(len(place.shape)), key=lambda axis: (place.strides[axis], -axis))
    rows = place.shape[outermost]
    start = span.numbers_before(place.offset)
    return Matrix(start=start, rows=rows, columns=place.numel // rows, number=number)


def _rounded(exchanging: Exchanging, out: Tensor, into: Tensor) -> Exchanging:
    """Run the exchange, then copy its mean into ``into``, which has fewer bits."""
    yield from exchanging
    into.copy_(out)
