"""The weight of a stale push: the rules, their names, and a protocol's decisions under one."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.errors import ConfigError, ProtocolError
from paceline.events import Apply, Discard, Grant, Joined, Pushed, Release, Ticket
from paceline.protocols import PROTOCOLS, parse, with_number
from paceline.protocols.staleness import RULES, Distance, parse_staleness
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.timing import TimingRun
from paceline.store.control import PASS, Control, control_bytes
from paceline.store.means import allowed_scale
from paceline.store.memory import PrivateMemory
from paceline.store.parameter_store import SharedStore
from paceline.trace import Trace, read_trace
from runs import leases_of

NUMBERS = {"distance": "distance:0.1", "drop": "drop:2"}
TEXTS = [NUMBERS.get(name, name) for name in RULES]


@pytest.mark.parametrize("text", TEXTS)
def test_a_fresh_push_has_full_weight_and_a_rule_is_written_as_it_is_read(text: str) -> None:
    rule = parse_staleness(text)
    assert (rule.scale(0), rule.is_dropped(0)) == (1.0, False)
    assert str(rule) == text
    assert all(0.0 < rule.scale(lag) <= rule.scale(lag - 1) for lag in range(1, 50))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("invers", "unknown staleness rule 'invers'; did you mean 'inverse'"),
        ("inverse:2", "staleness inverse takes no number, got 'inverse:2'; write inverse"),
        ("drop", "whole number S >= 0 .* got 'drop'; write for example drop:4"),
        ("drop:-1", "whole number S >= 0"),
        ("drop:1.5", "whole number S >= 0"),
        ("distance", "number C > 0 .* write for example distance:5e-05"),
        ("distance:0", "number C > 0"),
        ("distance:nan", "number C > 0"),
        ("distance:inf", "number C > 0"),
    ],
)
def test_a_wrong_rule_is_refused_with_advice(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("async", 2, text)
    with pytest.raises(ConfigError, match=message):
        parse(f"async+{text}", 2)


def test_two_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="names a staleness rule, but inverse is set too"):
        parse("async+drop:2", 4, "inverse")


def test_a_rule_without_effect_is_left_out_and_reported() -> None:
    idle = parse("k-sync:2", 4, "inverse")
    assert str(idle) == "k-sync:2"
    assert idle.idle_note() == (
        "staleness inverse has no effect: under k-sync:2 no gradient is stale"
    )
    assert "one worker" in parse("async", 1, "drop:3").idle_note()
    assert parse("async", 2, "drop:3").idle_note() == ""


def test_the_protocol_does_not_see_a_dropped_push() -> None:
    protocol = parse("k-async:2", 3, "drop:1")
    protocol.answer(Joined(0, 0.0), 0)
    before = protocol.state()
    stale = Pushed(Ticket(0, 0, 3), 4, 0.5, True, 1.0)
    assert protocol.answer(stale, 5) == [Discard(stale.ticket), Release(0)]
    assert protocol.state() == before
    assert protocol.answer(stale, 4) == protocol_without_rule(stale)


def protocol_without_rule(push: Pushed) -> list[object]:
    protocol = parse("k-async:2", 3)
    protocol.react(Joined(0, 0.0))
    return list(protocol.react(push))


def test_weights_are_scaled_by_the_lag_at_the_update() -> None:
    protocol = parse("k-batch-async:2", 3, "inverse")
    tickets = [Ticket(0, 4, 7), Ticket(1, 2, 4)]
    for member in range(3):
        protocol.answer(Joined(member, 0.0), 0)
    assert protocol.answer(Pushed(tickets[0], 1, 0.5, True, 1.0), 7) == [Release(0)]
    update = protocol.answer(Pushed(tickets[1], 3, 0.5, True, 2.0), 7)[0]
    assert update == Apply(tuple(tickets), (1 / 4 * 1.0, 3 / 4 * 1 / 4))


def test_weights_that_only_a_rule_allows_are_refused_without_one() -> None:
    protocol = parse("async", 2)
    run = SimulatedRun(protocol, Ledger(10, 1, 1), conditions(2))
    protocol.react = lambda fact: (  # type: ignore[method-assign]
        [Apply((fact.ticket,), (0.5,))] if isinstance(fact, Pushed) else [Release(fact.member)]  # type: ignore[union-attr]
    )
    with pytest.raises(ProtocolError, match="one weight a push, with a sum of 1"):
        run.run(5)


def conditions(num_workers: int, seed: int = 0) -> Conditions:
    delays = tuple(parse_delay(f"exp:{worker + 1}ms") for worker in range(num_workers))
    return Conditions(delays=delays, seed=seed)


STALE = [name for name, one in PROTOCOLS.items() if one.has_stale_pushes]


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_only_protocols_that_declare_it_use_stale_pushes(name: str) -> None:
    text = with_number(name, 2)
    counts = TimingRun(parse(text, 5), conditions(5)).run(300)
    assert (max(counts.staleness) > 0) is PROTOCOLS[name].has_stale_pushes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(STALE), st.integers(2, 5), st.integers(0, 3), st.integers(0, 99),
    st.integers(20, 60),
)  # fmt: skip
def test_dropped_samples_return_and_no_staler_push_is_used(
    name: str, num_workers: int, most: int, seed: int, num_samples: int
) -> None:
    """Each sample of each epoch is in exactly one update, whatever is dropped."""
    text = with_number(name, 2)
    protocol = parse(text, num_workers, f"drop:{most}")
    orders = []
    run = SimulatedRun(
        protocol, Ledger(num_samples, 4, protocol.num_pushes), conditions(num_workers, seed),
        hear_epoch=lambda epoch, at_s: epoch < 1,
    )  # fmt: skip
    carry_out = run._work.carry_out
    run._work.carry_out = lambda made, fact: orders.extend(made) or carry_out(made, fact)  # type: ignore[method-assign, func-returns-value]
    counts = run.run(None)
    leases = leases_of(orders)
    used = [Counter[int](), Counter[int]()]
    for order in orders:
        if isinstance(order, Apply):
            for ticket in order.tickets:
                for lease in leases[ticket[:2]]:
                    used[lease.epoch].update(range(lease.start, lease.stop))
    assert used == [Counter(range(num_samples))] * 2
    assert max(counts.staleness) <= most
    assert counts.discarded == sum(isinstance(order, Discard) for order in orders)
    assert sum(isinstance(order, Grant) for order in orders) >= counts.pushes + counts.discarded


def test_time_spent_on_a_dropped_push_is_wasted() -> None:
    kept = TimingRun(parse("async", 4), conditions(4)).run(200)
    dropped = TimingRun(parse("async", 4, "drop:0"), conditions(4)).run(200)
    assert kept.discarded == kept.wasted_s == 0
    assert dropped.discarded > 0
    assert dropped.wasted_s > 0
    assert max(dropped.staleness) == 0


def test_the_trace_keeps_the_scale_of_the_distance_rule(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(task="tiny")
    trace.scaled(1.5, Ticket(1, 2, 3), 0.1 + 0.2)
    trace.close()
    scaled = list(read_trace(tmp_path / "trace.jsonl"))[1]
    assert (scaled.ticket, scaled.scale) == (Ticket(1, 2, 3), 0.1 + 0.2)  # type: ignore[union-attr]
    assert Distance(0.5).distance_limit == 0.5


def test_a_member_that_takes_over_a_push_uses_the_measured_scale() -> None:
    """Half of a sum was scaled by a member that died: the rest gets the same scale."""
    control = Control(PrivateMemory(control_bytes(2)), 2)
    store = SharedStore.__new__(SharedStore)
    store.control = control
    assert store.scale_once(8, lambda: 0.25) == 0.25
    control[PASS] = 8
    assert store.scale_once(8, lambda: 0.0) == 0.25
    assert store.scale_once(9, lambda: 0.0) == 0.0, "nobody had begun: nobody knows how far"


def test_a_step_is_as_long_as_the_distance_allows() -> None:
    groups = [{"lr": 0.1}, {"lr": 0.2}]
    assert allowed_scale(0.5, 0.0, groups) == 1.0
    assert allowed_scale(0.5, 2.0, groups) == 1.0
    assert allowed_scale(0.5, 10.0, groups) == pytest.approx(0.5 / 10.0 / 0.2)
    assert allowed_scale(0.5, 10.0, [{}]) == 1.0
