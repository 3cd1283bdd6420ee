"""A fix that can be put into effect and taken back between two steps of a running script.

    knob.turn(True) ... some steps ... knob.turn(False) ... some steps ...

This module must not know which there are.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .patches import NOWHERE


class Knob:
    """One fix.

    Attributes:
        name, fix: in a word, and what to write; place: where; words: arguments for the call there.
        changes: whether it changes the mathematics.
        bound: the share of a step that it can save at most, as far as the budget tells.
        settle: steps after each turn that are not counted.
        stride: steps of a block are a multiple of this.
        failed: why it could not be had.
    """

    name = fix = failed = ""
    place = NOWHERE
    words: Mapping[str, object] = MappingProxyType({})
    changes = False
    bound = 1.0
    settle = 1
    stride = 1

    def turn(self, is_on: bool) -> None:
        """Put it into effect, or take it back.

        Raises:
            Exception: it cannot be had here.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Nothing of it is needed any more."""
