"""Injected faults as data: which worker dies, stops or slows down, and when.

    kill worker 1 at update 100                 SIGKILL, as by the kernel: nothing is cleaned up
    stop worker 2 at step 50 for 5s             SIGSTOP, and SIGCONT after five seconds
    slow worker 3 at 10s for 10s by 10x         steps take ten times as long for ten seconds
    raise in worker 0 at update 20              an exception in the middle of its step
    drop push of worker 1 at update 30          its push is lost on the way
    delay push of worker 1 at update 30 by 1s   its push arrives a second late
    kill launcher at update 60                  the parent process of all others
    fill disk at 5s for 2s                      nothing can be written
    corrupt trace.jsonl at update 40            a byte of a file in the run's folder is flipped

When: ``update N``, at the worker's first step on parameters of version N or later; ``step N``, at
its own N-th step, from 1; ``10s``, at this time after the first epoch has opened. A fault in a
worker's step happens after its gradient is computed and before it is pushed. The simulated, inline
and local engines use the same plan, and each fault happens once, even if its worker is replaced.
It must not know how a fault is carried out.
"""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .delays import parse_seconds, parse_worker


class Kind(enum.Enum):
    """The kind of a fault; the value is its form as text."""

    KILL = "kill worker W at WHEN"
    STOP = "stop worker W at WHEN for TIME"
    SLOW = "slow worker W at WHEN for TIME by FACTORx"
    RAISE = "raise in worker W at WHEN"
    DROP = "drop push of worker W at WHEN"
    DELAY = "delay push of worker W at WHEN by TIME"
    KILL_LAUNCHER = "kill launcher at WHEN"
    FILL_DISK = "fill disk at WHEN for TIME"
    CORRUPT = "corrupt FILE at WHEN"

    @property
    def is_of_worker(self) -> bool:
        """Whether it happens to one worker, not to the machine."""
        return " worker W " in self.value


_PATTERNS = {
    "W": r"(?P<worker>\S+)",
    "WHEN": r"(?P<when>update \S+|step \S+|\S+)",
    "FACTORx": r"(?P<factor>\S+)x",
    "FILE": r"(?P<file>\S+)",
}
_EXAMPLE = "kill worker 1 at update 100"
_FROM_OUTSIDE = (Kind.KILL, Kind.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; exactly one of ``update``, ``step`` and ``at_s`` says when.

    Attributes:
        worker: the worker it happens to; None: the machine.
        update: at the worker's first step on this version (or once the run has it), from 0.
        step: at this step of the worker, from 1.
        at_s: seconds after the first epoch has opened.
        for_s: duration of a stop, a slow phase or a full disk; delay of a push.
        factor: how many times longer a step takes.
        file: path in the run's folder.
    """

    kind: Kind
    worker: int | None = None
    update: int | None = None
    step: int | None = None
    at_s: float | None = None
    for_s: float = 0.0
    factor: float = 1.0
    file: str = ""

    def __post_init__(self) -> None:
        if sum(moment is not None for moment in (self.update, self.step, self.at_s)) != 1:
            raise ConfigError(f"a fault has one time: an update, a step or seconds, got {self!r}")
        if (self.worker is None) == self.kind.is_of_worker:
            raise ConfigError(f"{self.kind.value!r}: the worker is missing, or must be left out")
        if self.worker is None and self.step is not None:
            raise ConfigError(f"{self.kind.value!r}: only a worker has steps; name an update")

    def __str__(self) -> str:
        if self.update is not None:
            when = f"update {self.update}"
        else:
            when = f"step {self.step}" if self.at_s is None else f"{self.at_s:.12g}s"
        words = {
            "W": str(self.worker), "WHEN": when, "TIME": f"{self.for_s:.12g}s",
            "FACTORx": f"{self.factor:.12g}x", "FILE": self.file,
        }  # fmt: skip
        return " ".join(words.get(word, word) for word in self.kind.value.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """All injected faults of one run.

    Example:
        >>> plan = FaultPlan.parse(["kill worker 1 at update 100"], num_workers=2)
        >>> [str(fault) for fault in plan.of_worker(1)]
        ['kill worker 1 at update 100']
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str], num_workers: int) -> "FaultPlan":
        """Return the plan that these lines describe.

        Raises:
            ConfigError: a line has no known form, or names no worker of the run.
        """
        return cls(faults=tuple(_parse(text, num_workers) for text in texts))

    def __bool__(self) -> bool:
        return bool(self.faults)

    def of_worker(self, worker: int) -> tuple[Fault, ...]:
        """Return the faults of this worker."""
        return tuple(fault for fault in self.faults if fault.worker == worker)

    def without(self, happened: Sequence[str]) -> "FaultPlan":
        """Return the plan without the faults that have happened, one for each line."""
        remaining = list(happened)
        kept = []
        for fault in self.faults:
            if str(fault) in remaining:
                remaining.remove(str(fault))
            else:
                kept.append(fault)
        return FaultPlan(faults=tuple(kept))


