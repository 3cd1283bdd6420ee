"""Ends a run by one of the script's metrics: it reaches a bound, or does not improve.

    add(rule) ... hear(metrics of one evaluation) -> why the run is to end, or nothing

NaN is never an improvement and reaches no bound. If the script does not say whether more or less of
a metric is better, the words of its name decide; an unknown name is refused. This module must not
know who evaluates, nor how a run ends.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .errors import ConfigError
from .fields import whole

_LESS = frozenset((
    "loss", "losses", "error", "errors", "err", "mae", "mse", "rmse", "mape", "smape", "msle",
    "rmsle", "nll", "bce", "ce", "xent", "crossentropy", "kl", "kld", "divergence", "perplexity",
    "ppl", "bpb", "bpc", "bpd", "wer", "cer", "ter", "eer", "ece", "brier", "hinge", "deviance",
    "fid", "kid", "lpips", "fpr", "fnr", "regret", "cost",
))  # fmt: skip
_MORE = frozenset((
    "acc", "accuracy", "accuracies", "f", "precision", "recall", "sensitivity", "specificity",
    "tpr", "tnr", "auc", "auroc", "auprc", "ap", "map", "iou", "miou", "dice", "jaccard", "bleu",
    "sacrebleu", "chrf", "rouge", "rougel", "meteor", "cider", "psnr", "ssim", "r", "mcc", "kappa",
    "pearson", "spearman", "correlation", "reward", "rewards", "return", "returns", "success",
    "correct", "em", "hit", "hits", "mrr", "ndcg", "wins", "elo",
))  # fmt: skip
_MORE_BY_ITSELF = frozenset(("score", "scores", "top"))
"""More is better if no other word decides: not for a Brier score or a top-1 error."""
_TURNS = frozenset((
    "neg", "negative", "negated", "minus", "inverse", "inverted", "inv", "reduction", "drop",
    "decrease",
))  # fmt: skip
"""With these words the other words do not decide: more of neg_log_loss is better."""
_GROWS = frozenset(("improvement", "increase", "gain"))
"""Neither do they with these, if less of the metric is better."""
MODES = ("min", "max")


class StopRule(NamedTuple):
    """When one metric ends the run.

    Attributes:
        name: of the metric, as ``pace.evaluate`` measures it.
        sign: 1 where more is better, -1 where less is, 0 where only bounds count.
        above, below: the run ends when the metric is at least, or at most, this value.
        patience: the run ends after this many evaluations in a row without improvement; 0: never.
        min_delta: the smallest difference from the best value so far that is an improvement.
    """

    name: str
    sign: int
    above: float | None = None
    below: float | None = None
    patience: int = 0
    min_delta: float = 0.0


def sign_of(name: str, mode: str | None = None) -> int:
    """Return 1 if more of this metric is better, -1 if less is.

    Args:
        mode: ``max`` or ``min``; None: by the words of its name (loss, error, accuracy, ...), which
            must all agree, or else the last one must be a word of which less is better. A name
            that reverses them (neg_log_loss, loss_reduction, -loss, 1-acc) decides nothing.

    Raises:
        ConfigError: the mode is unknown, or the name decides nothing.

    Example:
        >>> sign_of("loss/val"), sign_of("val_acc"), sign_of("bleu_error", "max")
        (-1, 1, 1)
    """
    if mode is None:
        return _sign_by(name)
    if mode not in MODES:
        raise ConfigError(f"mode must be 'min' or 'max', got {mode!r:.60}")
    return 1 if mode == "max" else -1


def _sign_by(name: str) -> int:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()
    words = re.findall(r"[a-z]+", re.sub(r"cross[^a-z]entropy", "crossentropy", spaced))
    is_less, is_more = not _LESS.isdisjoint(words), not _MORE.isdisjoint(words)
    is_turned = not _TURNS.isdisjoint(words) or _is_subtracted(spaced)
    is_turned |= is_less and not _GROWS.isdisjoint(words)
    if is_less and not is_turned and (not is_more or words[-1] in _LESS):
        return -1
    if is_turned or is_less or not (is_more or not _MORE_BY_ITSELF.isdisjoint(words)):
        raise ConfigError(
            f"the name {name!r:.60} does not tell whether more of it is better: give mode='max', "
            "or mode='min' where less is"
        )
    return 1


def _is_subtracted(name: str) -> bool:
    """Whether a metric is subtracted from 0 or 1: -loss, 1 - acc; but not 1-shot_acc."""
    match = re.match(r"\s*(1(?:\.0*)?\s*)?-\s*([a-z]*)", name)
    return match is not None and (not match[1] or match[2] in _LESS | _MORE | _MORE_BY_ITSELF)


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
        ConfigError: no condition is given, a value is invalid, or patience is given and the name
            does not say whether more or less is better.
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
        sign=0 if times is None and mode is None else sign_of(name, mode),
        above=None if above is None else float(above),
        below=None if below is None else float(below),
        patience=times or 0,
        min_delta=float(min_delta),
    )


class StopRules:
    """The rules of one run, and the evaluations that they have seen."""

    def __init__(self) -> None:
        self._best: dict[StopRule, float] = {}
        self._num_without: dict[StopRule, int] = {}
        self._measured: set[str] = set()

    def add(self, rule: StopRule, heard: Iterable[Mapping[str, float]] = ()) -> bool:
        """Add a rule; return False if it is there already, since every worker sends it.

        Args:
            heard: earlier evaluations, in a resumed run.
        """
        if rule in self._best:
            return False
        self._best[rule], self._num_without[rule] = -math.inf, 0
        for metrics in heard:
            self._hear(rule, metrics)
        return True

    def hear(self, metrics: Mapping[str, float]) -> str:
        """Handle an evaluation with these means; return why the run ends, or ""."""
        reasons = [self._hear(rule, metrics) for rule in self._best]
        return next(filter(None, reasons), "")

    def unmeasured(self) -> list[str]:
        """Names that no evaluation has measured."""
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
