"""Whether all members drew the same order of an epoch, by the digests with which they arrive.

    members that were there before   differ -> the run is refused
    a newcomer                       differs from them -> it is sent away, the others go on

Leases are positions in that order: where two members hold different ones, some samples would be
used twice and others never, and the ledger could not know. This module must not know samplers.
"""

from collections.abc import Mapping

from ..errors import ConfigError
from ..wire.messages import SentAway
from .run import Run

_REMEDY = (
    "so some samples would be used twice and others never: the loader's sampler has random "
    "numbers of its own (random.Random(), np.random.default_rng()) or lists what has no order (a "
    "set, os.listdir); let it draw from torch, random or numpy.random themselves, which are "
    "seeded alike for every epoch, or seed its own in set_epoch(epoch)"
)


class Orders:
    """The orders of one run's epochs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._opened = -1, ""

    def is_other(self, member: int, epoch: int, digest: str) -> bool:
        """Whether a newcomer drew another order than the open epoch's; it is sent away then."""
        if self._opened in ((epoch, digest), (-1, "")) or self._opened[0] != epoch:
            return False
        self._send_away(member)
        return True

    def compare(self, epoch: int, digests: Mapping[int, str]) -> bool:
        """Whether the epoch can open: all live members drew one order.

        Raises:
            ConfigError: members that were there before drew different ones.
        """
        run = self._run
        old = [number for number in run.live if number in run.coordinator_members] or run.live
        first = old[0]
        for number in old:
            if digests[number] != digests[first]:
                seats = (run.roster[first].seat, run.roster[number].seat)
                raise ConfigError(
                    f"workers {seats[0]} and {seats[1]} drew different orders for epoch "
                    f"{epoch + 1}, {_REMEDY}"
                )
        others = [number for number in run.live if digests[number] != digests[first]]
        for number in others:
            self._send_away(number)
        self._opened = epoch, digests[first]
        return not others

    def _send_away(self, member: int) -> None:
        run = self._run
        run.observer.note(
            f"worker {run.roster[member].seat} came back and drew another order of the samples "
            "than the others: its sampler has random numbers of its own; it is sent away"
        )
        run.engine.tell(member, SentAway())
