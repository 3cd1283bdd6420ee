"""What a compressed gradient costs here and what it saves, measured before the first step.

    synthetic gradients of the model's own size
        encode, decode                       without a link: the time spent
        whole | compressed | whole | ...     on a fast link, in turn: what both take
        tiny | tiny                          on a slow one, with bytes by formula

All members measure together, see compression/price.py. This module must not know who asks, or what
the plan says of it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..collectives.base import LinkCost
from ..compression.base import AllReduce, Exchanging, MemberLink
from ..compression.price import (
    QUICK_S,
    FixedCosts,
    GradientWay,
    MeasuredExchange,
    link_s,
    measure,
    measure_in_turn,
    measure_link,
    summed,
)
from ..plan import CompressionPrice
from ..store.layout import lay_out
from .compressed import CompressedGradient, GroupLink, spans_of
from .group import MemberGroup

_SMALL = 16
"""Rows and columns of a tiny gradient: smaller than a message's overhead."""


class MadeUpGradients:
    """Synthetic gradients as large as a member's, to measure their exchange.

    Args:
        compressed: the member's own, which is not changed.
    """

    def __init__(self, compressed: CompressedGradient) -> None:
        self._own, self._due, self._copy = compressed, compressed.largest, compressed.anew()
        device = compressed.device
        self._source = torch.zeros(compressed.section.stop, dtype=torch.uint8, device=device)
        for run in spans_of(compressed.section):
            run.of(self._source).normal_(generator=torch.Generator(device).manual_seed(0))
        self._mean = self._source.clone()
        spans = compressed.spans(self._due)
        self._parts = [span.of(self._mean) for span in spans]
        self.plain = [AllReduce(part) for part in self._parts]

    def sum_as_they_are(self) -> list[Exchanging]:
        share = 1.0 / self._own.num_members
        return [summed(part.mul_(share)) for part in self._parts]

    def compress(self) -> list[Exchanging]:
        return self._copy.begin_all(self._source, 0.5, self._mean, self._due)

    def keep(self) -> None:
        self._copy.keep_fragment(self._due)

    def price(self) -> CompressionPrice:
        return self._priced(self._coding())

    def _coding(self) -> MeasuredExchange:
        return measure(self.compress, self.keep, self._own.num_members, self._own.device)

    def _priced(self, coding: MeasuredExchange) -> CompressionPrice:
        return CompressionPrice(
            compressor=str(self._own.compression),
            plain_bytes=self._own.plain_bytes,
            sent_bytes=self._own.sent_bytes,
            spent_s=coding.spent_s,
        )

    def price_on(
        self, link: MemberLink, cost: LinkCost, between: Callable[[], object]
    ) -> CompressionPrice:
        """Measure compressed and plain exchanges on a link; all members call it together.

        Args:
            cost: of its messages, the same in all members.
            between: called while a compressed gradient is in flight.
        """
        coding, size = self._coding(), self._own.num_members
        plain_s = link_s(self.plain, size, cost)
        if plain_s < QUICK_S:
            whole = GradientWay(self.sum_as_they_are)
            ways = (whole, GradientWay(self.compress, between, self.keep))
            about_s = plain_s + self._mean_of(coding.spent_s, link)
            plain_s, whole_s = measure_in_turn(ways, link, self._own.device, about_s)
            sent_s = max(0.0, whole_s - coding.spent_s)
        else:
            fixed = self._fixed(link, between)
            of_bytes = replace(cost, latency_s=0.0)
            plain_s = fixed.plain_s + link_s(self.plain, size, of_bytes)
            sent_s = fixed.sent_s + link_s(coding.operations, size, of_bytes)
        return replace(
            self._priced(coding),
            plain_s=plain_s,
            sent_s=sent_s,
            latency_s=cost.latency_s,
            bytes_per_s=1.0 / cost.s_per_byte if cost.s_per_byte else None,
        )

    def _mean_of(self, seconds: float, link: MemberLink) -> float:
        """Return the mean over all members, the same in each."""
        share = seconds / self._own.num_members
        mine = torch.tensor([share], dtype=torch.float32, device=self._own.device)
        return float(link.finish(link.begin(AllReduce(mine)))[0])

    def _fixed(self, link: MemberLink, between: Callable[[], object]) -> FixedCosts:
        """Measure as many operations with tiny gradients."""
        device = self._own.device
        small = [torch.zeros(_SMALL, _SMALL) for _ in self._parts]
        section = lay_out([(f"{i}", tensor) for i, tensor in enumerate(small)], [], []).parameters
        copy, source = self._own.anew(section), torch.ones(section.stop, dtype=torch.uint8)
        source, parts = source.to(device), [tensor.to(device) for tensor in small]
        ways = (
            GradientWay(lambda: [summed(part) for part in parts]),
            GradientWay(lambda: copy.begin_all(source, 0.5, source), between),
        )
        return FixedCosts(*measure_in_turn(ways, link, device))


def price_alone(compressed: CompressedGradient) -> CompressionPrice:
    """Measure what compression costs here without a link; takes half a second."""
    return MadeUpGradients(compressed).price()


def price_between(
    group: MemberGroup, compressed: CompressedGradient, *, line_bytes: int = 0
) -> CompressionPrice:
    """Measure what compression costs between these members; all measure together.

    If a member dies meanwhile, the price is that without a link.

    Args:
        line_bytes: bytes that each member shows all others beside a compressed gradient; plain
            gradients carry them along.
    """
    device, gradients = compressed.device, MadeUpGradients(compressed)
    line = torch.zeros(line_bytes, dtype=torch.uint8)
    lines = line.repeat(group.size)

    def show_lines() -> None:
        if line_bytes:
            group.all_gather(line, lines).wait()

    try:
        cost = measure_link(lambda tensor: group.all_reduce(tensor).wait(), group.size, device)
        return gradients.price_on(GroupLink(group), cost, show_lines)
    except RuntimeError:
        return gradients.price()
