"""Under every staleness rule, inline, live and simulated runs follow the update equation.

    w_{j+1} = optimizer(w_j, sum_l (m_l / m) s_l g(w_{tau(l,j)}, xi_l))
    inverse     s_l = 1 / (j - tau(l,j) + 1)
    distance:C  s_l = min(C / ||w_j - w_{tau(l,j)}||^2, eta_max) / eta_max

The reference takes the pushes and their order from the trace, but no weights or scales.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.events import Apply, Discard, Pushed
from paceline.protocols import parse
from paceline.protocols.staleness import parse_staleness
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.training import TrainingWork
from paceline.trace import Trace, read_trace
from paceline.trace.records import Handed, Ordered, Record, Scaled
from paceline.workloads.base import Task
from reference import Order, State, _gradient, _leases_of, average, differ, fresh, state_of
from runs import Run, assert_each_sample_once, same_arrivals, train
from tiny import EPOCHS, LAYERS, NUM_SAMPLES, TASK, WITH_BATCH_NORM

CLOSE = 1e-9
RULES = ["inverse", "distance:0.002", "drop:1"]
PROTOCOLS = ["async", "k-async:2", "k-batch-async:3", "stale-synchronous:2"]


def equation(task: Task, records: list[Record], rule: str) -> tuple[State, list[float]]:
    """The parameters after the pushes of a trace, in float64, and the scale of each push."""
    model, optimizer = fresh(task)
    versions, pushes, scales = [state_of(model)], {}, list[float]()
    order, leases = Order(task), _leases_of(records)
    limit, names = parse_staleness(rule).distance_limit, dict(model.named_parameters())
    for record in records:
        if isinstance(record, Handed):
            batch = [order.batch(lease) for lease in leases[record.fact.ticket[:2]]]
            gradient = _gradient(model, task, versions[record.fact.ticket.version], batch)
            pushes[record.fact.ticket] = (record.fact.num_samples, gradient)
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            tickets, now = record.order.tickets, versions[-1]
            shares = [
                pushes[ticket][0] / sum(pushes[two][0] for two in tickets) for ticket in tickets
            ]
            mean = average([pushes[ticket][1] for ticket in tickets], shares)
            mine = [1.0 / (len(versions) - ticket.version) for ticket in tickets]
            if limit:
                held = [versions[ticket.version] for ticket in tickets]
                moved = [sum(float((now[n] - w[n]).square().sum()) for n in names) for w in held]
                mine = [min(limit / m, 0.3) / 0.3 if m else 1.0 for m in moved]
            scaled = mine if rule != "drop:1" else [1.0] * len(mine)
            weights = [share * scale for share, scale in zip(shares, scaled, strict=True)]
            update = average([pushes[ticket][1] for ticket in tickets], weights)
            model.load_state_dict(now)
            for name, parameter in names.items():
                parameter.grad = update.get(f"grad {name}")
            optimizer.step()
            buffers = {name: mean[name] for name, _ in model.named_buffers()}
            versions.append({**state_of(model), **buffers})
            scales += scaled
    return versions[-1], scales


def simulated(
    task: Task, folder: Path, protocol_text: str, rule: str, conditions: Conditions
) -> tuple[State, list[Record]]:
    protocol = parse(protocol_text, conditions.num_workers, rule)
    work = TrainingWork(task, protocol, batch_size=task.batch_size)
    trace = Trace(folder / "trace.jsonl")
    trace.header(task=task.name)
    work.on_scaled = lambda ticket, scale: trace.scaled(0.0, ticket, scale)
    run = SimulatedRun(
        protocol, Ledger(work.num_samples, task.batch_size, protocol.num_pushes), conditions,
        work=work, trace=trace, hear_epoch=lambda epoch, at_s: epoch + 1 < task.epochs,
    )  # fmt: skip
    run.run(None)
    trace.close()
    work.load_newest()
    return state_of(work.model), list(read_trace(folder / "trace.jsonl"))


def worlds(num_workers: int, seed: int) -> Conditions:
    texts = ("exp:30ms", "10ms", "5ms+exp:10ms", "exp:8ms")
    delays = tuple(parse_delay(texts[worker % 4]) for worker in range(num_workers))
    return Conditions(delays=delays, slow={0: 3.0}, seed=seed)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([WITH_BATCH_NORM, TASK]), st.sampled_from(PROTOCOLS), st.sampled_from(RULES),
    st.integers(2, 5), st.integers(0, 10**6),
)  # fmt: skip
def test_any_order_of_arrivals_follows_the_update_equation(
    tmp_path: Path, task: Task, protocol: str, rule: str, num_workers: int, seed: int
) -> None:
    """The task with batch norm is computed push by push, the other in rows."""
    state, records = simulated(task, tmp_path, protocol, rule, worlds(num_workers, seed))
    expected, scales = equation(task, records, rule)
    assert differ(state, expected) < CLOSE
    told = [record.scale for record in records if isinstance(record, Scaled)]
    if rule.startswith("distance"):
        assert sorted(told) == pytest.approx(sorted(scales))
    else:
        assert told == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("protocol", ["async", "k-batch-async:3"])
@pytest.mark.parametrize("task", [WITH_BATCH_NORM, LAYERS], ids=["batch norm", "layers"])
def test_simulated_training_equals_the_inline_run_bitwise(
    tmp_path: Path, protocol: str, rule: str, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, records = simulated(task, tmp_path, protocol, rule, worlds(3, 1))
    orders = [record.order for record in records if isinstance(record, Ordered)]
    arrivals = _Arrivals([record.fact for record in records if isinstance(record, Handed)])
    with same_arrivals(arrivals, monkeypatch):  # type: ignore[arg-type]
        inline = train(
            task, tmp_path / "inline", workers=3, protocol=protocol, staleness=rule,
            engine="inline",
        )  # fmt: skip
    assert inline.orders == orders
    assert differ(state, inline.state) == 0.0
    told = [(record.ticket, record.scale) for record in records if isinstance(record, Scaled)]
    assert scaled_of(inline) == told
    if rule == "drop:1":
        assert any(isinstance(order, Discard) for order in orders)
    elif rule.startswith("distance"):
        assert min(scale for _, scale in told) < 1.0


@pytest.mark.parametrize("rule", RULES)
def test_live_run_follows_the_update_equation_and_uses_samples_once(
    tmp_path: Path, rule: str
) -> None:
    live = train(
        TASK, tmp_path, workers=3, protocol="k-batch-async:2", staleness=rule, slow=("0=3x",),
        delay=("exp:3ms",),
    )  # fmt: skip
    expected, scales = equation(TASK, live.records, rule)
    assert differ(live.state, expected) < CLOSE
    assert_each_sample_once(live, NUM_SAMPLES, EPOCHS)
    summary = live.summary
    assert summary.staleness_rule == rule
    assert summary.protocol == f"k-batch-async:2+{rule}"
    assert summary.mean_scale == pytest.approx(sum(scales) / len(scales))
    dropped = sum(isinstance(order, Discard) for order in live.orders)
    assert summary.discarded_pushes == dropped
    assert rule == "drop:1" or dropped == 0


def test_rule_without_effect_changes_nothing(tmp_path: Path) -> None:
    one = train(TASK, tmp_path / "one", workers=2, protocol="full-sync", staleness="inverse")
    other = train(TASK, tmp_path / "other", workers=2, protocol="full-sync")
    assert one.path == "peers"
    assert differ(one.state, other.state) == 0.0
    assert one.summary.staleness_rule == "none"


def scaled_of(run: Run) -> list[tuple[object, float]]:
    return [(record.ticket, record.scale) for record in run.records if isinstance(record, Scaled)]


class _Arrivals:
    """The pushes of a run, in order."""

    def __init__(self, pushes: list[Pushed]) -> None:
        self.pushes = pushes
