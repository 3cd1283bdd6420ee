"""Ends of a run by a metric of the script's own: a bound that is reached, or no improvement.

    add(rule) ... hear(metrics of one evaluation) -> why the run is to end, or nothing

What is not a number is never an improvement, and reaches nothing. Which way a metric grows better
is found by its name, where the script does not say. This module must not know who evaluates, nor
how a run ends.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import ConfigError
from .fields import whole

_SMALLER_IS_BETTER = ("loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "nll")
MODES = ("min", "max")


class StopRule(NamedTuple):
    """When one metric ends the run.

    Attributes:
        name: of the metric, as ``pace.evaluate`` measures it.
        sign: 1 where more is better, -1 where less is.
        above, below: the run ends when it is at least, at most so much.
        patience: evaluations in a row without an improvement after which it ends; 0: not by that.
        min_delta: what is less than so much better than the best so far is no improvement.
    """

    name: str
    sign: int
    above: float | None = None
    below: float | None = None
    patience: int = 0
    min_delta: float = 0.0


def sign_of(name: str, mode: str | None = None) -> int:
    """1 where more of this metric is better, -1 where less is.

    Args:
        mode: ``max`` or ``min``; None: by the last word of its name (loss, error, perplexity, ...).

    Raises:
        ConfigError: it is another mode.

    Example:
        >>> sign_of("val_loss"), sign_of("acc"), sign_of("bleu_error", "max")
        (-1, 1, 1)
    """
    if mode is None:
        last = name.lower().replace("-", "_").replace("/", "_").rpartition("_")[2]
        return -1 if last in _SMALLER_IS_BETTER else 1
    if mode not in MODES:
        raise ConfigError(f"mode must be 'min' or 'max', got {mode!r:.60}")
    return 1 if mode == "max" else -1


def rule_of(
    name: str,
    *,
    above: float | None,
    below: float | None,
    patience: int | None,
    min_delta: float,
    mode: str | None,
) -> StopRule:
    """The rule that ``pace.stop_when`` was asked for.

    Raises:
        ConfigError: it asks for nothing, or a value is none that it can be.
    """
    if above is None and below is None and patience is None:
        raise ConfigError(
            f"pace.stop_when({name!r}) needs above=, below= or patience=, as in "
            f"pace.stop_when({name!r}, patience=3)"
        )
    for label, bound in (("above", above), ("below", below)):
        if bound is not None and not math.isfinite(bound):
            raise ConfigError(f"pace.stop_when({name!r}): {label} must be finite, got {bound}")
    times = whole(patience)
    if patience is not None and (times is None or times < 1):
        raise ConfigError(
            f"pace.stop_when({name!r}): patience must be a whole number >= 1, got {patience!r:.60}"
        )
    if not (min_delta >= 0.0 and math.isfinite(min_delta)):
        raise ConfigError(f"pace.stop_when({name!r}): min_delta must be >= 0, got {min_delta}")
    return StopRule(
        name=name,
        sign=sign_of(name, mode),
        above=None if above is None else float(above),
        below=None if below is None else float(below),
        patience=times or 0,
        min_delta=float(min_delta),
    )


class StopRules:
    """The rules of one run, and what they have heard."""

    def __init__(self) -> None:
        self._best: dict[StopRule, float] = {}
        self._num_without: dict[StopRule, int] = {}
        self._measured: set[str] = set()

    def add(self, rule: StopRule, heard: Iterable[Mapping[str, float]] = ()) -> bool:
        """One rule more; False: it is there already, since every worker says it.

        Args:
            heard: evaluations that were made before, of a run that goes on.
        """
        if rule in self._best:
            return False
        self._best[rule], self._num_without[rule] = -math.inf, 0
        for metrics in heard:
            self._hear(rule, metrics)
        return True

    def hear(self, metrics: Mapping[str, float]) -> str:
        """An evaluation came to these means; why the run is to end, or empty."""
        reasons = [self._hear(rule, metrics) for rule in self._best]
        return next(filter(None, reasons), "")

    def unmeasured(self) -> list[str]:
        """Names that no evaluation had."""
        return sorted({rule.name for rule in self._best} - self._measured)

    def _hear(self, rule: StopRule, metrics: Mapping[str, float]) -> str:
        if rule.name not in metrics:
            return ""
        self._measured.add(rule.name)
        value = metrics[rule.name]
        if rule.above is not None and value >= rule.above:
            return f"{rule.name} {value:.4g} reached {rule.above:g}"
        if rule.below is not None and value <= rule.below:
            return f"{rule.name} {value:.4g} came down to {rule.below:g}"
        best = self._best[rule]
        if rule.sign * value > best + (rule.min_delta if math.isfinite(best) else 0.0):
            self._best[rule], self._num_without[rule] = rule.sign * value, 0
            return ""
        self._num_without[rule] += 1
        if not rule.patience or self._num_without[rule] < rule.patience:
            return ""
        times = "once" if rule.patience == 1 else f"{rule.patience} times in a row"
        return f"{rule.name} was no better than {rule.sign * best:.4g} {times}"
