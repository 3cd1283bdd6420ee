"""A mean that is merged later (own_changes.py), computed while the next steps are made.

    steps        2 | 3 . 4 . 5 . 6 |        steps 3 and 4 continue on this member's own weights
    all-reduce     [ of 2 ]                 begun at the boundary, waited for when it is merged
    compressed     [ swap ][ gather ]       the second operation begins halfway
                                   ^        or earlier, at a checkpoint or an epoch's end

All members begin the operations of a mean in the same order, and no others in between. This module
must not know what is done with it.
"""

from torch import Tensor

from ..compression.base import UnderWay
from ..compression.price import summed
from ..store.fragments import Fragment
from ..store.layout import Section
from .compressed import CompressedGradient, GroupLink
from .group import MemberGroup


class LateMean:
    """Computes one mean at a time.

    Args:
        section: of the parameters.
        mean: the block that holds this member's part, and in the end the mean.
        compressed: compresses it; None: it is sent as it is.
    """

    def __init__(
        self,
        group: MemberGroup,
        section: Section,
        mean: Tensor,
        compressed: CompressedGradient | None,
    ) -> None:
        self._section, self._mean, self._compressed = section, mean, compressed
        self._under_way = UnderWay(GroupLink(group))
        self._due: Fragment | None = None

    def begin(self, due: Fragment, weight: float) -> None:
        """Begin the mean of the fragment ``due``.

        Args:
            weight: of this member's part; 0: it has none.

        Raises:
            RuntimeError: a member is gone; ``go_on`` and ``finish`` raise it too.
        """
        self._due = due
        if self._compressed is not None:
            for exchanging in self._compressed.begin_all(self._mean, weight, self._mean, due):
                self._under_way.begin(exchanging)
            return
        for dtype, start, stop in due.runs(self._section):
            part = self._mean[start:stop].view(dtype)
            self._under_way.begin(summed(part.mul_(weight) if weight else part.zero_()))

    def go_on(self) -> None:
        """Begin the second operation, if there is one."""
        if self._compressed is not None:
            self._under_way.go_on()

    def finish(self) -> Fragment | None:
        """Wait for the mean; return its fragment, or None if none was in flight."""
        due, self._due = self._due, None
        self._under_way.finish()
        return due
