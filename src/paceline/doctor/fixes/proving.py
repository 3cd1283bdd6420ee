"""Prove that edits leave every loss and every gradient of 20 steps equal, to the last bit.

    the script, recorded | with all edits, recorded               equal: all are proved
                         | else with one edit after the other     equal: this edit is kept

A script whose numbers differ each time it runs proves nothing, which is reported. This module must
not know how a run is recorded.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import ConfigError
from ..observed.record import StepRecord
from .mending import Edit, with_edits

NUM_STEPS = 20

Recorded = Callable[[str], StepRecord]
"""Runs a text and returns what it computes."""


class Proof(NamedTuple):
    """The edits that were proved, and those that were not.

    Attributes:
        kept: the edits that together leave losses and gradients equal.
        dropped: every other edit, with what it changes.
        num_steps: how many steps were compared.
        unproved: why nothing is proved; empty if all kept edits are.
    """

    kept: tuple[Edit, ...]
    dropped: tuple[tuple[Edit, str], ...] = ()
    num_steps: int = 0
    unproved: str = ""


def prove(text: str, edits: Sequence[Edit], recorded: Recorded) -> Proof:
    """Keep the edits that change no number.

    Args:
        text: the script as it is.
        edits: the edits to prove, in the order in which they are applied.
        recorded: runs a text and returns what it computes.

    Raises:
        ConfigError: the script as it is does not make enough steps.
    """
    before = recorded(text)
    if not edits:
        return Proof((), (), len(before.gradients))
    if not _difference(before, with_edits(text, edits), recorded):
        return Proof(tuple(edits), (), len(before.gradients))
    self_difference = before.first_difference(recorded(text))
    if self_difference:
        return Proof((), (), 0, f"two runs of the unchanged script differ in {self_difference}")
    kept: list[Edit] = []
    dropped = []
    for edit in edits:
        difference = _difference(before, with_edits(text, [*kept, edit]), recorded)
        if difference:
            dropped.append((edit, difference))
        else:
            kept.append(edit)
    return Proof(tuple(kept), tuple(dropped), len(before.gradients))


def _difference(before: StepRecord, text: str, recorded: Recorded) -> str:
    try:
        return before.first_difference(recorded(text))
    except ConfigError as error:  # the edited script fails or ends early
        return f"its end: {error}"
