"""What a member's compressed gradient costs here, beside what it saves, before the first step.

    made-up gradients of the model's own size
        encode, decode                       without a link: spent
        whole | compressed | whole | ...     on a quick link, in turn: what both take
        next to nothing | next to nothing    on a slow one, with bytes by formula

All members measure together; how is in compression/price.py. This module must not know who asks, or
what the plan says of it.
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
"""Rows and columns of next to nothing: fewer than what a message takes anyhow."""


class MadeUpGradients:
    """As large as a member's, to measure what their exchange takes.

    Args:
        compressed: the member's own, which stays as it is.
    """

    def __init__(self, compressed: CompressedGradient) -> None:
        self._of, self._due, self._made = compressed, compressed.largest, compressed.anew()
        device = compressed.device
        self._source = torch.zeros(compressed.section.stop, dtype=torch.uint8, device=device)
        for run in spans_of(compressed.section):
            run.of(self._source).normal_(generator=torch.Generator(device).manual_seed(0))
        self._mean = self._source.clone()
        spans = compressed.spans(self._due)
        self._parts = [one.of(self._mean) for one in spans]
        self.plain = [AllReduce(one) for one in self._parts]

    def sum_as_they_are(self) -> list[Exchanging]:
        share = 1.0 / self._of.num_members
        return [summed(one.mul_(share)) for one in self._parts]

    def compress(self) -> list[Exchanging]:
        return self._made.begin_all(self._source, 0.5, self._mean, self._due)

    def keep(self) -> None:
        self._made.keep_fragment(self._due)

    def price(self) -> CompressionPrice:
        return self._priced(self._coding())

    def _coding(self) -> MeasuredExchange:
        return measure(self.compress, self.keep, self._of.num_members, self._of.device)

    def _priced(self, coding: MeasuredExchange) -> CompressionPrice:
        return CompressionPrice(
            compressor=str(self._of.compression),
            plain_bytes=self._of.plain_bytes,
            sent_bytes=self._of.sent_bytes,
            spent_s=coding.spent_s,
        )

    def price_on(
        self, link: MemberLink, cost: LinkCost, between: Callable[[], object]
    ) -> CompressionPrice:
        """What compressed and plain exchanges take on a link; all members call it together.

        Args:
            cost: of its messages, the same in all members.
            between: what is done while a compressed gradient is under way.
        """
        coding, size = self._coding(), self._of.num_members
        plain_s = link_s(self.plain, size, cost)
        if plain_s < QUICK_S:
            whole = GradientWay(self.sum_as_they_are)
            ways = (whole, GradientWay(self.compress, between, self.keep))
            about_s = plain_s + self._mean_of(coding.spent_s, link)
            plain_s, whole_s = measure_in_turn(ways, link, self._of.device, about_s)
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
        """Over all members, the same in each."""
        share = seconds / self._of.num_members
        mine = torch.tensor([share], dtype=torch.float32, device=self._of.device)
        return float(link.finish(link.begin(AllReduce(mine)))[0])

    def _fixed(self, link: MemberLink, between: Callable[[], object]) -> FixedCosts:
        """Of as many operations, with next to nothing in them."""
        device = self._of.device
        small = [torch.zeros(_SMALL, _SMALL) for _ in self._parts]
        section = lay_out([(f"{n}", one) for n, one in enumerate(small)], [], []).parameters
        made, source = self._of.anew(section), torch.ones(section.stop, dtype=torch.uint8)
        source, parts = source.to(device), [one.to(device) for one in small]
        ways = (
            GradientWay(lambda: [summed(one) for one in parts]),
            GradientWay(lambda: made.begin_all(source, 0.5, source), between),
        )
        return FixedCosts(*measure_in_turn(ways, link, device))


def price_alone(compressed: CompressedGradient) -> CompressionPrice:
    """What it costs here without a link; half a second."""
    return MadeUpGradients(compressed).price()


def price_between(
    group: MemberGroup, compressed: CompressedGradient, *, line_bytes: int = 0
) -> CompressionPrice:
    """What it costs between these members; all measure together.

    Where one of them has died meanwhile, and the run hears of it, the link is not known.

    Args:
        line_bytes: that each member shows all others beside a compressed gradient; without one
            they go along with it.
    """
    device, made_up = compressed.device, MadeUpGradients(compressed)
    mine = torch.zeros(line_bytes, dtype=torch.uint8)
    every = mine.repeat(group.size)

    def show_lines() -> None:
        if line_bytes:
            group.all_gather(mine, every).wait()

    try:
        cost = measure_link(lambda one: group.all_reduce(one).wait(), group.size, device)
        return made_up.price_on(GroupLink(group), cost, show_lines)
    except RuntimeError:
        return made_up.price()
