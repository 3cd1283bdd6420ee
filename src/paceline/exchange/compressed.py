"""One member's gradient in fewer bytes: its compressors, and what it has not sent.

    cut      span 0 | span 1 | ...       a compressor each; the residual is one, however it is cut
    begin    span 1: encode, operation; span 0: encode, operation; ...
    keep     the update stands

What was not sent outlives the peers: a member that goes on through the store keeps it for the next
time, and a checkpoint has it. Above 300 lines, since bytes and what was not sent are of the same
pieces. This module must not know protocols, nor how an operation is done.
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
    """A part of the gradients, in bytes, of one type of numbers."""

    start: int
    stop: int
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """Its numbers, ``(n,)``; of complex ones their parts, one after the other."""
        flat = block[self.start : self.stop].view(self.dtype)
        return torch.view_as_real(flat).view(-1) if self.dtype.is_complex else flat

    def numbers_before(self, offset: int) -> int:
        """How many of them lie before this byte."""
        each = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        return (offset - self.start) // each


class _Piece(NamedTuple):
    """What is compressed together: its span, in which run of numbers it lies, and from where on."""

    span: Span
    run: int
    at: int
    compressor: Compressor


class CompressedGradient:
    """What one member sends in place of its gradient, and what it has not sent yet.

    Args:
        section: where gradients lie.
        seat: of this member.
        device: that they lie on.
        num_fragments: one of which an update is of.
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
            [Span(a, b, kind) for one in self._fragments.each for kind, a, b in one.runs(section)]
        )

    def cut(self, spans: Sequence[Span]) -> None:
        """From now on these are compressed each by itself; together they are all gradients."""
        common = self._common()
        self._pieces = [self._piece(one) for one in spans]
        for piece in self._pieces:
            piece.compressor.load(common)

    def part(self) -> None:
        """Members go on through the store: when they meet again, newcomers may be among them."""
        self._pieces = [self._piece(one.span) for one in self._pieces]

    def _piece(self, span: Span) -> _Piece:
        run = next(
            number
            for number, one in enumerate(self._runs)
            if one.start <= span.start < max(one.stop, one.start + 1)
        )
        dtype, size = _numbers(span)
        inside = [
            _matrix(place, number, span)
            for number, place in enumerate(self.section.places)
            if span.start <= place.offset < span.stop
        ]
        segment = Segment(
            size=size, dtype=dtype, device=self.device, seat=self._seat,
            num_members=self.num_members, matrices=[one for one in inside if one is not None],
        )  # fmt: skip
        compressor = self.compression.kind(segment, self.compression.value)
        return _Piece(span, run, self._runs[run].numbers_before(span.start), compressor)

    @property
    def sent_bytes(self) -> float:
        """What this member sends for an update, in the mean over all fragments."""
        num_bytes = sum(one.compressor.sent_bytes() for one in self._pieces)
        return num_bytes / len(self._fragments.each)

    @property
    def plain_bytes(self) -> float:
        """What it would send of gradients as they are."""
        num_bytes = sum(one.stop - one.start for one in self._runs)
        whole = 2 * (self.num_members - 1) / self.num_members * num_bytes
        return whole / len(self._fragments.each)

    @property
    def largest(self) -> Fragment:
        """What an update is of, where not all are of as many bytes."""
        return max(self._fragments.each, key=lambda one: one.stop - one.start)

    def anew(self, section: Section | None = None) -> "CompressedGradient":
        """One like this that has nothing left over.

        Args:
            section: of which each tensor is compressed by itself; None: as this one is cut.
        """
        made = CompressedGradient(
            self.compression, section or self.section, self._seat, self.num_members, self.device
        )
        spans = [one.span for one in self._pieces]
        if section is not None:
            ends = [(one.offset, one.offset + one.num_bytes) for one in section.places]
            spans = [Span(*end, one.dtype) for end, one in zip(ends, section.places, strict=True)]
        made.cut(spans)
        return made

    def spans(self, due: Fragment) -> list[Span]:
        """What of this fragment is compressed together."""
        return [one.span for one in self._pieces if due.start <= one.span.start < due.stop]

    # -- an update ------------------------------------------------------------------------------

    def begin(self, index: int, source: Tensor, share: float, mean: Tensor) -> Exchanging:
        """The exchange of span ``index``, for the first time or once more.

        Args:
            source: the block that gradients lie in, as bytes.
            share: of this member's in the mean; 0: it has none.
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
        """Those of all spans, in their order.

        Args:
            due: of those that lie in this.
        """
        return [
            self.begin(index, source, share, mean)
            for index, one in enumerate(self._pieces)
            if due is None or due.start <= one.span.start < due.stop
        ]

    def keep_fragment(self, due: Fragment) -> None:
        """The update stands, which was of this."""
        for span, run, at, compressor in self._pieces:
            if due.start <= span.start < due.stop:
                compressor.keep()
                self._feedback[run].keep_part(at, _numbers(span)[1])

    def keep(self, present: Sequence[int], mean: Tensor) -> None:
        """The update stands, which was of all.

        Args:
            present: per parameter, 0 where nobody has a gradient: it is not stepped, so what came
                for it waits on, with the first member.
            mean: what came, the block.
        """
        for piece in self._pieces:
            piece.compressor.keep()
        for feedback in self._feedback:
            feedback.keep()
        if self._seat or all(present):
            return
        for is_there, place in zip(present, self.section.places, strict=True):
            if not is_there and place.numel:
                run = next(n for n, one in enumerate(self._runs) if place.offset < one.stop)
                one = Span(place.offset, place.offset + place.num_bytes, place.dtype).of(mean)
                at = self._runs[run].numbers_before(place.offset)
                self._feedback[run].residual[at : at + len(one)] += one

    # -- checkpoints ----------------------------------------------------------------------------

    def remember(self) -> dict[str, Any]:
        """The residual, and what else compressors remember, which is the same in all members."""
        return {
            "residual": [one.residual for one in self._feedback],
            "common": self._common(),
        }

    def _common(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for piece in self._pieces:
            found |= piece.compressor.state()
        return found

    def go_on(self, num_saved: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        """Take over what members remembered.

        Of as many as there are now each takes its own; of another number the first one takes the
        sum of all that they had not sent.

        Args:
            num_saved: members that there were.
            read: what one of them remembered.
        """
        if num_saved == self.num_members:
            seats: Sequence[int] = (self._seat,)
        else:
            seats = range(num_saved if self._seat == 0 else 0)
        for seat in seats:
            saved = read(seat)["residual"]
            for feedback, one in zip(self._feedback, saved, strict=True):
                feedback.residual += one.to(self.device)
        common = read(min(self._seat, num_saved - 1))["common"]
        for piece in self._pieces:
            piece.compressor.load(common)


class GroupLink:
    """Operations of exchanges by all members of a group."""

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
    """All gradients, a span for each type of numbers."""
    return [Span(start, stop, dtype) for dtype, start, stop in section.runs()]


def _numbers(span: Span) -> tuple[torch.dtype, int]:
    """In which type a span is computed, and how many numbers it has."""
    real = span.dtype.to_real() if span.dtype.is_complex else span.dtype
    return wide(torch.empty(0, dtype=real)), span.numbers_before(span.stop)


def _matrix(place: TensorPlace, number: int, span: Span) -> Matrix | None:
    """A parameter as a matrix, as it lies in memory; None where it is none."""
    if len(place.shape) < 2 or place.dtype.is_complex or not place.numel:
        return None
    outermost = max(range(len(place.shape)), key=lambda one: (place.strides[one], -one))
    rows = place.shape[outermost]
    start = span.numbers_before(place.offset)
    return Matrix(start=start, rows=rows, columns=place.numel // rows, number=number)


def _rounded(exchanging: Exchanging, out: Tensor, into: Tensor) -> Exchanging:
    """The same, and its mean to numbers of fewer bits."""
    yield from exchanging
    into.copy_(out)
