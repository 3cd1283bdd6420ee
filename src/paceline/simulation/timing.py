"""Only the timing of a protocol in virtual time: endless data, and nothing kept but counts.

    protocol, conditions -> bulk.py, where both are plain: many updates at once, on arrays
                         `> lean.py, everywhere else: one event after another, by react
                                                                              -> counts

Both give the same updates at the same times, with the same staleness (tests/engines/test_bulk.py).
"""

from collections.abc import Callable
from typing import Protocol

from ..conditions.world import Conditions
from ..protocols.base import SyncProtocol
from .bulk import bulk_driver
from .counts import Counts
from .lean import LeanDriver

_PUSHES_A_TURN = 50_000
_UPDATES_A_TURN = 256
"""At least, between two words about the progress."""


class Driver(Protocol):
    """What makes time pass."""

    counts: Counts

    def advance(self, num_updates: int) -> None:
        """Go on until so many updates are made in all, and count."""

    def there_s(self, at_s: float) -> float:
        """Seconds that workers were there until then, summed."""


class TimingRun:
    """One protocol under some conditions."""

    def __init__(self, protocol: SyncProtocol, conditions: Conditions) -> None:
        self._driver: Driver = bulk_driver(protocol, conditions) or LeanDriver(protocol, conditions)
        self._turn = max(_UPDATES_A_TURN, _PUSHES_A_TURN // protocol.num_pushes)

    def run(
        self, num_updates: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> Counts:
        """Go on until so many updates are made in all; ``on_progress`` hears of them at times."""
        driver, counts = self._driver, self._driver.counts
        while counts.updates < num_updates:
            driver.advance(min(num_updates, counts.updates + self._turn))
            on_progress(counts.updates)
        counts.there_s = driver.there_s(counts.times_s[-1])
        return counts
