"""The shards of a store: locks whose next holder learns what its predecessor left unfinished.

Beside each lock lies one word, the journal: the control words of the key that is being changed
under it, 0 when nothing is. A holder that dies or raises leaves its journal behind, and whoever
comes next cuts that key's chain: pushes under way begin again at the newest whole version. This
module must not know what a push does.
"""

from typing import Final

from ..store.memory import WORD_BYTES
from ..store.region import Region
from .index import shard_lock
from .locks import FREE_WORDS, open_lock

PUBLISHED: Final = 0
"""``4 * version + block`` of the newest whole version."""
CHAIN: Final = 1
"""How often pushes under way were cut off because one of them died."""
LAST: Final = 2
"""The shard of the key's last slice: under its lock versions are published and chains are cut."""
GENERATIONS: Final = 3
"""Three words, one a block: odd while it is being written."""


class Shards:
    """The locks of one store, as one process holds them.

    A thread that holds one shard may enter only a higher one. That order excludes deadlock.
    """

    def __init__(self, region: Region, num_shards: int, patience_s: float) -> None:
        self._words = region.words
        offsets = [shard_lock(shard) for shard in range(num_shards)]
        self._locks = [
            open_lock(region, offset, f"shard {shard}", patience_s)
            for shard, offset in enumerate(offsets)
        ]
        self._journals = [offset // WORD_BYTES + FREE_WORDS for offset in offsets]

    def enter(self, shard: int, control: int) -> None:
        """Wait for a shard and note the key to be changed: the number of its first word, or 0."""
        self._locks[shard].acquire()
        journal = self._journals[shard]
        if self._words[journal]:
            self.cut(shard, self._words[journal])
        self._words[journal] = control

    def leave(self, shard: int) -> None:
        """Open a shard: what was begun is whole, or nobody will look at it."""
        self._words[self._journals[shard]] = 0
        self._locks[shard].release()

    def abandon(self, shard: int) -> None:
        """Open a shard as a death would: the next to enter cuts the key's chain."""
        self._locks[shard].release()

    def cut(self, shard: int, control: int) -> None:
        """Make the key's pushes under way begin again; ``shard`` is held.

        A death in here leaves the journal of ``shard`` behind, so the next to enter does it again.
        """
        last = self._words[control + LAST]
        if last == shard:
            self._words[control + CHAIN] += 1
            return
        self.enter(last, control)
        self._words[control + CHAIN] += 1
        self.leave(last)
