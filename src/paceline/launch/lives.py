"""The lives of one run whose workers were all gone: when it begins again, and from where.

    AllGone -> the newest checkpoint, or the start -> the same run once more

It is what `--resume` does, within one call. Faults that were ordered and have come do not come
again. A run that ends so again and again without getting further is given up. This module must not
know processes.
"""

import dataclasses
from collections.abc import Sequence

from ..checkpoints.resumption import Origin, has_checkpoint, read
from ..conditions.faults import FaultPlan
from ..config import RunSettings
from ..errors import AllGone
from ..system.files import OpenFolder
from ..trace import Trace

MOST_IN_VAIN = 3
"""Lives in a row that may end without a version that the run had not reached before."""


class Lives:
    """One run, as often as it lives.

    Attributes:
        settings: of the next life.
        origin: where it comes from.
        place: the folder of the run.
        within: its identity; of another one where it was deleted and made again.
        has_begun: whether its workers ever began to train.
    """

    def __init__(self, settings: RunSettings, origin: Origin, place: OpenFolder) -> None:
        self.settings = settings
        self.origin = origin
        self.place = place
        self.within = place.identity
        self.has_begun = origin.resumption is not None
        self._furthest = -1 if origin.resumption is None else origin.resumption.version
        self._in_vain = 0

    def lived(self, trace: Trace) -> None:
        """A life is over, which wrote this trace."""
        self.has_begun |= trace.has_begun
        self.within = trace.within

    def go_on(self, error: AllGone, version: int, happened: Sequence[str]) -> str:
        """Get ready for the next life, after one that came to ``version``; what to say of it.

        Raises:
            AllGone: it has ended so too often.
        """
        self._in_vain = 0 if version > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, version)
        if self._in_vain >= MOST_IN_VAIN:
            raise AllGone(
                f"{error}\nthe run ended so {self._in_vain} times without getting beyond update "
                f"{max(self._furthest, 0)}: it is not begun again"
            )
        settings = self.settings
        left = FaultPlan.parse(settings.fault, settings.workers).without(happened)
        self.settings = dataclasses.replace(settings, fault=tuple(map(str, left.faults)))
        folder = self.place.path
        found = read(folder) if has_checkpoint(folder) else None
        where = "from the start" if found is None else f"from update {found.version}"
        text = f"no worker is left ({error}): the run begins again {where}"
        self.origin = Origin(about=self.origin.about, resumption=found, note=text)
        return text
