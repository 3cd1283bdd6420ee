"""A fix that can be turned on and off between two steps of a running script.

    knob.turn(True) ... some steps ... knob.turn(False) ... some steps ...

This module must not know which fixes there are.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .patches import NOWHERE


class Knob:
    """The base of all fixes that are tried on a running script.

    Attributes:
        name: a short name.
        fix: what the user should write.
        place: the line where it would be written.
        words: keyword arguments for the call at that line.
        changes: whether it changes the mathematics.
        bound: the largest share of a step that it can save, as far as the budget tells.
        settle: steps after it is turned on that are not measured; settle_off: after it is turned
            off.
        stride: the number of steps in a block is a multiple of this.
        failed: why it cannot be used here; empty if it can.
    """

    name = fix = failed = ""
    place = NOWHERE
    words: Mapping[str, object] = MappingProxyType({})
    changes = False
    bound = 1.0
    settle = settle_off = 1
    stride = 1

    def turn(self, is_on: bool) -> None:
        """Turn the fix on or off.

        Raises:
            Exception: the fix cannot be used here.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the fix holds; it is not turned on again."""
