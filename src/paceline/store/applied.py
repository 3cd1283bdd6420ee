"""How many updates changed the parameters: what a schedule counts.

An update that is skipped, because a gradient in it was not finite, makes a version all the same.
Who writes version v + 1 reads the count of v and writes that of v + 1, each in a word of its own,
so who does it again for a dead member, or beside others, comes to the same. This module must not
know why an update was skipped.
"""

from .control import SKIPPED, Control


class Applied:
    """The counts of the two newest versions, in the run's words."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def of(self, version: int) -> int:
        """Updates until ``version`` that changed something; for an older version, never more."""
        return version - self._control[SKIPPED[version & 1]]

    def bring(self, version: int, *, is_update: bool) -> None:
        """Note, before ``version`` stands, whether it differs from the one before it."""
        skipped = self._control[SKIPPED[~version & 1]]
        self._control[SKIPPED[version & 1]] = skipped + (not is_update)
