"""The outcome of a trial is measured once, even if several workers ask at the same time."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.speed import Finding, Outcome, Speed
from paceline.system.files import OpenFolder
from paceline.tuning.remembered import folder, key_of, remembered

OUTCOME = Outcome(
    speed=Speed(compile="default", channels_last=True, threads=2),
    findings=(Finding(name="compile", what="compile", gain=1.5, is_kept=True, once_s=12.0),),
    before_s=0.042,
    after_s=0.028,
    num_samples=256,
    batch_size=256,
    took_s=21.0,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_second_request_reads_the_stored_outcome() -> None:
    assert remembered("a", lambda: OUTCOME) == (OUTCOME, False)
    assert remembered("a", pytest.fail) == (OUTCOME, True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"speed": {}}'])
def test_damaged_file_is_measured_again(text: str) -> None:
    remembered("a", lambda: OUTCOME)
    (folder() / "a.json").write_text(text)
    assert remembered("a", lambda: OUTCOME) == (OUTCOME, False)


def test_incomplete_outcome_is_kept_for_a_day() -> None:
    partial = replace(OUTCOME, findings=(Finding(name="a", what="a", was_tried=False),))
    remembered("a", lambda: partial)
    assert remembered("a", pytest.fail) == (partial, True)
    past_s = time.time() - 86_401
    os.utime(folder() / "a.json", (past_s, past_s))
    assert remembered("a", lambda: OUTCOME) == (OUTCOME, False)
    os.utime(folder() / "a.json", (past_s, past_s))
    assert remembered("a", pytest.fail) == (OUTCOME, True)


def test_disturbed_outcome_is_kept_for_a_minute() -> None:
    disturbed = replace(OUTCOME, is_steady=False)
    remembered("a", lambda: disturbed)
    assert remembered("a", pytest.fail) == (disturbed, True)
    past_s = time.time() - 61
    os.utime(folder() / "a.json", (past_s, past_s))
    assert remembered("a", lambda: OUTCOME) == (OUTCOME, False)


@pytest.mark.parametrize("is_shared", [False, True])
def test_unwritable_cache_is_an_error_only_for_several_workers(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    counts: list[int] = []

    def measure() -> Outcome:
        counts.append(1)
        return OUTCOME

    monkeypatch.setattr(OpenFolder, "replace", raising(OSError(28, "No space left on device")))
    if is_shared:
        with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
            remembered("b", measure, is_shared=True)
    else:
        assert remembered("b", measure) == (OUTCOME, False)
    assert counts == [1]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_one_of_several_concurrent_requests_measures() -> None:
    counts: list[bool] = []
    asked = threading.Semaphore(0)

    def measure() -> Outcome:
        for _ in range(4):
            assert asked.acquire(timeout=30)
        time.sleep(0.1)  # so that the others wait at the lock, or would have passed it
        return OUTCOME

    def ask() -> None:
        asked.release()
        counts.append(remembered("a", measure)[1])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for one in threads:
        one.join()
    assert sorted(counts) == [False, True, True, True]


def test_failed_measurement_stores_nothing() -> None:
    def fail() -> Outcome:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        remembered("a", fail)
    assert remembered("a", lambda: OUTCOME) == (OUTCOME, False)


def test_keys_depend_on_every_part() -> None:
    assert key_of([1, "a"]) == key_of([1, "a"])
    assert key_of([1, "a"]) != key_of([1, "b"])


def test_lines_give_the_speedup_and_when_it_is_repaid() -> None:
    kept, *_ = OUTCOME.lines()
    assert kept == (
        "fast: compile 1.50x (12 s once, repaid after 857 steps); "
        "together 1.50x, 42.0 -> 28.0 ms a step"
    )
