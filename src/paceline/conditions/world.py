"""All that a run is put through, as one value: who takes how long, who is away, what bytes cost.

    3=10s..60s      worker 3 is away from second 10 to second 60
    3=..10s         it starts 10 seconds late
    3=60s..         it leaves for good

    worker --push--> own link: bytes / rate --.
    worker --push--> own link: bytes / rate ---+--> server: one transfer after the other --> there
    worker --push--> own link: bytes / rate --'                  (each way by itself)

Who returns is a new member of the run at the old seat. A transfer is there when its last byte has
passed both links, and a latency later; who is called off has its bytes on the way all the same. It
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes an exchange, and what they pass through.

    Args:
        num_bytes: of a push; a pull has as many.
        latency_s: from the last byte sent to the last one there.
        bytes_per_s: of each worker's own link; inf: no limit.
        server_bytes_per_s: of the server's link, each way, shared by all; inf: no limit.
    """

    num_bytes: float
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    server_bytes_per_s: float = math.inf


class LinkQueue:
    """One way of the server's link: remembers until when it is taken."""

    def __init__(self, link: Link) -> None:
        self._own_s = link.num_bytes / link.bytes_per_s
        self._server_s = link.num_bytes / link.server_bytes_per_s
        self._latency_s = link.latency_s
        self._is_free_s = 0.0

    def there_s(self, start_s: float) -> float:
        """When a transfer is there that begins now; asked in the order of time."""
        self._is_free_s = max(start_s, self._is_free_s) + self._server_s
        return max(start_s + self._own_s, self._is_free_s) + self._latency_s


def parse_link(link: str | None, server: str | None, num_bytes: float | None) -> Link | None:
    """The link that ``1ms,100MB/s`` and a server's ``1GB/s`` describe; None where nothing costs.

    Raises:
        ConfigError: no time or no rate; or a rate without bytes to move, or bytes without one.
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
    """``500kB`` as a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]*)", text.replace(" ", ""))
    if match is None or match[2] not in _UNITS_BYTES:
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
"""When a step is done that begins at this time; each call draws the next step of one worker."""


_SHORTEST_S, _LONGEST_S = 1e-12, 1e12
"""Of a mean step: beyond, sums of times lose what one step adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """``worker`` is not there from ``from_s`` until ``until_s`` (inf: for good)."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What the workers of one run are put through.

    Args:
        delays: the time X of a step, by worker; with a machine, what it takes beside the machine's.
        slow: how many times longer a worker takes, always.
        phases: slow phases that come and go, by worker.
        absences: who is away when.
        link: what a push and a pull cost; None: nothing.
        machine: what computing and exchange take; None: nothing beside the delays.
        seed: of all draws. Worker w draws its steps from ``Random(f"{seed}/{w}")``, as it does in
            a live run, so both see the same stragglers: ticket n of w has its n-th draw.
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
                    f"a step of worker {worker} takes {mean_s:.3g} s in the mean ({delay.text}): "
                    f"wanted is from {_SHORTEST_S:g} to {_LONGEST_S:g} s"
                )
            if not mean_s:
                raise ConfigError(
                    f"a step of worker {worker} takes no time ({delay.text}): nothing would ever "
                    "come first; give it a delay, as in --delay exp:20ms"
                )

    @property
    def num_workers(self) -> int:
        return len(self.delays)

    @property
    def is_alike(self) -> bool:
        """Whether all workers are alike, there all the time, and bytes cost nothing."""
        is_steady = not (self.slow or self.phases or self.absences or self.link or self.machine)
        return is_steady and len(set(self.delays)) == 1

    @property
    def is_plain(self) -> bool:
        """Whether steps take what was drawn, all are there, and no two end at one moment."""
        is_steady = not (self.phases or self.absences or self.link or self.machine)
        return is_steady and all(delay.has_density for delay in set(self.delays))

    def mean_step_s(self, worker: int) -> float:
        """E[X] of a worker in the long run, its factor and its phases included."""
        mean_s, machine = self.delays[worker].mean_s, self.machine
        if machine is not None:
            mean_s += machine.work[worker].mean_s
        mean_s *= self.slow.get(worker, 1.0)
        if worker in self.phases:
            mean_s /= self.phases[worker].pace
        return mean_s if machine is None else mean_s + machine.exchange[worker].mean_s

    def finisher(self, worker: int) -> Finisher:
        """A fresh sequence of this worker's steps, where there is no machine."""
        draw = self._drawer(worker)
        if worker not in self.slow and worker not in self.phases:
            return lambda start_s: start_s + draw()
        stretch = self._stretcher(worker)
        return lambda start_s: stretch(start_s, draw())

    def step_drawer(self, worker: int) -> Callable[[], float]:
        """A fresh sequence of how long this worker's steps take, where conditions are plain."""
        draw, factor = self._drawer(worker), self.slow.get(worker, 1.0)
        return draw if factor == 1.0 else lambda: draw() * factor

    def server_queues(self) -> list[ServerQueue] | None:
        """Where each worker computes: fresh sequences of all they do; None without a machine."""
        machine = self.machine
        if machine is None:
            return None
        queues = []
        for worker in range(self.num_workers):
            # A stream of its own, so that the ordered delays are those of a live run.
            rng = random.Random(f"{self.seed}/{worker}/machine")
            draws = (
                machine.exchange[worker].drawer(rng),
                machine.work[worker].drawer(rng),
                self._drawer(worker),
            )
            queues.append(ServerQueue(draws, self._stretcher(worker)))
        return queues

    def cores(self) -> Cores | None:
        """The cores that workers share; None: each has its own."""
        machine = self.machine
        if machine is None or machine.cores is None:
            return None
        num_places = places(machine.cores, machine.threads)
        return None if num_places >= self.num_workers else Cores(num_places)

    def _drawer(self, worker: int) -> Callable[[], float]:
        return self.delays[worker].drawer(random.Random(f"{self.seed}/{worker}"))

    def _stretcher(self, worker: int) -> Callable[[float, float], float]:
        """When something is done that begins then and takes so long where nothing is slow."""
        factor = self.slow.get(worker, 1.0)
        if worker in self.phases:
            rng = random.Random(f"{self.seed}/{worker}/phases")
            pace = PhasePace(self.phases[worker], rng)
            return lambda start_s, seconds: pace.finish_s(start_s, seconds * factor)
        return lambda start_s, seconds: start_s + seconds * factor


def parse_absences(values: Sequence[str], num_workers: int) -> tuple[Absence, ...]:
    """Who is away when, in the order of the workers and of time.

    Raises:
        ConfigError: not of this form, for no worker of the run, or two of one worker overlap.

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
