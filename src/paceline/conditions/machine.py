"""What a machine takes beside the delays that are ordered: the exchange, the computing, its cores.

    granted --apply--> ... --a core is free--> exchange, work --ordered delay--> the push is there
       |  only after an update: the new       |  holds the core               |  holds none
       |  version has to be written first     |

    pushed --add--> ... --apply--> the version is there       the sum is one: who pushes at the same
       |   unless it is the only push of its update           time adds one after the other

Workers that share cores take them in the order in which they are granted, and keep one until the
mini-batch is computed: steps are shorter than, or about as long as, what a scheduler lets a process
run at a time. A worker that is called off gives its core back. It must not know protocols, nor
where the numbers were measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .delays import Delay

Draw = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured on a machine, or is assumed of one.

    Args:
        text: where it is from, for people.
        work: computing of a mini-batch, by worker.
        exchange: what a worker needs beside it from a grant to the next push, by worker.
        add_s: seconds that adding a push to the sum of its update takes.
        apply_s: seconds from there until the update's new version can be pulled.
        cores: that the workers share; None: one each.
    """

    text: str
    work: tuple[Delay, ...]
    exchange: tuple[Delay, ...]
    add_s: float = 0.0
    apply_s: float = 0.0
    cores: int | None = None


class Sum:
    """Where the pushes of an update are added, one after the other, and the version written.

    Args:
        add_s, apply_s: what each takes.
    """

    def __init__(self, add_s: float, apply_s: float) -> None:
        self._add_s, self._apply_s = add_s, apply_s
        self._free_s = 0.0
        self._pushed_s: list[float] = []  # and not added yet, as far as was asked
        self._is_empty = True

    def push(self, at_s: float) -> None:
        """A push is there."""
        if self._add_s:
            self._pushed_s.append(at_s)

    def refuse(self) -> None:
        """The last push is not used: it is not added."""
        if self._pushed_s:
            self._pushed_s.pop()

    def ready_s(self, at_s: float, *, is_updated: bool) -> float:
        """When those can begin who are granted now; ``is_updated``: with a version only now made.

        An update of one push alone is made from that push: nothing is added.
        """
        pushed_s, self._pushed_s = self._pushed_s, []
        if len(pushed_s) > 1 or not (is_updated and self._is_empty):
            for one_s in pushed_s:
                self._free_s = max(self._free_s, one_s) + self._add_s
        if is_updated:
            self._free_s = max(self._free_s, at_s) + self._apply_s
        self._is_empty = is_updated or (self._is_empty and not pushed_s)
        return max(at_s, self._free_s) if pushed_s or is_updated else at_s


class Hold(NamedTuple):
    """A core that somebody has."""

    core: int
    from_s: float
    until_s: float


class Cores:
    """When each core is free again.

    Args:
        num_cores: how many there are.
    """

    def __init__(self, num_cores: int) -> None:
        self._free_s = [0.0] * num_cores

    def take(self, at_s: float, busy_s: float) -> Hold:
        """The core that is free first, for so long."""
        free_s = self._free_s
        core = min(range(len(free_s)), key=free_s.__getitem__)
        from_s = max(at_s, free_s[core])
        free_s[core] = from_s + busy_s
        return Hold(core, from_s, free_s[core])

    def give_back(self, hold: Hold, at_s: float) -> None:
        """It is not needed any longer; free from now on, unless somebody waits for its end."""
        if at_s < hold.until_s == self._free_s[hold.core]:
            self._free_s[hold.core] = max(at_s, hold.from_s)


class Desk:
    """One worker at the machine: holds a core while it computes, and then waits out its delay.

    Args:
        draws: seconds of an exchange, of computing a mini-batch, of its ordered delay.
        stretch: when something is done that begins then and takes so long at full speed.
        cores: shared with others, or its own.
    """

    def __init__(
        self,
        draws: tuple[Draw, Draw, Draw],
        stretch: Callable[[float, float], float],
        cores: Cores,
    ) -> None:
        self._exchange, self._work, self._delay = draws
        self._stretch = stretch
        self._cores = cores
        self._hold = Hold(0, 0.0, 0.0)

    def begin(self, at_s: float, num_steps: int) -> tuple[float, float]:
        """Go to work: when the computing begins, and when the last mini-batch's delay is over."""
        exchange_s = self._exchange()
        work_s = [self._work() for _ in range(num_steps)]
        self._hold = self._cores.take(at_s, exchange_s + sum(work_s))
        begun_s = done_s = self._hold.from_s + exchange_s
        for one_s in work_s:
            done_s = self._stretch(done_s, one_s + self._delay())
        return begun_s, done_s

    def leave(self, at_s: float) -> None:
        """Called off."""
        self._cores.give_back(self._hold, at_s)
