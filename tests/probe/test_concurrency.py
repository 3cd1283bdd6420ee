"""One job in several ways: waiting gains by all of them; invalid numbers are refused."""

import pytest

from paceline.bench.samples import Timing
from paceline.cli.app import run
from paceline.errors import ConfigError
from paceline.probe import concurrency
from paceline.probe.concurrency import (
    WAYS,
    Concurrency,
    JobTimes,
    measure_concurrency,
    render_concurrency,
)


def times(kind: str, *seconds: float) -> JobTimes:
    ways = {
        name: Timing(name=name, samples_s=(one,)) for name, one in zip(WAYS, seconds, strict=True)
    }
    return JobTimes(kind=kind, ways=ways)


def test_cheapest_way_that_is_nearly_the_fastest_is_advised() -> None:
    result = Concurrency(
        jobs=8, at_once=4, cores=2, has_lock=True,
        kinds=(
            times("waiting", 8.0, 2.0, 2.0, 1.9), times("Python", 8.0, 8.0, 8.4, 4.1),
            times("library", 8.0, 8.0, 4.1, 4.0), times("another", 8.0, 8.0, 8.0, 8.8),
        ),
        make_s=dict.fromkeys(WAYS[1:], 1e-5), talk_s=dict.fromkeys(WAYS[1:], 1e-6),
    )  # fmt: skip
    text = "\n".join(render_concurrency(result))
    assert "waiting: coroutines (4.00 times" in text
    assert "Python: processes (1.95 times" in text
    assert "library: threads (1.95 times" in text
    assert "another: one after the other" in text
    assert "4 at once is more than 2 cores" in text
    assert "one thread runs Python code at a time" in text


def test_every_kind_is_measured_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_AIM_S", 0.005)
    monkeypatch.setattr(concurrency, "_ROUNDS", 1)
    monkeypatch.setattr(concurrency, "_WORDS", 5)
    result = measure_concurrency(2, 1, lambda line: None)
    assert [kind.kind for kind in result.kinds] == ["waiting", "Python", "library"]
    assert all(kind.ways.keys() == {*WAYS} for kind in result.kinds)
    assert all(seconds > 0 for seconds in (*result.make_s.values(), *result.talk_s.values()))


@pytest.mark.parametrize(("cores", "begun"), [(96, 64), (4, 4)])
def test_default_at_once_is_the_number_of_cores_up_to_64(
    cores: int, begun: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(jobs: int, at_once: int, say: object) -> Concurrency:
        raise ConfigError(f"{at_once} at once")

    monkeypatch.setattr("paceline.system.processors.num_cores", lambda: cores)
    monkeypatch.setattr(concurrency, "measure_concurrency", refused)
    assert run(["bench", "concurrency"]) == 2
    assert f"{begun} at once" in capsys.readouterr().err


@pytest.mark.parametrize(("jobs", "at_once"), [(0, 1), (1, 0), (1001, 1), (1, 65)])
def test_invalid_numbers_are_refused(jobs: int, at_once: int) -> None:
    with pytest.raises(ConfigError, match=r"--jobs must be 1 to 1000 and --at-once 1 to 64"):
        measure_concurrency(jobs, at_once, lambda line: None)
