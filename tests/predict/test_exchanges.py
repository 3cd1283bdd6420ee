"""Collective operations are timed by the calls of a run."""

from collections.abc import Callable

import pytest

from paceline.collectives.base import LinkCost
from paceline.predict.exchanges import ExchangeCosts, measure
from paceline.predict.split_costs import _measured
from paceline.spread.units import ParameterUnit
from threaded import in_threads


def test_exchange_operations_are_timed_by_all_workers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prices follow the real calls of units; more bytes take longer."""
    called = dict.fromkeys(("gather", "reduce"), 0)
    for name in called:
        own: Callable[..., None] = getattr(ParameterUnit, name)

        def counted(self: object, name: str = name, own: Callable[..., None] = own) -> None:
            called[name] += 1
            own(self)

        monkeypatch.setattr(ParameterUnit, name, counted)
    for result in in_threads(2, lambda ranks: measure(ranks.near(ranks.part("near", range(2))))):
        assert result.size == 2
        assert result.meeting_s > 0.0
        assert result.turn_s >= 0.0
        for curve in (result.gather_s, result.reduce_s, result.sum_s):
            assert 0.0 < curve[0][1] < curve[-1][1]
            assert [size for size, _ in curve] == sorted(size for size, _ in curve)
    assert min(called.values()) > 20


def test_more_workers_than_measured_take_longer() -> None:
    curve = ((1, 1.0), (100, 100.0))
    result = ExchangeCosts(4, LinkCost(latency_s=0.0, s_per_byte=0.0), 1.0, 2.0,
                          curve, curve, curve)  # fmt: skip
    alike = _measured(result, 4, places=2)
    assert [alike.gather_s(50), alike.reduce_s(50), alike.sum_s(50, 4)] == [50.0] * 3
    more = _measured(result, 8, places=2)  # twice as many per core
    assert more.gather_s(50) == pytest.approx(2 * (7 / 8) / (3 / 4) * 50)
    assert (more.meeting_s, more.turn_s) == (2.0, 4.0)
    assert more.sum_s(50, 8) == pytest.approx(2 * 2 * 50)  # each reads what all have
    pair = alike.sum_s(50, 2)  # two of them, at the same time as the two others
    assert pair == pytest.approx(2 / 4 * 50)
