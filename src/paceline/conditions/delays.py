"""Stragglers to order: how much longer a worker takes for a mini-batch.

    20ms                always
    exp:20ms            exponential, mean 20 ms
    pareto:2,10ms       Pareto, shape 2, at least 10 ms (a heavy tail)
    10ms+exp:5ms        the sum of any of these
    1=exp:20ms          for worker 1 alone

A delay is a value and its randomness an argument, so the same seed gives the same stragglers in a
run and in a simulation of it. It must not know who sleeps, nor on which clock.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import ConfigError, unknown

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_EXAMPLES = "20ms, exp:20ms, 10ms+exp:5ms, pareto:2,10ms, 1=exp:20ms (worker 1 alone)"

T = TypeVar("T")


class Term(Protocol):
    """One summand of a delay."""

    @property
    def mean_s(self) -> float: ...

    def sample(self, rng: random.Random) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Always ``mean_s``; draws nothing."""

    mean_s: float

    def sample(self, rng: random.Random) -> float:
        return self.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """Density exp(-x / mean) / mean."""

    mean_s: float

    def sample(self, rng: random.Random) -> float:
        return rng.expovariate(1.0 / self.mean_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """P(X > x) = (scale / x)^shape for x >= scale; the mean needs shape > 1."""

    shape: float
    scale_s: float

    @property
    def mean_s(self) -> float:
        return self.scale_s * self.shape / (self.shape - 1.0)

    def sample(self, rng: random.Random) -> float:
        return self.scale_s * rng.paretovariate(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The sum of its terms; ``text`` is what it was written as."""

    text: str
    terms: tuple[Term, ...]

    @property
    def mean_s(self) -> float:
        return sum(term.mean_s for term in self.terms)

    def sample(self, rng: random.Random) -> float:
        """One draw, in seconds; draws of ``rng`` in the order of the terms."""
        return sum(term.sample(rng) for term in self.terms)

    def __str__(self) -> str:
        return self.text


def parse_delay(text: str) -> Delay:
    """The delay that ``text`` describes.

    Raises:
        ConfigError: it describes none; the part that is wrong is named.

    Example:
        >>> parse_delay("10ms+exp:5ms").mean_s
        0.015
    """
    # A plus inside a number's exponent (1e+3ms) joins no terms.
    parts = re.split(r"(?<!\de)\+", text.replace(" ", "").lower())
    return Delay(text=text.strip(), terms=tuple(_term(part, text) for part in parts))


def parse_delays(values: Sequence[str], num_workers: int) -> tuple[Delay | None, ...]:
    """The delay of each worker 0..num_workers-1; one given for a worker goes before one for all.

    Raises:
        ConfigError: one is no delay, names no worker of the run, or is given twice.
    """
    for_all: Delay | None = None
    for_one: dict[int, Delay] = {}
    for value in values:
        head, is_for_one, delay_text = value.rpartition("=")
        delay = parse_delay(delay_text)
        if is_for_one:
            worker = _worker(head, value, "delay", num_workers)
            _set_once(for_one, worker, delay, value, "delay")
        elif for_all is not None:
            raise ConfigError(
                f"two delays for all workers: {for_all.text!r} and {value!r}; for the sum of "
                f"both write {for_all.text}+{delay.text}, for one worker 1={delay.text}"
            )
        else:
            for_all = delay
    return tuple(for_one.get(worker, for_all) for worker in range(num_workers))


def parse_slow(values: Sequence[str], num_workers: int) -> dict[int, float]:
    """How many times longer each worker that is named takes: ``["1=5x"]`` -> ``{1: 5.0}``.

    Raises:
        ConfigError: not of this form, below 1, for no worker of the run, or given twice.
    """
    factors: dict[int, float] = {}
    for value in values:
        match = re.fullmatch(rf"([^=]*)=({_NUMBER})x?", value.replace(" ", "").lower())
        if match is None:
            raise ConfigError(
                f"slow must read WORKER=FACTORx, got {value!r}; 1=5x makes worker 1 take 5 times "
                f"as long"
            )
        factor = float(match[2])
        if not 1 <= factor < math.inf:
            raise ConfigError(
                f"a slow factor must be >= 1 and finite, got {match[2]} in {value!r}; to make one "
                f"worker the faster one, slow down the others"
            )
        _set_once(factors, _worker(match[1], value, "slow", num_workers), factor, value, "slow")
    return factors


def _term(part: str, text: str) -> Term:
    kind, colon, rest = part.rpartition(":")
    if not colon:
        return Constant(mean_s=_seconds(part, text))
    if kind == "exp":
        mean_s = _seconds(rest, text)
        if mean_s == 0:
            raise _refused(text, "the mean of exp must be > 0, got 0")
        return Exponential(mean_s=mean_s)
    if kind == "pareto":
        return _pareto(rest, text)
    raise ConfigError(
        f"{unknown('kind of delay', kind, ('exp', 'pareto'), text)}; write one as in: {_EXAMPLES}"
    )


def _pareto(rest: str, text: str) -> Pareto:
    shape_text, comma, scale_text = rest.partition(",")
    if not comma or not re.fullmatch(_NUMBER, shape_text):
        raise _refused(text, f"pareto needs a shape and a least time, got {rest!r}")
    shape, scale_s = float(shape_text), _seconds(scale_text, text)
    if not 1 < shape < math.inf:
        raise _refused(text, f"the shape of pareto must be > 1 for a finite mean, got {shape_text}")
    if scale_s == 0:
        raise _refused(text, "the least time of pareto must be > 0, got 0")
    return Pareto(shape=shape, scale_s=scale_s)


def _seconds(part: str, text: str) -> float:
    match = re.fullmatch(rf"({_NUMBER})([a-z]*)", part)
    if match is None:
        raise _refused(text, f"{part!r} is no time")
    number, unit = match.groups()
    if unit not in _UNITS_S:
        has = f"the unit {unit!r}" if unit else "no unit"
        raise _refused(text, f"{part!r} has {has}, wanted one of {', '.join(_UNITS_S)}")
    seconds = float(number) * _UNITS_S[unit]
    if not 0 <= seconds < math.inf:
        raise _refused(text, f"a time must be >= 0 and finite, got {part!r}")
    return seconds


def _refused(text: str, reason: str) -> ConfigError:
    return ConfigError(f"delay {text!r}: {reason}; write one as in: {_EXAMPLES}")


def _worker(text: str, value: str, setting: str, num_workers: int) -> int:
    if not re.fullmatch(r"\d+", text.strip()):
        raise ConfigError(f"{setting} {value!r}: {text!r} is no worker; write a number, as in 1=")
    worker = int(text)
    if worker >= num_workers:
        raise ConfigError(
            f"{setting} {value!r}: there is no worker {worker}; with {num_workers} workers they "
            f"are numbered 0 to {num_workers - 1}"
        )
    return worker


def _set_once(found: dict[int, T], worker: int, value: T, text: str, setting: str) -> None:
    if worker in found:
        raise ConfigError(f"{setting} {text!r}: worker {worker} has one already; give each once")
    found[worker] = value
