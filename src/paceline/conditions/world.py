"""All conditions of a run as one value: step times, absences, the cost of bytes.

    3=10s..60s      worker 3 is away from second 10 to second 60
    3=..10s         it starts 10 seconds late
    3=60s..         it leaves for good

    worker --push--> own link: bytes / rate --.
    worker --push--> own link: bytes / rate ---+--> server: one transfer after the other --> arrived
    worker --push--> own link: bytes / rate --'                  (separate for each direction)

A worker that returns is a new member of the run at the old seat. A transfer arrives one latency
after its last byte has passed both links; bytes of cancelled work are transferred all the same. It
must not know protocols or what the bytes are: given a worker and a start it answers with an end.

Source: store and forward with cut-through; the shared server is the hub of the alpha-beta model
(2(P-1) n beta at the hub), R. Rabenseifner, R. Thakur, "Optimization of Collective Communication
Operations in MPICH", 2005.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import ConfigError
from .delays import Delay, parse_seconds, parse_worker
from .machine import Cores, Machine, ServerQueue, places
from .slowness import PhasePace, Phases

_UNITS_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kbit": 125.0, "Mbit": 125e3,
                "Gbit": 125e6}  # fmt: skip
_MOST_BYTES = 1e200
"""Limit of a number in any unit: far above, its times would not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The bytes of an exchange, and the links that they pass.

    Args:
        num_bytes: bytes of a push; a pull has as many.
        latency_s: time from sending the last byte to its arrival.
        bytes_per_s: rate of each worker's own link; inf: no limit.
        server_bytes_per_s: rate of the server's link in each direction, shared; inf: no limit.
    """

    num_bytes: float
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    server_bytes_per_s: float = math.inf


class LinkQueue:
    """One direction of the server's link, and until when it is busy."""

    def __init__(self, link: Link) -> None:
        self._own_s = link.num_bytes / link.bytes_per_s
        self._server_s = link.num_bytes / link.server_bytes_per_s
        self._latency_s = link.latency_s
        self._is_free_s = 0.0

    def there_s(self, start_s: float) -> float:
        """Return when a transfer arrives that begins at ``start_s``; call it in order of time."""
        self._is_free_s = max(start_s, self._is_free_s) + self._server_s
        return max(start_s + self._own_s, self._is_free_s) + self._latency_s


def parse_link(link: str | None, server: str | None, num_bytes: float | None) -> Link | None:
    """Return the link that ``1ms,100MB/s`` and a server's ``1GB/s`` describe; None: no link.

    Raises:
        ConfigError: a time or a rate is invalid, or there is a rate, but no number of bytes.
    """
    if link is None and server is None:
        return None
    latency, comma, rate = (link or "0s").partition(",")
    latency_s = parse_seconds(latency, link or "", "link")
    own_bytes_per_s = _bytes_per_s(rate, link or "", "link") if comma else math.inf
    server_bytes_per_s = math.inf if server is None else _bytes_per_s(server, server, "server")
    if num_bytes is None and min(own_bytes_per_s, server_bytes_per_s) < math.inf:
        raise ConfigError("a link with a rate needs the bytes of a push: give --bytes, as in 500kB")
    return Link(
        num_bytes=num_bytes or 0.0,
        latency_s=latency_s,
        bytes_per_s=own_bytes_per_s,
        server_bytes_per_s=server_bytes_per_s,
    )


def parse_bytes(text: str, setting: str = "bytes") -> float:
    """Return ``500kB`` as a number of bytes. ConfigError: it is none, or is not finite."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]*)", text.replace(" ", ""))
    if match is None or match[2] not in _UNITS_BYTES or not float(match[1]) < _MOST_BYTES:
        raise ConfigError(
            f"{setting}: {text!r} is not a number of bytes; write it as in 500kB, with one of "
            f"{', '.join(_UNITS_BYTES)}"
        )
    return float(match[1]) * _UNITS_BYTES[match[2]]


def _bytes_per_s(rate: str, text: str, setting: str) -> float:
    amount, slash, unit = rate.partition("/")
    if not slash or unit != "s":
        raise ConfigError(f"{setting} {text!r}: {rate!r} is not a rate; write it as in 100MB/s")
    per_s = parse_bytes(amount, setting)
    if per_s == 0:
        raise ConfigError(f"{setting} {text!r}: a rate must be > 0, got {rate!r}")
    return per_s


Finisher = Callable[[float], float]
"""Returns the end of a step that begins at this time; each call draws a worker's next step."""


