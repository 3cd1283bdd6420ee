"""Where peers meet: a line of numbers that each member shows the others, and barriers.

    member 0   show | barrier | read all lines | ... | barrier
    member 1   show |         | read all lines | ... |

Only its own member writes a line, between barriers, so all read the same. Each member keeps the
finished rounds and reports them to the coordinator now and then, off the critical path. This module
must not know what is decided from the lines, nor gradients.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

from ..store.clip import UNCLIPPED, Clip, clip_conflict
from ..store.control import MET, Control
from ..wire.channel import Channel
from ..wire.messages import Entry, Rounds, Row
from .base import Clock, are_at_odds, conflict

_WAIT_S = 0.1
_PAIR = 2
"""With so many members, the one that waits has seen the other; with more a third may sleep."""
DIED: Final = 2
"""In ``Line.leaves``: a member died."""


class Line(NamedTuple):
    """What a member shows its peers about a push; all float64."""

    num_samples: float
    weight: float
    loss: float
    fault: float
    compute_s: float
    wait_s: float
    push_s: float
    input_s: float
    squared_norm: float
    """Of its share of the mean gradient; written after the others read the rest."""
    max_norm: float
    max_value: float
    hyper: float
    bad_version: float
    """The version at which its share of the mean was not finite; -1: none."""
    leaves: float
    """Not 0: it must leave for the coordinator; `DIED`: since a member died."""
    snapshot: float
    """Number of the last checkpoint that it was asked for."""
    stage: float = 0.0
    """Its stage in a step that all make together, see `Stage` (lockstep.py); 0: it pushes."""

    @property
    def clip(self) -> Clip:
        return Clip(self.max_norm, self.max_value)

    def entry(self, fault: int) -> Entry:
        """Return the report of this line to the coordinator, with this fault of its push."""
        return Entry(
            int(self.num_samples), self.loss, fault, self.weight,
            self.compute_s, self.wait_s, self.push_s, self.input_s, *self.clip,
        )  # fmt: skip


_NUM_FIELDS = len(Line._fields)
_SQUARED_NORM, _BAD_VERSION = (Line._fields.index(name) for name in ("squared_norm", "bad_version"))


class GivenUp(BaseException):
    """A member is gone, so nobody waits at this barrier any more."""


class Barrier:
    """The lines and barriers of one run, as its member at ``seat`` uses them.

    The last member at a barrier wakes all that sleep there: each sleeps once, however many there
    are. A member that does not sleep yet polls where the others are, and is not woken. Should the
    last one pass by in the instant in which another falls asleep, that one looks again by itself.

    Args:
        clock: the time at barriers is added to its ``wait_s``.
    """

    def __init__(self, control: Control, seat: int, clock: Clock) -> None:
        self._control = control
        self._seat = seat
        self._clock = clock
        self._phase = 0

    def begin(self, phase: int) -> None:
        """Set the number of barriers that all peers have passed."""
        self._phase = phase
        self._control[self._control.arrived[self._seat]] = phase

    def show(self, line: Line) -> None:
        """Write this member's line."""
        control, place = self._control, self._control.numbers[self._seat]
        for i, value in enumerate(line):
            control.set_double(place + i, value)

    def lines(self) -> list[Line]:
        """Return the lines of all seats."""
        doubles = self._control.doubles
        return [Line._make(doubles(place, _NUM_FIELDS)) for place in self._control.numbers]

    def show_norm(self, squared_norm: float) -> None:
        """Show the norm of this member's share of the mean gradient, before the next barrier."""
        self._set(_SQUARED_NORM, squared_norm)

    def show_bad(self, version: int) -> None:
        """Show that this member's share of the mean is not finite at this version."""
        self._set(_BAD_VERSION, float(version))

    def squared_norms(self) -> list[float]:
        return self._column(_SQUARED_NORM)

    def is_bad(self, version: int) -> bool:
        """Return whether any member's share is not finite at this version."""
        return float(version) in self._column(_BAD_VERSION)

    def arrive(self) -> int:
        """Reach the next barrier without waiting there; return its number."""
        self._phase += 1
        self._control[self._control.arrived[self._seat]] = self._phase
        if self._have_all_come():
            self._let_go()
        return self._phase

    def wait(self) -> None:
        """Wait until all have arrived as often as this member; raise GivenUp if one never will.

        Only a member that is gone is given up: its position is final, so all others give up at the
        same barrier.
        """
        control, phase = self._control, self.arrive()
        start = time.perf_counter()
        asleep = control.asleep[self._seat]
        while not control.wait_while(MET, self._is_early, _WAIT_S, asleep=asleep):
            are_gone = [control[word] for word in control.gone]  # read before their positions
            phases = [control[word] for word in control.arrived]
            if any(gone and at < phase for gone, at in zip(are_gone, phases, strict=True)):
                raise GivenUp
        if control.num_seats > _PAIR and control[MET] < phase:
            self._let_go()  # if two came last, neither may have seen the other
        self._clock.wait_s += time.perf_counter() - start

    def _let_go(self) -> None:
        control = self._control
        control[MET] = self._phase
        if any(control[word] for word in control.asleep):  # waking is a call of the system
            control.wake(MET)

    def _have_all_come(self) -> bool:
        control, phase = self._control, self._phase
        return all(control[index] >= phase for index in control.arrived)

    def _is_early(self, met: int) -> bool:
        return met < self._phase and not self._have_all_come()

    def _set(self, column: int, value: float) -> None:
        self._control.set_double(self._control.numbers[self._seat] + column, value)

    def _column(self, column: int) -> list[float]:
        control = self._control
        return [control.double(place + column) for place in control.numbers]


