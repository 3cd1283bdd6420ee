"""Advice says how sure it is, and never surer than its seeds allow."""

from dataclasses import replace

import pytest

from paceline.report.forecast import forecast_of
from paceline.report.ranking import Advice, RankedProtocol, Standing, how_sure, render_advice, why


def ranked(name: str, loss: float, pushes: int, wins: int = 0) -> RankedProtocol:
    forecast = forecast_of(
        {0: pushes}, times_s=(10.0, 0.1, 0.001), computed_s=(8.0, 0.0, 10.0),
        protocol=name, workers=2, delay="exp:20ms", seed=0, updates=100, pushes=pushes,
        theory_time_s=None, theory_time_source="", theory_staleness_versions=None, cancelled=0,
        discarded=0, staleness_rule="none", mean_scale=None, note="", lost=0, wall_s=0.1,
    )  # fmt: skip
    standing = Standing(protocol=name, virtual_s=10.0, loss=loss, updates=100, wins=wins)
    return RankedProtocol(forecast=forecast, standing=standing)


def advice(wins: int = 3, loss: float = 0.5) -> Advice:
    return Advice(
        task="lenet", workers=2, cores=None, mini_batch_size=32, profile_dir="runs/x",
        profile_steps=100, step_s=0.02, push_s=0.001, are_alike=False, target=None,
        candidates=(ranked("async", loss, 300, wins), ranked("full-sync", 0.7, 200)),
    )  # fmt: skip


@pytest.mark.parametrize(("wins", "word"), [(3, ": clear"), (2, ": close, try both")])
def test_only_a_protocol_that_wins_with_every_seed_is_clearly_ahead(wins: int, word: str) -> None:
    assert how_sure(advice(wins)).endswith(word)


def test_a_protocol_that_is_not_told_apart_is_not_called_ahead() -> None:
    assert how_sure(replace(advice(), are_alike=True)).endswith("difference, either will do")


def test_no_protocol_is_advised_where_all_diverged() -> None:
    assert "every protocol diverged; lower --lr" in how_sure(advice(loss=float("inf")))


def test_a_runner_up_that_mostly_misses_the_target_counts_as_never() -> None:
    given = advice()
    for ranked_one, times_s in zip(
        given.candidates, ((40.0, 50.0, 60.0), (45.0, float("inf"), float("inf"))), strict=True
    ):
        ranked_one.standing.target_s = times_s
    assert "3 of 3 seeds (median 50.0 s against never): clear" in how_sure(given)
    assert given.to_json()["how_sure"] == how_sure(given)


def test_the_reason_compares_with_full_sync() -> None:
    assert why(advice()).startswith("1.50x the useful mini-batches a second of full-sync")
    assert "loss 0.5 against 0.7" in why(advice())


def test_the_advice_can_be_typed() -> None:
    assert "advice: --protocol async --mini-batch-size 32" in render_advice(advice())