_SHORTEST_S, _LONGEST_S = 1e-12, 1e12
"""Limits of a mean step: beyond them, sums of times lose the time of one step to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """``worker`` is away from ``from_s`` until ``until_s`` (inf: for good)."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of one run's workers.

    Args:
        delays: the time X of a step, by worker; with a machine, the time besides the machine's.
        slow: how many times longer a worker takes, always.
        phases: slow phases that come and go, by worker.
        absences: times at which workers are away.
        link: cost of a push and a pull; None: no cost.
        machine: time of computing and exchange; None: no time besides the delays.
        seed: seed of all draws. Worker w draws its steps from ``Random(f"{seed}/{w}")``, as in a
            live run, so both have the same stragglers: ticket n of w has its n-th draw.
    """

    delays: tuple[Delay, ...]
    slow: dict[int, float] = field(default_factory=dict)
    phases: dict[int, Phases] = field(default_factory=dict)
    absences: tuple[Absence, ...] = ()
    link: Link | None = None
    machine: Machine | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for worker, delay in enumerate(self.delays):
            mean_s = self.mean_step_s(worker)
            if mean_s and not _SHORTEST_S <= mean_s <= _LONGEST_S:
                raise ConfigError(
                    f"a step of worker {worker} takes {mean_s:.3g} s on average ({delay.text}): "
                    f"it must take from {_SHORTEST_S:g} to {_LONGEST_S:g} s"
                )
            if not mean_s:
                raise ConfigError(
                    f"a step of worker {worker} takes no time ({delay.text}), so a simulation "
                    "cannot order its steps; give it a delay, as in --delay exp:20ms"
                )

    @property
    def num_workers(self) -> int:
        return len(self.delays)

    @property
    def is_alike(self) -> bool:
        """Whether all workers are alike and present all the time, and bytes cost nothing."""
        is_steady = not (self.slow or self.phases or self.absences or self.link or self.machine)
        return is_steady and len(set(self.delays)) == 1

    @property
    def is_plain(self) -> bool:
        """Whether steps take the time drawn, all workers are present, and no two steps end at once.

        Workers may be slow by a constant factor.
        """
        is_steady = not (self.phases or self.absences or self.link or self.machine)
        return is_steady and all(delay.has_density for delay in set(self.delays))

    def mean_step_s(self, worker: int) -> float:
        """Return E[X] of a worker in the long run, with its factor and its phases."""
        mean_s, machine = self.delays[worker].mean_s, self.machine
        if machine is not None:
            mean_s += machine.work[worker].mean_s
        mean_s *= self.slow.get(worker, 1.0)
        if worker in self.phases:
            mean_s /= self.phases[worker].pace
        return mean_s if machine is None else mean_s + machine.exchange[worker].mean_s

    def finisher(self, worker: int) -> Finisher:
        """Return a new sequence of this worker's steps, if there is no machine."""
        draw = self._drawer(worker)
        if worker not in self.slow and worker not in self.phases:
            return lambda start_s: start_s + draw()
        stretch = self._stretcher(worker)
        return lambda start_s: stretch(start_s, draw())

    def step_drawer(self, worker: int) -> Callable[[], float]:
        """Return a new sequence of this worker's step times, if the conditions are plain."""
        draw, factor = self._drawer(worker), self.slow.get(worker, 1.0)
        return draw if factor == 1.0 else lambda: draw() * factor

    def server_queues(self) -> list[ServerQueue] | None:
        """Return each worker's new sequence of times on the machine; None: there is no machine."""
        machine = self.machine
        if machine is None:
            return None
        queues = []
        for worker in range(self.num_workers):
            # A separate generator, so that the injected delays are those of a live run.
            rng = random.Random(f"{self.seed}/{worker}/machine")
            draws = (
                machine.exchange[worker].drawer(rng),
                machine.work[worker].drawer(rng),
                self._drawer(worker),
            )
            queues.append(ServerQueue(draws, self._stretcher(worker)))
        return queues

    def cores(self) -> Cores | None:
        """Return the cores that workers share; None: each has its own."""
        machine = self.machine
        if machine is None or machine.cores is None:
            return None
        num_places = places(machine.cores, machine.threads)
        return None if num_places >= self.num_workers else Cores(num_places)

    def _drawer(self, worker: int) -> Callable[[], float]:
        return self.delays[worker].drawer(random.Random(f"{self.seed}/{worker}"))

    def _stretcher(self, worker: int) -> Callable[[float, float], float]:
        """Return the function that gives the end of what begins then, with the worker's slowness.

        Its arguments are the begin and the seconds that it takes at full speed.
        """
        factor = self.slow.get(worker, 1.0)
        if worker in self.phases:
            rng = random.Random(f"{self.seed}/{worker}/phases")
            pace = PhasePace(self.phases[worker], rng)
            return lambda start_s, seconds: pace.finish_s(start_s, seconds * factor)
        return lambda start_s, seconds: start_s + seconds * factor


def parse_absences(values: Sequence[str], num_workers: int) -> tuple[Absence, ...]:
    """Return the absences in the order of workers and of time.

    Raises:
        ConfigError: a value has another form, names no worker of the run, or overlaps with another.

    Example:
        >>> parse_absences(["1=5s..8s"], num_workers=2)
        (Absence(worker=1, from_s=5.0, until_s=8.0),)
    """
    absences = [_absence(value, num_workers) for value in values]
    absences.sort(key=lambda absence: (absence.worker, absence.from_s))
    for before, after in pairwise(absences):
        if before.worker == after.worker and before.until_s >= after.from_s:
            raise ConfigError(
                f"away: worker {before.worker} is away from {before.from_s:g}s to "
                f"{before.until_s:g}s and again from {after.from_s:g}s; leave time between them"
            )
    return tuple(absences)


def _absence(value: str, num_workers: int) -> Absence:
    head, _, span = value.replace(" ", "").partition("=")
    first, dots, last = span.partition("..")
    if not dots or not (first or last):
        raise ConfigError(
            f"away must read WORKER=FROM..UNTIL, got {value!r}; 3=10s..60s, 3=..10s (starts late) "
            "or 3=60s.. (for good)"
        )
    absence = Absence(
        worker=parse_worker(head, value, "away", num_workers),
        from_s=parse_seconds(first, value, "away") if first else 0.0,
        until_s=parse_seconds(last, value, "away") if last else math.inf,
    )
    if absence.from_s >= absence.until_s:
        raise ConfigError(f"away {value!r}: it ends before it begins; write the earlier time first")
    return absence
