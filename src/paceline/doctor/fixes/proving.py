"""Whether edits leave every loss and every gradient of 20 steps as they are, to the last bit.

    the script, recorded | with all edits, recorded      equal: proved
                         | with one edit after the other, where they are not; those that are kept

A script that gives other numbers each time it runs proves nothing, and is told so. This module must
not know how a run is recorded.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import ConfigError
from ..observed.record import StepRecord
from .mending import Edit, with_edits

NUM_STEPS = 20

Recorded = Callable[[str], StepRecord]
"""What a text computes."""


class Proof(NamedTuple):
    """What is proved.

    Attributes:
        kept: edits that leave losses and gradients equal, all together.
        dropped: each other one, with what differs.
        num_steps: that were compared.
        unproved: why nothing is proved; empty: all that is kept is.
    """

    kept: tuple[Edit, ...]
    dropped: tuple[tuple[Edit, str], ...] = ()
    num_steps: int = 0
    unproved: str = ""


def prove(text: str, edits: Sequence[Edit], recorded: Recorded) -> Proof:
    """Keep the edits that change no number.

    Raises:
        ConfigError: the script as it is does not come so far.
    """
    before = recorded(text)
    if not edits:
        return Proof((), (), len(before.gradients))
    differs = _difference(before, with_edits(text, edits), recorded)
    if not differs:
        return Proof(tuple(edits), (), len(before.gradients))
    own = before.first_difference(recorded(text))
    if own:
        return Proof((), (), 0, f"run twice as it is, the script differs by itself in {own}")
    kept: list[Edit] = []
    dropped = []
    for one in edits:
        found = _difference(before, with_edits(text, [*kept, one]), recorded)
        if found:
            dropped.append((one, found))
        else:
            kept.append(one)
    return Proof(tuple(kept), tuple(dropped), len(before.gradients))


def _difference(before: StepRecord, text: str, recorded: Recorded) -> str:
    try:
        return before.first_difference(recorded(text))
    except ConfigError as error:
        return f"its end: {error}"