def check_settings(lines: Sequence[Line]) -> None:
    """Raise ConfigError if the optimizers of two members that pushed have different settings."""
    words = {seat: int(line.hyper) for seat, line in enumerate(lines) if line.weight}
    if len(set(words.values())) < 2:
        return
    for first, second in combinations(words, 2):
        if are_at_odds(words[first], words[second]):
            raise conflict(first, second)


def common_clip(lines: Sequence[Line]) -> Clip:
    """Return how the members that pushed clip their update.

    Raises:
        ConfigError: two of them clip differently.
    """
    clips = {seat: line.clip for seat, line in enumerate(lines) if line.weight}
    if not clips:
        return UNCLIPPED
    first, clip = next(iter(clips.items()))
    for seat, other_clip in clips.items():
        if other_clip != clip:
            raise clip_conflict(first, clip, seat, other_clip)
    return clip


_TELL_S = 0.2
_END_S = 1.0
"""How long the others wait for the first peer to report the last rounds."""
_KEPT_ROUNDS = 4096
_SENT_ENTRIES = 512
"""Entries in one message."""


class RoundsTold:
    """The rounds of one epoch, which the first peer reports to the coordinator.

    The others keep what it has not reported yet; if it dies, the next one reports that.

    Args:
        first_version: of the epoch.
        seats: of the members that report, in order, ``seat`` among them: all peers, where each
            sees how far the others have come.
    """

    def __init__(
        self,
        channel: Channel,
        control: Control,
        first_version: int,
        seats: Sequence[int],
        seat: int,
    ) -> None:
        self._channel, self._control = channel, control
        self._first_version, self._seats, self._seat = first_version, seats, seat
        self._first_told = control.told[seats[0]]
        self._rows: deque[tuple[int, Row]] = deque(maxlen=_KEPT_ROUNDS)
        self._next = 0
        self._tell_at_s = time.perf_counter() + _TELL_S

    def note(self, number: int, entries: list[Entry], snapshot: int) -> None:
        """Keep a round, and the checkpoint that is taken after it; report it when it is time."""
        now_s = time.perf_counter()
        self._rows.append((number, Row(now_s, tuple(entries), snapshot)))
        if self._seat != self._seats[0]:
            self._drop(self._control[self._first_told] - self._first_version)
        elif snapshot or now_s > self._tell_at_s:
            self._tell_at_s = now_s + _TELL_S
            self.tell()

    def tell(self) -> None:
        """Report all rounds since the last report, several in a message."""
        self._drop(self._next)
        rows = list(self._rows)
        size = max(1, _SENT_ENTRIES // len(rows[0][1].entries)) if rows else 1
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            self._channel.send(Rounds(part[0][0], tuple(row for _, row in part)))
        if rows:
            self._next = rows[-1][0] + 1
        self._control.set_and_wake(self._control.told[self._seat], self._first_version + self._next)

    def end(self, num_rounds: int) -> None:
        """See that all rounds are reported, by the first peer that gets to it."""
        control, until = self._control, self._first_version + num_rounds
        patience_s = time.perf_counter() + _END_S
        for seat in self._seats:
            if seat == self._seat:
                self.tell()
                return
            word, gone = control.told[seat], control.gone[seat]
            while not control.wait_while(word, lambda told: told < until, _WAIT_S):
                if control[gone] or time.perf_counter() > patience_s:
                    break  # the coordinator ignores what is reported twice
            else:
                return

    def _drop(self, number: int) -> None:
        """Drop the rounds before this one, which were reported."""
        while self._rows and self._rows[0][0] < number:
            self._rows.popleft()
