"""Attributes of classes and modules that are exchanged for a while, and put back.

This module must not know what is exchanged, nor why.
"""

import sys
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

_ABSENT = object()
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")
_OURS = __file__.rpartition("/observed/")[0]


class Patches:
    """What was exchanged, in order."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, object]] = []

    def wrap(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Put what ``make`` makes of an attribute in its place; nothing where there is none."""
        found = getattr(owner, name, None)
        if found is None:
            return
        self._old.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, make(found))

    def undo(self) -> None:
        """Put everything back."""
        for owner, name, old in reversed(self._old):
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._old.clear()


class Place(NamedTuple):
    """A line of somebody's own code."""

    file: str = ""
    line: int = 0


NOWHERE = Place()


def user_place(depth: int = 2) -> Place:
    """The innermost line that stands in no library and not here; none: `NOWHERE`."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith((_OURS, "<")):
            return Place(name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends at None
    return NOWHERE


def called_by_user(depth: int = 2) -> Place:
    """The line that calls, where that is somebody's own; else `NOWHERE`."""
    frame = sys._getframe(depth)
    name = frame.f_code.co_filename
    if name.startswith(_LIBRARIES) or name.startswith((_OURS, "<")):
        return NOWHERE
    return Place(name, frame.f_lineno)
