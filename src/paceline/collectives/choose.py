"""Chooses the fastest collective for a buffer between given ranks, and says why it is the fastest.

    seconds
      |  tree \\                  .  ring           small buffers: the fewest rounds win
      |        `-------.    .---'                  large ones: the fewest bytes
      |  ring  ---------\\.-'                       in between, one takes over from the other:
      |              .--' `--- tree                a crossover
      +------------------|---------------- bytes

Between identical ranks (a `LinkCost`) the closed formulas answer within microseconds; on a
`Topology` the schedules are run in virtual time. A collective that does not work for this many
ranks is no candidate, and the straggler-aware one is a candidate only if a rank is known to be
late. An estimate is only as good as its latencies and bandwidths, so measure them on the machine.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from ..plan import format_bytes
from . import COLLECTIVES, parse
from .base import Collective, LinkCost
from .cost import cost_between_equals, cost_on
from .ring_search import MOST_RANKS, planned_rings
from .topology import Topology
from .transfers import Operation

SMALLEST_BYTES, LARGEST_BYTES = 1 << 8, 1 << 30
"""The sizes between which crossovers are searched for."""
_ROUNDING = 1e-9
Seconds = Callable[[Collective, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The size at which one collective takes over from another."""

    size_bytes: int
    below: str
    above: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """The fastest collective, and the seconds that the others would take."""

    collective: Collective
    seconds: float
    reason: str  # one sentence
    seconds_of: dict[str, float]  # every candidate, fastest first
    crossovers: tuple[Crossover, ...]

    @property
    def name(self) -> str:
        """The collective as the command line spells it, if it is in the table."""
        return str(self.collective)


def choose(
    size_bytes: int,
    num_ranks: int,
    links: LinkCost | Topology,
    *,
    names: Iterable[str] | None = None,
    late: int | None = None,
    late_s: float = 0.0,
) -> CollectiveChoice:
    """Choose the fastest all-reduce.

    Args:
        size_bytes: of the buffer.
        links: what a message costs between any two ranks, or the topology between them.
        names: the candidates as the command line spells them; by default all that fit, and on a
            topology of at most eight ranks also the rings that a search finds in it.
        late: the rank that is known to come late, if any. Times count from when the others are
            ready.
        late_s: how late it is.

    Raises:
        ConfigError: a name is unknown or does not fit the number of ranks, or the topology has
            another number of ranks.
    """
    if isinstance(links, Topology) and links.num_ranks != num_ranks:
        raise ConfigError(f"{links.name} has {links.num_ranks} ranks, but {num_ranks} take part")
    if late is not None and not 0 <= late < num_ranks:
        raise ConfigError(f"rank {late} is late, but ranks are 0 to {num_ranks - 1}")
    members = [parse(name, num_ranks) for name in names or candidates(num_ranks, late)]
    if isinstance(links, Topology) and names is None and 2 <= num_ranks <= MOST_RANKS:
        members.append(planned_rings(links))
    ready_s = [late_s if rank == late else 0.0 for rank in range(num_ranks)]

    def seconds(member: Collective, size: int) -> float:
        if isinstance(links, Topology):
            return cost_on(links, member, Operation.ALL_REDUCE, size, ready_s=ready_s).seconds
        if late is not None:
            return cost_between_equals(
                member, Operation.ALL_REDUCE, size, links, ready_s=ready_s
            ).seconds
        return member.formula_s(Operation.ALL_REDUCE, size, links)

    best = _fastest(members, size_bytes, seconds)
    seconds_of = {str(member): seconds(member, size_bytes) for member in members}
    ranking = dict(sorted(seconds_of.items(), key=lambda pair: (pair[0] != str(best), pair[1])))
    return CollectiveChoice(
        collective=best,
        seconds=ranking[str(best)],
        reason=_reason(
            ranking, size_bytes, num_ranks, seconds(best.for_size(size_bytes), 0), max(ready_s)
        ),
        seconds_of=ranking,
        crossovers=tuple(_crossovers(members, seconds)),
    )


def candidates(num_ranks: int, late: int | None = None) -> list[str]:
    """Return all collectives that fit this many ranks, as the command line spells them.

    Example:
        >>> candidates(4)[-2:]
        ['bine', 'hierarchical:2']
    """
    names = [name for name, kind in COLLECTIVES.items() if not _needs_number(kind)]
    sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]
    names += [f"hierarchical:{size}" for size in sizes]
    return names if late is None else [*names, f"straggler-aware:{late}"]


def _needs_number(kind: type[Collective]) -> bool:
    return kind.argument is not None and kind.argument.default is None


def _fastest(members: list[Collective], size_bytes: int, seconds: Seconds) -> Collective:
    """Return the fastest member; of equally fast ones the first in the order of the table."""
    times_s = [seconds(member, size_bytes) for member in members]
    least_s = min(times_s) * (1.0 + _ROUNDING)
    return next(member for member, s in zip(members, times_s, strict=True) if s <= least_s)


def _crossovers(members: list[Collective], seconds: Seconds) -> Iterable[Crossover]:
    """Yield the sizes at which the fastest changes: between powers of two, then by bisection."""

    def fastest(size: int) -> str:
        return str(_fastest(members, size, seconds))

    low, winner = SMALLEST_BYTES, fastest(SMALLEST_BYTES)
    while low < LARGEST_BYTES:
        high, next_winner = 2 * low, fastest(2 * low)
        if next_winner != winner:
            begin, end = low, high
            while end - begin > max(1, begin // 100):
                middle = (begin + end) // 2
                if fastest(middle) == winner:
                    begin = middle
                else:
                    end, next_winner = middle, fastest(middle)
            yield Crossover(size_bytes=end, below=winner, above=next_winner)
            low, winner = end, next_winner
        else:
            low = high


def _reason(
    ranking: dict[str, float], size_bytes: int, num_ranks: int, fixed_s: float, late_s: float
) -> str:
    """One sentence: the time of the fastest, the largest part of it, and the time of the second."""
    (name, best_s), *others = ranking.items()
    buffer = f"{format_bytes(size_bytes)} between {num_ranks} ranks"
    if not best_s:
        return f"{name}: {buffer} take no time"
    waited_s = min(late_s, fixed_s)
    parts = {
        "waiting for the late rank": waited_s,
        "latency": fixed_s - waited_s,
        "bytes": best_s - fixed_s,
    }
    largest, largest_s = max(parts.items(), key=lambda pair: pair[1])
    share = f"{largest_s / best_s:.0%} of it {largest}"
    sentence = f"{name} takes {_format_s(best_s)} for {buffer}, {share}"
    if not others:
        return f"{sentence}; there is no other candidate"
    second, second_s = others[0]
    return f"{sentence}; the next, {second}, would take {_format_s(second_s)}"


def _format_s(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
