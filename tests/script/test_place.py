"""A loop's position, counted from its own steps and the versions that it holds."""

from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.place import LoopPlace, values_of


@pytest.mark.parametrize(
    ("epochs", "num_asked", "values"),
    [
        (3, None, [0, 1, 2]),
        (3, 5, [0, 1, 2, 3, 4]),
        (range(1, 4), None, [1, 2, 3]),
        (range(10, 0, -5), 3, [10, 5, 0]),
        ([2, 7], None, [2, 7]),
        (np.arange(2, 5), 2, [2, 3]),
        (np.int64(2), None, [0, 1]),
    ],
)
def test_epochs_are_numbered_as_the_script_asks(
    epochs: Any, num_asked: int | None, values: list[int]
) -> None:
    assert list(values_of(epochs, num_asked)) == values


@pytest.mark.parametrize(
    ("epochs", "num_asked", "words"),
    [
        ([1, 2], 3, "3 epochs were asked for.*has 2 values"),
        (2.5, None, "got 2.5"),
        ("12", None, "got '12'"),
        ([1, True], None, "got True in it"),
    ],
)
def test_an_invalid_number_of_epochs_is_refused(
    epochs: Any, num_asked: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        values_of(epochs, num_asked)


def test_skipped_steps_are_known_from_the_applied_updates() -> None:
    exchange = SoloExchange()
    place = LoopPlace(exchange, lambda: True, is_lockstep=True, is_local=False)
    place.open()
    place.opened()
    skipped = []
    for is_skipped in (False, True, False):
        assert place.is_in_step
        place.begin_step(exchange.version, found_inf=False, has_scaled=False)
        exchange.skip() if is_skipped else exchange.push()
        place.end_step()
        skipped.append(place.was_skipped)
    assert skipped == [False, True, False]
    assert (place.num_steps, place.next_version, place.applied(3)) == (3, 3, 2)
    place.open()
    assert place.was_current
    assert (place.num_steps, place.num_run_steps, place.epoch_applied) == (0, 3, 2)
