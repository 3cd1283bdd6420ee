"""The main worker's printed lines, followed in its log.

This module must not know processes or terminals.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from .files import open_to_read


class Tail:
    """Shows what the main worker prints, from its log.

    Args:
        paths: each worker's log; the first one's is followed at first.
    """

    def __init__(self, paths: Sequence[Path], show: Callable[[str], None]) -> None:
        self._paths = paths
        self._path = paths[0]
        self._show = show
        self._seen = self._size()

    def follow(self, seat: int) -> None:
        """Show the end of what the last main worker printed, and from now on this one's words."""
        self.show(is_last=True)
        self._path = self._paths[seat]
        self._seen = self._size()

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def show(self, is_last: bool = False) -> None:
        """Show the whole lines that are new; at the last, also one that was not ended."""
        try:
            with open_to_read(self._path) as file:
                file.seek(self._seen)
                data = file.read()
        except OSError:
            return
        whole = data if is_last else data[: data.rfind(b"\n") + 1]
        if whole:
            self._seen += len(whole)
            self._show(whole.decode(errors="replace"))