class WorkerFaults:
    """The faults of one live worker, step by step: what happens now, and how slow it is.

    Kills and stops at a clock time are not included: another process carries them out.

    Args:
        faults: of this worker, without those that have already happened.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._remaining = [
            fault for fault in faults if fault.at_s is None or fault.kind not in _FROM_OUTSIDE
        ]
        self._slow: list[tuple[float, float]] = []
        """The end and the factor of each slow phase."""
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._remaining or self._slow)

    def due(self, version: int, now_s: float) -> list[Fault]:
        """Return the faults of this worker's next step.

        Args:
            version: version of the parameters that the step uses.
            now_s: seconds since the first epoch opened.
        """
        self._step += 1
        due_faults = [fault for fault in self._remaining if self._is_due(fault, version, now_s)]
        for fault in due_faults:
            self._remaining.remove(fault)
            if fault.kind is Kind.SLOW:
                self._slow.append((now_s + fault.for_s, fault.factor))
        return due_faults

    def _is_due(self, fault: Fault, version: int, now_s: float) -> bool:
        if fault.update is not None:
            return version >= fault.update
        if fault.step is not None:
            return self._step >= fault.step
        return fault.at_s is not None and now_s >= fault.at_s

    def factor(self, now_s: float) -> float:
        """Return how many times longer a step that ends now takes; the slowest phase counts."""
        self._slow = [slowdown for slowdown in self._slow if slowdown[0] > now_s]
        return max((factor for _, factor in self._slow), default=1.0)


def _parse(text: str, num_workers: int) -> Fault:
    line = " ".join(text.split())
    for kind in Kind:
        match = re.fullmatch(_pattern(kind), line, re.IGNORECASE)
        if match is not None:
            return _fault(kind, match.groupdict(), text, num_workers)
    similar = [
        kind.value for kind in Kind if kind.value.split()[0] == line.partition(" ")[0].lower()
    ]
    forms = "; ".join(similar or [kind.value for kind in Kind])
    raise ConfigError(f"fault {text!r} must read like {_EXAMPLE!r}; its forms: {forms}")


def _pattern(kind: Kind) -> str:
    patterns = {**_PATTERNS, "TIME": r"(?P<time>\S+)"}
    return " ".join(patterns.get(word, re.escape(word)) for word in kind.value.split())


def _fault(kind: Kind, fields: dict[str, str | None], text: str, num_workers: int) -> Fault:
    worker, when = fields.get("worker"), (fields["when"] or "").lower()
    unit, _, number = when.partition(" ")
    count = None
    if number:
        least = 1 if unit == "step" else 0
        if not re.fullmatch(r"\d{1,18}", number) or int(number) < least:
            raise ConfigError(
                f"fault {text!r}: {number!r} is not a valid {unit}; write {unit} {least + 99}"
            )
        count = int(number)
    time, factor = fields.get("time"), fields.get("factor")
    return Fault(
        kind=kind,
        worker=None if worker is None else parse_worker(worker, text, "fault", num_workers),
        update=count if unit == "update" else None,
        step=count if unit == "step" else None,
        at_s=None if number else parse_seconds(when, text, "fault"),
        for_s=0.0 if time is None else parse_seconds(time, text, "fault"),
        factor=1.0 if factor is None else _factor(factor, text),
        file=_file(fields.get("file"), text),
    )


def _factor(number: str, text: str) -> float:
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor < 1e6:
        raise ConfigError(f"fault {text!r}: {number!r} is not a factor of at least 1; write 10x")
    return factor


def _file(name: str | None, text: str) -> str:
    """Return the path of a file in the run's folder. ConfigError: it is outside."""
    if name is not None and (name.startswith("/") or ".." in name.split("/")):
        raise ConfigError(f"fault {text!r}: name a file inside the run's folder: trace.jsonl")
    return name or ""
