"""A member's local changes, where an update covers a fragment of the model (local-sgd).

    home    own 0 | own 1 | own 2      pushed: base - home, of the fragment that is due
    base      w 0 |   w 1 |   w 2      the global copy; w 1 has just arrived

    arrived    no overlap    own 0 | w 1 | own 2                         at once
               O steps       own 0 | (own 1 + w 1) / 2 | own 2           O own steps later, or when
                                                                         the next push comes first

See protocols/streaming.py. This module must not know protocols, nor how a version comes about.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..store.fragments import Fragment, Fragments
from ..store.means import merge_into

if TYPE_CHECKING:
    from .model_copy import ModelCopy


class _HandedIn(NamedTuple):
    """A fragment that was pushed, for the update that is made on ``version``."""

    version: int
    fragment: Fragment


class OwnChanges:
    """The local changes of one member.

    Args:
        copy: its model.
        overlap_steps: steps until an update that arrived is merged; 0: at once.

    Attributes:
        due: the fragment that the next update covers.
        halfway: called halfway through the steps that are made while a mean is in flight.
        before_merge: finishes a mean in flight, so that ``base`` holds it.
    """

    def __init__(self, copy: "ModelCopy", num_fragments: int, overlap_steps: int) -> None:
        self._copy, self.overlap_steps = copy, overlap_steps
        self.fragments = Fragments(copy.replica.layout.parameters, num_fragments)
        self.due = self.fragments.whole
        self.halfway: Callable[[], None] = _nothing
        self.before_merge: Callable[[], None] = _nothing
        self._stay = False
        """Whether there are local steps that were not exchanged."""
        self._handed_in: _HandedIn | None = None
        self._late: Fragment | None = None
        self._num_since = 0

    @property
    def are_by_parts(self) -> bool:
        """Whether an update may cover less than the whole model, or be merged later."""
        return len(self.fragments.each) > 1 or self.overlap_steps > 0

    @property
    def merges_later(self) -> bool:
        """Whether the update that is due is merged while the next steps are made."""
        return self.overlap_steps > 0 and self.due is not self.fragments.whole

    def turn_to(self, version: int, *, is_last: bool) -> None:
        """Choose what the next update, made on ``version``, covers.

        Args:
            is_last: whether it is its epoch's last, which covers all fragments.
        """
        self.due = self.fragments.of(version, is_last=is_last or not self.are_by_parts)

    def hand_in(self) -> None:
        """The fragment that is due was pushed."""
        self._stay, self._handed_in = True, _HandedIn(self._copy.version, self.due)

    def forget(self) -> None:
        """Drop local changes: the next ``take`` copies all of ``base``."""
        self._stay, self._handed_in, self._late = False, None, None

    def take(self, before: int, version: int) -> None:
        """Copy from ``base``, now at ``version``, to ``home``, which was at ``before``."""
        handed_in, self._handed_in = self._handed_in, None
        if not self._stay:
            self._overwrite(self.fragments.whole)
            return
        first = before
        if handed_in is not None:
            first = handed_in.version + 1
            if handed_in.version == version:  # more work for the same update
                self._overwrite(handed_in.fragment)
            else:
                self.arrived(handed_in.fragment)
        for fragment in self.fragments.between(first, version):
            self._overwrite(fragment)

    def catch_up(self) -> None:
        """Take over the update of what was handed in before a stop, which was pulled already."""
        if (handed_in := self._handed_in) is not None and handed_in.version < self._copy.version:
            self.arrived(handed_in.fragment)
            self._copy.unedited.mark()

    def arrived(self, fragment: Fragment) -> None:
        """The update of this fragment is made, or in flight."""
        self._handed_in = None
        if self.overlap_steps and fragment is not self.fragments.whole:
            self._stay, self._late, self._num_since = True, fragment, 0
            return
        self._stay = fragment is not self.fragments.whole
        self._late = None
        self._overwrite(fragment)

    def stepped(self) -> None:
        """This member made a local step."""
        self._num_since += 1
        if self._num_since >= self.overlap_steps:
            self.merge()
        elif self._late is not None and self._num_since == self.overlap_steps // 2:
            self.halfway()

    def merge(self) -> None:
        """Merge the update that arrived, if there is one."""
        fragment, self._late = self._late, None
        if fragment is None:
            return
        self.before_merge()
        copy = self._copy
        assert copy.base is not None
        merge_into(fragment.runs(copy.replica.layout.parameters), copy.base, copy.home)
        copy.unedited.mark()

    def _overwrite(self, fragment: Fragment) -> None:
        base, home = self._copy.base, self._copy.home
        assert base is not None
        part = slice(fragment.start, fragment.stop)
        home[part].copy_(base[part])

    # -- checkpoints ----------------------------------------------------------------------------

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint stores of them; empty if all were exchanged."""
        if not (self._stay and self.are_by_parts):
            return {}
        handed_in, late = self._handed_in, self._late
        return {
            "parameters": self._copy.replica.layout.parameters.of(self._copy.home).cpu().clone(),
            "handed in": handed_in and [handed_in.version, self._number(handed_in.fragment)],
            "late": None if late is None else self._number(late),
        }

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``remember`` returned."""
        if not saved:
            return
        copy, handed_in, late = self._copy, saved["handed in"], saved["late"]
        copy.replica.layout.parameters.of(copy.home).copy_(saved["parameters"])
        self._stay, self._num_since = True, 0
        self._late = None if late is None else self._at(late)
        if handed_in is not None:
            self._handed_in = _HandedIn(handed_in[0], self._at(handed_in[1]))
        copy.unedited.mark()

    def _number(self, fragment: Fragment) -> int:
        """Return its number; -1: the whole, unlike a single fragment, which is merged later."""
        if fragment is self.fragments.whole:
            return -1
        return next(i for i, part in enumerate(self.fragments.each) if part is fragment)

    def _at(self, number: int) -> Fragment:
        return self.fragments.whole if number == -1 else self.fragments.each[number]


def _nothing() -> None:
    return None
