"""Prove that edits leave every loss and every gradient of 20 steps equal, to the last bit.

    the script, recorded | an edit of a line that did not run     not reached: it is left out
                         | with all others, recorded              equal: all are proved
                         | else with one edit after the other     equal: this edit is kept

A script whose numbers differ each time it runs proves nothing, which is reported. This module must
not know how a run is recorded.
"""

import difflib
from collections.abc import Callable, Sequence
from types import CodeType
from typing import NamedTuple

from ...errors import ConfigError
from ..observed.record import StepRecord
from ..syntax import lines_of
from .mending import Edit, with_edits

NUM_STEPS = 20

Recorded = Callable[[str], StepRecord]
"""Runs a text and returns what it computes."""


class Proof(NamedTuple):
    """The edits that were proved, and those that were not.

    Attributes:
        kept: the edits that together leave losses and gradients equal.
        dropped: every edit that changes a loss or a gradient, with what it changes.
        num_steps: how many steps were compared.
        unproved: why nothing is proved; empty if all kept edits are.
        unreached: every edit of a line that did not run in these steps, with the line.
    """

    kept: tuple[Edit, ...]
    dropped: tuple[tuple[Edit, str], ...] = ()
    num_steps: int = 0
    unproved: str = ""
    unreached: tuple[tuple[Edit, int], ...] = ()


def prove(text: str, edits: Sequence[Edit], recorded: Recorded) -> Proof:
    """Keep the edits that change no number, and whose lines have all run.

    Args:
        text: the script as it is.
        edits: the edits to prove, in the order in which they are applied.
        recorded: runs a text and returns what it computes.

    Raises:
        ConfigError: the script as it is does not make enough steps.
    """
    before = recorded(text)
    lines = [_line_not_run(text, edit, before) for edit in edits]
    unreached = tuple((edit, line) for edit, line in zip(edits, lines, strict=True) if line)
    edits = [edit for edit, line in zip(edits, lines, strict=True) if not line]
    num_steps = len(before.gradients)
    if not edits or not _difference(before, with_edits(text, edits), recorded):
        return Proof(tuple(edits), (), num_steps, unreached=unreached)
    self_difference = before.first_difference(recorded(text))
    if self_difference:
        reason = f"two runs of the unchanged script differ in {self_difference}"
        return Proof((), (), 0, reason, unreached)
    kept: list[Edit] = []
    dropped = []
    for edit in edits:
        difference = _difference(before, with_edits(text, [*kept, edit]), recorded)
        if difference:
            dropped.append((edit, difference))
        else:
            kept.append(edit)
    return Proof(tuple(kept), tuple(dropped), num_steps, unreached=unreached)


def _line_not_run(text: str, edit: Edit, record: StepRecord) -> int:
    """Return the first line that an edit changes, or inserts after, and that did not run, or 0."""
    before, after = lines_of(text), lines_of(edit.apply(text))
    changed: set[int] = set()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, stop, _, _ in matcher.get_opcodes():
        if kind != "equal":
            changed.update(range(start + (kind != "insert"), stop + 1))
    return min(changed & _lines_with_code(text) - set(record.lines), default=0)


def _lines_with_code(text: str) -> set[int]:
    lines: set[int] = set()
    codes = [compile(text, "", "exec")]
    for code in codes:
        lines.update(line for _, _, line in code.co_lines() if line)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return lines


def _difference(before: StepRecord, text: str, recorded: Recorded) -> str:
    try:
        return before.first_difference(recorded(text))
    except ConfigError as error:  # the edited script fails or ends early
        return f"its end: {error}"
