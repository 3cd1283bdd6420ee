"""Which parameters the model of a run in virtual time holds, and which old ones are kept.

    newest version -> in the store's block     older ones -> kept as long as somebody needs them

This module must not know members, gradients or time.
"""

from torch import Tensor

from ..store.parameter_store import SharedStore


class Versions:
    """The versions that somebody still has to compute at.

    Args:
        home: the model's memory.
        is_pure: whether computing leaves what the model holds as it is.

    Attributes:
        most_kept: versions besides the newest, at any time.
    """

    def __init__(self, store: SharedStore, home: Tensor, *, is_pure: bool) -> None:
        self._store = store
        self._home = home
        self._is_pure = is_pure
        self._home_version = -1
        self._holders: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}
        self.most_kept = 0

    @property
    def newest(self) -> Tensor:
        """Parameters and buffers of the newest version, in the store."""
        return self._store.blocks[self._store.current][: self._home.numel()]

    @property
    def num_held(self) -> int:
        """Versions that somebody needs."""
        return len(self._holders)

    def hold(self, version: int) -> None:
        """One member more needs it; it is the newest."""
        assert version == self._store.version
        self._holders[version] = self._holders.get(version, 0) + 1

    def release(self, version: int) -> None:
        """One member less needs it."""
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            self._kept.pop(version, None)

    def pull(self, version: int) -> None:
        """The model becomes ``version``: the newest, or one that is held."""
        if version == self._home_version and self._is_pure:
            return
        kept = self._kept.get(version)
        if kept is None:
            assert version == self._store.version
            kept = self.newest
        self._home.copy_(kept)
        self._home_version = version

    def keep(self) -> None:
        """The newest is about to be replaced: it is kept aside if somebody needs it."""
        version = self._store.version
        if version in self._holders:
            self._kept[version] = self.newest.clone()
            self.most_kept = max(self.most_kept, len(self._kept))
