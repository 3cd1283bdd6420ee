"""Rules that end a run by a metric."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.stopping import StopRule, StopRules, rule_of, sign_of


def _rule(name: str = "acc", **asked: object) -> StopRule:
    none = {"above": None, "below": None, "patience": None, "min_delta": 0.0, "mode": None}
    return rule_of(name, **(none | asked))  # type: ignore[arg-type]


def _rules(*rules: StopRule) -> StopRules:
    result = StopRules()
    for rule in rules:
        assert result.add(rule)
    return result


def _reasons(rules: StopRules, values: list[float], name: str = "acc") -> list[str]:
    return [rules.hear({name: value}) for value in values]


def test_reached_bound_ends_the_run() -> None:
    assert _reasons(_rules(_rule(above=0.9)), [0.5, 0.9]) == ["", "acc 0.9 reached 0.9"]
    result = _reasons(_rules(_rule("loss", below=0.1)), [0.5, 0.05], "loss")
    assert result == ["", "loss 0.05 came down to 0.1"]


def test_patience_counts_consecutive_evaluations_without_improvement() -> None:
    rules = _rules(_rule(patience=2))
    assert _reasons(rules, [0.5, 0.4, 0.6, 0.6, 0.5]) == [
        "", "", "", "", "acc was no better than 0.6 2 times in a row",
    ]  # fmt: skip


def test_improvement_below_min_delta_does_not_count() -> None:
    rules = _rules(_rule("loss", patience=1, min_delta=0.1))
    assert _reasons(rules, [1.0, 0.95], "loss") == ["", "loss was no better than 1 once"]


def test_nan_is_no_improvement_and_reaches_no_bound() -> None:
    rules = _rules(_rule(patience=2, above=0.9))
    assert _reasons(rules, [math.nan, math.nan])[-1].startswith("acc was no better than -inf")


def test_same_rule_from_several_workers_counts_once() -> None:
    rules = _rules(_rule(patience=2))
    assert not rules.add(_rule(patience=2))
    assert rules.add(_rule(patience=3))


def test_resumed_run_counts_earlier_evaluations() -> None:
    rules = StopRules()
    rules.add(_rule(patience=2), [{"acc": 0.5}, {"acc": 0.4}, {"loss": 1.0}])
    assert rules.hear({"acc": 0.3})


@given(values=st.lists(st.floats(0, 1), max_size=12), cut=st.integers(0, 12))
def test_resumed_rule_equals_an_uninterrupted_one(values: list[float], cut: int) -> None:
    whole = _rules(_rule(patience=3))
    expected = _reasons(whole, values)
    again = StopRules()
    again.add(_rule(patience=3), [{"acc": value} for value in values[:cut]])
    assert _reasons(again, values[cut:]) == expected[cut:]


def test_unmeasured_metric_is_named() -> None:
    rules = _rules(_rule(patience=2), _rule("loss", below=1.0))
    rules.hear({"loss": 2.0})
    assert rules.unmeasured() == ["acc"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, r"needs above=, below= or patience=, as in pace.stop_when\('acc', patience=3\)"),
        ({"patience": 0}, "patience must be a whole number >= 1, got 0"),
        ({"patience": 2.5}, "patience must be a whole number >= 1, got 2.5"),
        ({"above": math.nan}, "above must be finite, got nan"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta must be >= 0, got -1.0"),
        ({"patience": 1, "mode": "up"}, "mode must be 'min' or 'max', got 'up'"),
    ],
)
def test_empty_or_invalid_rule_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _rule(**asked)


@pytest.mark.parametrize(
    "name",
    ["loss", "val_loss", "word-error", "valid/perplexity", "MSE", "bleu_error", "val_loss_epoch",
     "Loss/val", "valLoss", "val_ce", "cross_entropy", "cross-entropy", "wer", "fid50k", "bpb",
     "word_error_rate", "brier_score", "error@top1", "loss2"],
)  # fmt: skip
def test_lower_is_better_for_losses_and_errors(name: str) -> None:
    assert sign_of(name) == -1
    assert sign_of(name, "max") == 1


@pytest.mark.parametrize(
    "name",
    ["acc", "f1", "val/f1_score", "bleu", "mAP50", "rouge1", "top5", "R2", "ValAccuracy",
     "episode_reward", "success_rate", "quiz_score", "1-shot_acc", "accuracy_gain"],
)  # fmt: skip
def test_higher_is_better_for_accuracies_and_scores(name: str) -> None:
    assert sign_of(name) == 1
    assert sign_of(name, "min") == -1


@pytest.mark.parametrize(
    "name",
    ["lossless", "sum", "", "loss_dice", "log_likelihood", "42", "neg_mean_squared_error",
     "neg_log_loss", "negLoss", "-loss", "1 - acc", "1.0-acc", "minus_nll", "error_reduction",
     "acc_drop", "loss_improvement"],
)  # fmt: skip
def test_ambiguous_metric_needs_a_mode(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not tell whether more of it .*mode='max', or mo"):
        _rule(name, patience=1)
    assert _rule(name, patience=1, mode="min").sign == -1
    assert _reasons(_rules(_rule(name, above=1.0)), [0.5, 0.4, 1.0], name)[:2] == ["", ""]
