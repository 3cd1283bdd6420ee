"""Random signals to everybody of a run: no hang, no traceback, each sample once, nothing left.

Some of the runs of bench/havoc.py; what is drawn, done and judged stands in havoc_*.py.
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
def test_a_run_that_is_struck_ends_well(tmp_path: Path, seed: int) -> None:
    one = trial(draw(seed, least=LEAST), tmp_path)
    assert one.outcome.struck, one.plan
    assert not one.complaints, "\n".join([str(one.plan), *chain(*one.complaints.values())])


def test_the_places_where_a_line_is_struck_exist() -> None:
    for place in PLACES:
        assert Path(place).is_dir() or Path(f"{place}py").is_file(), place


# -- the judge ------------------------------------------------------------------------------------

CALM = Launch(code=0, screen="", took_s=3.0, asked_s=0.0, left=())
PLAN = Plan(seed=0, workers=2, samples=48, batch=24, epochs=1)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing happens to."""
    one = trial(PLAN, tmp_path_factory.mktemp("calm"))
    assert one.complaints == {}
    return one.outcome


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
def test_what_is_wrong_with_a_launch_is_seen(
    calm: Outcome, kind: str, launch: dict[str, Any]
) -> None:
    worse = replace(calm, launches=(replace(CALM, **launch), CALM))
    assert kind in judge(PLAN, worse)


def test_a_death_explains_an_end_only_where_it_may_end_a_run(calm: Outcome) -> None:
    ended = replace(CALM, code=1, screen="error: worker 1 ended: killed by signal 9")
    struck = replace(calm, launches=(ended, CALM), struck={0: "at once"})
    plan = replace(PLAN, strikes=(Strike(target="worker 1"),))
    assert judge(plan, struck) == {}
    assert "words" in judge(replace(plan, respawn=True), struck)
    assert "words" in judge(replace(plan, strikes=(Strike(target="writer"),)), struck)


@pytest.mark.parametrize(("epochs", "kind"), [(2, "lost"), (0, "doubled")])
def test_samples_that_are_lost_or_too_many_are_seen(calm: Outcome, epochs: int, kind: str) -> None:
    assert list(judge(replace(PLAN, epochs=epochs), calm)) == [kind]


def test_a_sample_that_counted_otherwise_is_seen(calm: Outcome, tmp_path: Path) -> None:
    final = calm.finals[0]
    state = torch.load(final)
    state["weight"][3] *= 2.0
    torch.save(state, tmp_path / final.name)
    found = judge(PLAN, replace(calm, finals=(tmp_path / final.name,)))
    assert "1 weights are not what the updates make, from 3 to 3" in found["weights"][0]
