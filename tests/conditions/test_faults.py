"""A plan of faults is data: texts are read as plans and printed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.conditions.faults import Fault, FaultPlan, Kind
from paceline.errors import ConfigError

WORKERS = 4
SECONDS = st.integers(0, 10**6).map(lambda n: n / 1000)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any fault that can be written."""
    kind = draw(st.sampled_from(Kind))
    when = draw(st.sampled_from(("update", "step", "at_s") if kind.is_of_worker else ("at_s",)))
    value = draw(SECONDS) if when == "at_s" else draw(st.integers(1, 10**6))
    return Fault(
        kind=kind,
        worker=draw(st.integers(0, WORKERS - 1)) if kind.is_of_worker else None,
        for_s=draw(SECONDS) if "TIME" in kind.value else 0.0,
        factor=draw(st.integers(1, 1000)) / 1 if "FACTOR" in kind.value else 1.0,
        file="checkpoints/last.json" if "FILE" in kind.value else "",
        **{when: value},
    )


@given(st.lists(faults(), max_size=4))
def test_a_printed_plan_is_read_as_the_same_plan(some: list[Fault]) -> None:
    assert FaultPlan.parse([str(fault) for fault in some], WORKERS) == FaultPlan(faults=tuple(some))


@given(st.lists(faults(), min_size=1, max_size=5), st.data())
def test_a_fault_that_has_happened_is_removed_once(some: list[Fault], data: st.DataObject) -> None:
    plan = FaultPlan(faults=tuple(some))
    gone = data.draw(st.sampled_from(some))
    left = list(plan.without([str(gone)]).faults)
    assert len(left) == len(some) - 1
    left.append(gone)
    assert sorted(map(str, left)) == sorted(map(str, some))


def test_every_fault_belongs_to_the_machine_or_one_worker() -> None:
    texts = ["kill worker 1 at update 3", "fill disk at 5s for 2s", "RAISE in worker 1 at step 2"]
    plan = FaultPlan.parse(texts, WORKERS)
    assert [fault.kind for fault in plan.of_worker(1)] == [Kind.KILL, Kind.RAISE]
    assert [fault.kind for fault in plan.faults if fault.worker is None] == [Kind.FILL_DISK]
    assert plan.of_worker(0) == ()
    assert plan.faults[1] == Fault(kind=Kind.FILL_DISK, at_s=5.0, for_s=2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill worker 9 at update 3", "there is no worker 9"),
        ("kill worker one at update 3", "'one' is not a worker"),
        ("kill worker 1 at update x", "'x' is not a valid update; write update 99"),
        ("kill worker 1 at step 0", "'0' is not a valid step; write step 100"),
        ("kill worker 1 at update ²", "'²' is not a valid update"),
        ("kill worker 1 at noon", "write a time as in 20ms"),
        ("kill launcher at step 3", "only a worker has steps"),
        ("stop worker 1 at update 3", "stop worker W at WHEN for TIME"),
        ("slow worker 1 at 3s for 1s by 0.5x", "'0.5' is not a factor of at least 1"),
        ("slow worker 1 at 3s for 1s by nanx", "'nan' is not a factor"),
        ("corrupt /etc/passwd at 3s", "inside the run's folder"),
        ("corrupt ../a at 3s", "inside the run's folder"),
        ("explode", "its forms: kill worker W at WHEN; stop"),
    ],
)
def test_an_invalid_fault_is_refused_with_advice(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^fault|^'kill") as refusal:
        FaultPlan.parse([text], WORKERS)
    assert says in str(refusal.value)
