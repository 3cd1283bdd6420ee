"""Injected stragglers: how much longer a worker takes for a mini-batch.

    20ms                always
    exp:20ms            exponential, mean 20 ms
    pareto:2,10ms       Pareto, shape 2, at least 10 ms (a heavy tail)
    lognormal:0.5,10ms  log-normal, sigma 0.5, median 10 ms
    weibull:1.5,10ms    Weibull, shape 1.5, scale 10 ms
    list:8ms,9ms,30ms   one of these, with equal probability
    10ms+exp:5ms        the sum of any of these
    1=exp:20ms          for worker 1 alone

A delay is a value, and its random generator an argument, so the same seed gives the same stragglers
in a run and in a simulation of it. It must not know who sleeps, nor on which clock.
"""

import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from ..errors import ConfigError, unknown
from .distributions import Constant, Empirical, Exponential, LogNormal, Pareto, Term, Weibull

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_EXAMPLES = "20ms, exp:20ms, 10ms+exp:5ms, pareto:2,10ms, 1=exp:20ms (worker 1 alone)"
_NUM_SUMS = 100_000
"""Draws that represent a sum of several random terms: its median is right to about 0.3 %. For many
terms fewer sums are drawn."""
_LEAST_SPREAD = 1e-6
"""Spread between the quartiles, relative to the median; below it two draws may be equal floats."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The sum of its terms; ``text`` is how it was written."""

    text: str
    terms: tuple[Term, ...]

    @property
    def mean_s(self) -> float:
        return math.fsum(term.mean_s for term in self.terms)

    @property
    def has_density(self) -> bool:
        """Whether the draws are spread so widely that no two are ever equal."""
        least_s = _LEAST_SPREAD * math.fsum(term.exceeded_s(0.5) for term in self.terms)
        return any(
            not isinstance(term, Constant | Empirical)
            and term.exceeded_s(0.25) - term.exceeded_s(0.75) > least_s
            for term in self.terms
        )

    def stretched(self, factor: float) -> "Delay":
        """Return this delay with all of its times multiplied by ``factor``."""
        return replace(self, terms=tuple(_stretched(term, factor) for term in self.terms))

    def sample(self, rng: random.Random) -> float:
        """Return one draw, in seconds; the terms use ``rng`` in their order."""
        return math.fsum(term.drawer(rng)() for term in self.terms)

    def drawer(self, rng: random.Random) -> Callable[[], float]:
        """Return a function that draws as ``sample`` with ``rng``, but faster."""
        draws = [term.drawer(rng) for term in self.terms]
        if len(draws) == 1:
            return draws[0]
        if len(draws) == 2:
            first, second = draws
            return lambda: first() + second()
        return lambda: math.fsum(draw() for draw in draws)

    def exceeded_s(self, share: float) -> float:
        """Return the time x with P(X > x) = share.

        Exact for at most one random term; for a sum of several, estimated by 100,000 seeded draws.
        """
        shift_s = math.fsum(term.mean_s for term in self.terms if isinstance(term, Constant))
        random_terms = tuple(term for term in self.terms if not isinstance(term, Constant))
        if not random_terms:
            return shift_s
        return shift_s + (
            random_terms[0] if len(random_terms) == 1 else _drawn(random_terms)
        ).exceeded_s(share)

    def __str__(self) -> str:
        return self.text


def _stretched(term: Term, factor: float) -> Term:
    """Return the term with every field in seconds, by its name, multiplied by ``factor``."""
    values = {field.name: getattr(term, field.name) for field in fields(term)}  # type: ignore[arg-type]  # each is a dataclass
    stretched = {
        name: tuple(factor * item for item in value) if isinstance(value, tuple) else factor * value
        for name, value in values.items()
        if name.endswith("_s")
    }
    return replace(term, **stretched)  # type: ignore[type-var]  # the same


NO_DELAY = Delay(text="no delay", terms=())
"""No time besides what a machine takes."""


