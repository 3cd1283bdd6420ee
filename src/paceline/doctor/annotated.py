"""A script as a listing, with what is wrong under each line, and what is right, and why.

       5 | data = torch.randn(123, 16)
         ! comment-differs: the comment says 15 features and the data has 16
           write ...
         + 64 and 32 are multiples of 8: tensor cores take them whole

    !  a bug      ~  could cost, not measured      .  a note      +  right

This module must not know how anything is found.
"""

import textwrap
from collections.abc import Iterator, Sequence

from .facts import Facts
from .findings import Diagnosis, ScriptFinding, Severity
from .rights import Right, rights
from .syntax import fault, repaired

_WIDTH = 100
_SIGNS = {Severity.BUG: "!", Severity.COST: "~", Severity.NOTE: "."}


def rights_of(text: str) -> list[Right]:
    """What is right in a text; nothing where it cannot be read."""
    mended = text if fault(text) is None else repaired(text)[0]
    return [] if mended is None else rights(Facts(mended))


def annotate(text: str, found: Diagnosis, right: Sequence[Right]) -> Iterator[str]:
    """The listing, and what its signs mean."""
    rows = text.splitlines()
    digits = max(3, len(str(len(rows))))
    told: set[tuple[str, str]] = set()
    for number, row in enumerate(rows, 1):
        yield f"{number:>{digits}} | {row}".rstrip()
        for one in found.findings:
            if one.line == number:
                yield from _wrong(one, digits, (one.rule, one.fix) in told)
                told.add((one.rule, one.fix))
        for each in right:
            if each.line == number:
                yield from _wrapped("+", each.what, digits)
    yield ""
    counts = [f"{len(found.of(one))} {word}" for one, word in _WORDS.items()]
    yield f"{found.script}: {', '.join(counts)}, {len(right)} + right"


_WORDS = {Severity.BUG: "! wrong", Severity.COST: "~ could cost", Severity.NOTE: ". notes"}


def _wrong(one: ScriptFinding, digits: int, is_told: bool) -> Iterator[str]:
    """Why and what to write instead only the first time."""
    why = "" if is_told else f" {one.why}"
    yield from _wrapped(_SIGNS[one.severity], f"{one.rule}: {one.what}.{why}", digits)
    if not is_told:
        yield from _wrapped(" ", f"fix: {one.fix}", digits)


def _wrapped(sign: str, text: str, digits: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{'':>{digits}} {sign} ",
        subsequent_indent=f"{'':>{digits}}     ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
