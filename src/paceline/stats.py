"""What a run counts while it goes: cheap numbers, for the live table and the tests.

The trace tells everything; these are for whoever cannot wait for it. They must cost next to
nothing: one addition an event.
"""

from typing import Any


class Stats:
    """What a run has counted so far."""

    __slots__ = ("cancelled", "discarded", "late", "staleness_versions", "updates")

    def __init__(self) -> None:
        self.updates = 0
        self.late = 0
        self.discarded = 0
        self.cancelled = 0
        self.staleness_versions: dict[int, int] = {}  # lag of a push at its update -> how many

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can carry it."""
        counters = {name: getattr(self, name) for name in self.__slots__}
        return counters | {"staleness_versions": sorted(map(list, self.staleness_versions.items()))}

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state()` described."""
        for name in self.__slots__:
            setattr(self, name, state[name])
        self.staleness_versions = dict(state["staleness_versions"])
