"""An evaluation shared among members: who has which range, and what came of it.

Each position is counted once; a dead member's range goes to another. Totals are summed in the
order of positions, so they do not depend on who was faster. Pure: no messages, no clock.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import ConfigError
from ..sessions.census import ranges_of
from ..wire.messages import Totals


class CensusBook:
    """The ranges of one evaluation.

    Args:
        num_samples: positions 0..num_samples.
        batch_size: positions a range.
        ends: where ranges end that are not all of one size.
        seat_of: member -> the worker's number, for what is said.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        ends: Sequence[int] | None = None,
        *,
        seat_of: Callable[[int], int] = int,
    ) -> None:
        self.num_samples = num_samples
        self._seat_of = seat_of
        self._free = deque(ranges_of(num_samples, batch_size, ends))
        self._held: dict[int, tuple[int, int]] = {}
        self._counted: dict[int, Totals] = {}
        self._names: dict[int, set[frozenset[str]]] = {}
        """Per member: what each of its ranges was measured by."""
        self._num_ranges = len(self._free)
        self.waiting: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self._counted) == self._num_ranges

    def take(self, member: int) -> tuple[int, int] | None:
        """The next range for ``member``; None when none is free."""
        if not self._free:
            return None
        self._held[member] = self._free.popleft()
        return self._held[member]

    def counted(self, member: int, start: int, totals: Totals) -> None:
        """A range is done.

        Raises:
            ConfigError: members measure by different names, so that totals would be of a part.
        """
        self._held.pop(member, None)
        self._counted[start] = totals
        self._names.setdefault(member, set()).add(frozenset(totals))
        self._refuse_other_names(member)

    def _refuse_other_names(self, member: int) -> None:
        """Names may follow from the data (one a class): then they differ within a member, too."""
        if len(self._names[member]) > 1:
            return
        (own,) = self._names[member]
        for other, names in self._names.items():
            if len(names) == 1 and own not in names:
                (theirs,) = names
                raise ConfigError(
                    f"workers evaluate by different names: {_listed(theirs - own)} in worker "
                    f"{self._seat_of(other)}, {_listed(own - theirs)} in worker "
                    f"{self._seat_of(member)}; totals would be over a "
                    "part of the data: give the same names in every worker, (0.0, 0) where there "
                    "is nothing to count"
                )

    def left(self, member: int) -> None:
        """What a dead member held is free again."""
        held = self._held.pop(member, None)
        if held is not None:
            self._free.appendleft(held)
        if member in self.waiting:
            self.waiting.remove(member)

    def totals(self) -> Totals:
        sums: Totals = {}
        for start in sorted(self._counted):
            for name, (value, count) in self._counted[start].items():
                old = sums.get(name, (0.0, 0.0))
                sums[name] = (old[0] + value, old[1] + count)
        return sums


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing more"