@functools.lru_cache(maxsize=16)
def _drawn(terms: tuple[Term, ...]) -> Empirical:
    """Return the distribution of a sum, from seeded draws."""
    rng = random.Random(0)
    num_sums = max(5_000, min(_NUM_SUMS, 8 * _NUM_SUMS // len(terms)))
    draws = [term.drawer(rng) for term in terms]
    return Empirical(values_s=tuple(sum(draw() for draw in draws) for _ in range(num_sums)))


def parse_delay(text: str) -> Delay:
    """Return the delay that ``text`` describes.

    Raises:
        ConfigError: ``text`` is invalid; the message quotes the wrong part.

    Example:
        >>> parse_delay("10ms+exp:5ms").mean_s
        0.015
    """
    # A plus inside a number's exponent (1e+3ms) does not separate terms.
    parts = re.split(r"(?<!\de)\+", text.replace(" ", "").lower())
    return Delay(text=text.strip(), terms=tuple(_term(part, text) for part in parts))


def parse_delays(values: Sequence[str], num_workers: int) -> tuple[Delay | None, ...]:
    """Return the delay of each worker 0..num_workers-1; one for a worker overrides one for all.

    Raises:
        ConfigError: a delay is invalid, names no worker of the run, or is given twice.
    """
    for_all: Delay | None = None
    for_one: dict[int, Delay] = {}
    for value in values:
        head, is_for_one, delay_text = value.rpartition("=")
        delay = parse_delay(delay_text)
        if is_for_one:
            worker = parse_worker(head, value, "delay", num_workers)
            set_once(for_one, worker, delay, value, "delay")
        elif for_all is not None:
            raise ConfigError(
                f"two delays for all workers: {for_all.text!r} and {value!r}; for the sum of "
                f"both write {for_all.text}+{delay.text}, for one worker 1={delay.text}"
            )
        else:
            for_all = delay
    return tuple(for_one.get(worker, for_all) for worker in range(num_workers))


def parse_seconds(text: str, value: str, setting: str) -> float:
    """Return the seconds of a time with its unit.

    Args:
        value: the setting's whole value, of which ``text`` is a part.

    Raises:
        ConfigError: ``text`` is not a time; the message names the setting.
    """
    try:
        return _seconds(text.lower(), text)
    except ConfigError as error:
        reason = str(error).partition(": ")[2].rpartition(";")[0]
        raise ConfigError(f"{setting} {value!r}: {reason}; write a time as in 20ms") from None


def _term(part: str, text: str) -> Term:
    kind, colon, rest = part.rpartition(":")
    if not colon:
        return Constant(mean_s=_seconds(part, text))
    if kind == "exp":
        mean_s = _seconds(rest, text)
        if mean_s == 0:
            raise _refused(text, "the mean of exp must be > 0, got 0")
        return Exponential(mean_s=mean_s)
    if kind == "list":
        return Empirical(values_s=tuple(_seconds(seconds, text) for seconds in rest.split(",")))
    if kind in _SHAPED:
        return _shaped(kind, rest, text)
    kinds = ("exp", "list", *_SHAPED)
    raise ConfigError(
        f"{unknown('kind of delay', kind, kinds, text)}; write one as in: {_EXAMPLES}"
    )


_SHAPED = {
    "pareto": ("a shape and a least time", "shape", "least time"),
    "lognormal": ("a sigma and a median", "sigma", "median"),
    "weibull": ("a shape and a scale", "shape", "scale"),
}
"""Kinds written as a number and a time: what they need, and the names of both."""


def _shaped(kind: str, rest: str, text: str) -> Term:
    needs, shape_name, scale_name = _SHAPED[kind]
    shape_text, comma, scale_text = rest.partition(",")
    if not comma or not re.fullmatch(NUMBER, shape_text):
        raise _refused(text, f"{kind} needs {needs}, got {rest!r}")
    shape, scale_s = float(shape_text), _seconds(scale_text, text)
    least, why = (1, " for a finite mean") if kind == "pareto" else (0, "")
    if not least < shape < math.inf:
        raise _refused(text, f"the {shape_name} of {kind} must be > {least}{why}, got {shape_text}")
    if scale_s == 0:
        raise _refused(text, f"the {scale_name} of {kind} must be > 0, got 0")
    term: Term = Pareto(shape=shape, scale_s=scale_s)
    if kind == "lognormal":
        term = LogNormal(sigma=shape, median_s=scale_s)
    elif kind == "weibull":
        term = Weibull(shape=shape, scale_s=scale_s)
    if not _is_finite(term):
        raise _refused(text, f"its mean is not finite with {shape_name} {shape_text}")
    return term


def _is_finite(term: Term) -> bool:
    try:
        return math.isfinite(term.mean_s)
    except OverflowError:
        return False


def _seconds(part: str, text: str) -> float:
    match = re.fullmatch(rf"({NUMBER})([a-z]*)", part)
    if match is None:
        raise _refused(text, f"{part!r} is not a time")
    number, unit = match.groups()
    if unit not in _UNITS_S:
        unit_text = f"the unit {unit!r}" if unit else "no unit"
        raise _refused(text, f"{part!r} has {unit_text}, wanted one of {', '.join(_UNITS_S)}")
    seconds = float(number) * _UNITS_S[unit]
    if not 0 <= seconds < math.inf:
        raise _refused(text, f"a time must be >= 0 and finite, got {part!r}")
    return seconds


def _refused(text: str, reason: str) -> ConfigError:
    return ConfigError(f"delay {text!r}: {reason}; write one as in: {_EXAMPLES}")


def parse_worker(text: str, value: str, setting: str, num_workers: int) -> int:
    """Return the number of a worker of the run. ConfigError: it is none; the setting is named."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise ConfigError(
            f"{setting} {value!r}: {text!r} is not a worker; write a number, as in 1="
        )
    worker = int(text)
    if worker >= num_workers:
        raise ConfigError(
            f"{setting} {value!r}: there is no worker {worker}; with {num_workers} workers they "
            f"are numbered 0 to {num_workers - 1}"
        )
    return worker


def set_once(by_worker: dict[int, T], worker: int, item: T, text: str, setting: str) -> None:
    """Set a worker's value. ConfigError: it has one already; the setting is named."""
    if worker in by_worker:
        raise ConfigError(
            f"{setting} {text!r}: worker {worker} has one already; give each worker one"
        )
    by_worker[worker] = item
