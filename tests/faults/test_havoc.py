"""Random signals to every process of a run: no hang, no traceback, each sample once, nothing left.

Some of the runs of bench/havoc.py; havoc_*.py draws, does and judges.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from counted import PLACES
from havoc_plan import Plan, Strike, draw
from havoc_run import Launch, Outcome
from havoc_verdict import judge, trial

SEEDS = range(2, 8)
"""bench/havoc.py draws 500."""
LEAST = 5
"""Strikes of a run; some come after its end."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_under_random_signals_ends_well(tmp_path: Path, seed: int) -> None:
    tried = trial(draw(seed, least=LEAST), tmp_path)
    assert tried.outcome.struck, tried.plan
    assert not tried.complaints, "\n".join([str(tried.plan), *chain(*tried.complaints.values())])


def test_every_place_where_a_line_is_struck_exists() -> None:
    for place in PLACES:
        assert Path(place).is_dir() or Path(f"{place}py").is_file(), place


# -- the judge ------------------------------------------------------------------------------------

CALM = Launch(code=0, screen="", took_s=3.0, asked_s=0.0, left=())
PLAN = Plan(seed=0, workers=2, samples=48, batch=24, epochs=1)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without a fault."""
    tried = trial(PLAN, tmp_path_factory.mktemp("calm"))
    assert tried.complaints == {}
    return tried.outcome


@pytest.mark.parametrize(
    ("kind", "launch"),
    [
        ("hang", {"code": None}),
        ("hang", {"code": 143, "asked_s": 10.5}),
        ("traceback", {"screen": "Traceback (most recent call last):"}),
        ("words", {"code": 1, "screen": "error: worker 1 ended"}),
        ("words", {"code": -9}),
        ("left", {"left": ("process 7",)}),
    ],
)
def test_the_judge_reports_a_bad_launch(calm: Outcome, kind: str, launch: dict[str, Any]) -> None:
    worse = replace(calm, launches=(replace(CALM, **launch), CALM))
    assert kind in judge(PLAN, worse)


def test_a_death_excuses_an_end_only_where_it_may_end_a_run(calm: Outcome) -> None:
    ended = replace(CALM, code=1, screen="error: worker 1 ended: killed by signal 9")
    struck = replace(calm, launches=(ended, CALM), struck={0: "at once"})
    plan = replace(PLAN, strikes=(Strike(target="worker 1"),))
    assert judge(plan, struck) == {}
    assert "words" in judge(replace(plan, respawn=True), struck)
    assert "words" in judge(replace(plan, strikes=(Strike(target="writer"),)), struck)


@pytest.mark.parametrize(("epochs", "kind"), [(2, "lost"), (0, "doubled")])
def test_the_judge_reports_lost_and_surplus_samples(calm: Outcome, epochs: int, kind: str) -> None:
    assert list(judge(replace(PLAN, epochs=epochs), calm)) == [kind]


def test_the_judge_reports_a_sample_with_another_weight(calm: Outcome, tmp_path: Path) -> None:
    final = calm.finals[0]
    state = torch.load(final)
    state["weight"][3] *= 2.0
    torch.save(state, tmp_path / final.name)
    result = judge(PLAN, replace(calm, finals=(tmp_path / final.name,)))
    assert "1 weights are not what the updates make, from 3 to 3" in result["weights"][0]
