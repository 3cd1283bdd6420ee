"""Replace attributes of classes and modules for a while, and restore them.

This module must not know what is replaced, nor why.
"""

import sys
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

_ABSENT = object()
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")
_DOCTOR = __file__.rpartition("/observed/")[0]


class Patches:
    """The attributes that were replaced, in order, so that all can be restored."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, object]] = []

    def wrap(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by ``make(attribute)``, if the owner has it."""
        attribute = getattr(owner, name, None)
        if attribute is None:
            return
        self._old.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, make(attribute))

    def undo(self) -> None:
        """Restore every attribute."""
        for owner, name, old in reversed(self._old):
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._old.clear()


class Place(NamedTuple):
    """A line of the user's own code."""

    file: str = ""
    line: int = 0


NOWHERE = Place()


def user_place(depth: int = 2) -> Place:
    """Return the innermost calling line of the user's code, or `NOWHERE`.

    Args:
        depth: frames to skip, this function's included.
    """
    frame = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith((_DOCTOR, "<")):
            return Place(file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]  # the loop ends at None
    return NOWHERE


def called_by_user(depth: int = 2) -> Place:
    """Return the line that calls directly, if it is the user's code, or else `NOWHERE`.

    Args:
        depth: frames to skip, this function's included.
    """
    frame = sys._getframe(depth)
    file = frame.f_code.co_filename
    if file.startswith(_LIBRARIES) or file.startswith((_DOCTOR, "<")):
        return NOWHERE
    return Place(file, frame.f_lineno)
