"""List a script with what is wrong and what is right under each line, and why.

       5 | data = torch.randn(123, 16)
         ! comment-differs: the comment says 15 features and the data has 16
           write ...
         + 64 and 32 are multiples of 8: tensor cores need no padding

    !  a bug      ~  could cost, not measured      .  a note      +  right

This module must not know how faults are found.
"""

import textwrap
from collections.abc import Iterator, Sequence

from .facts import Facts
from .findings import Diagnosis, ScriptFinding, Severity
from .rights import Right, rights
from .syntax import fault, lines_of, repaired

_WIDTH = 100
_SIGNS = {Severity.BUG: "!", Severity.COST: "~", Severity.NOTE: "."}


def rights_of(text: str) -> list[Right]:
    """Return what is right in a text, or nothing where it does not parse."""
    parsed = text if fault(text) is None else repaired(text)[0]
    return [] if parsed is None else rights(Facts(parsed))


def annotate(text: str, diagnosis: Diagnosis, right: Sequence[Right]) -> Iterator[str]:
    """Yield the lines of the listing, and then how often each sign occurs."""
    lines = lines_of(text)
    digits = max(3, len(str(len(lines))))
    explained: set[tuple[str, str]] = set()
    for number, line in enumerate(lines, 1):
        yield f"{number:>{digits}} | {line}".rstrip()
        for finding in diagnosis.findings:
            if finding.line == number:
                yield from _wrong(finding, digits, (finding.rule, finding.fix) in explained)
                explained.add((finding.rule, finding.fix))
        for practice in right:
            if practice.line == number:
                yield from _wrapped("+", practice.what, digits)
    yield ""
    counts = [f"{len(diagnosis.of(severity))} {label}" for severity, label in _LABELS.items()]
    yield f"{diagnosis.script}: {', '.join(counts)}, {len(right)} + right"


_LABELS = {Severity.BUG: "! wrong", Severity.COST: "~ could cost", Severity.NOTE: ". notes"}


def _wrong(finding: ScriptFinding, digits: int, is_explained: bool) -> Iterator[str]:
    """Yield the lines of one finding, with its why and fix unless they were printed before."""
    why = "" if is_explained else f" {finding.why}"
    text = f"{finding.rule}: {finding.what}.{why}"
    yield from _wrapped(_SIGNS[finding.severity], text, digits)
    if not is_explained:
        yield from _wrapped(" ", f"fix: {finding.fix}", digits)


def _wrapped(sign: str, text: str, digits: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{'':>{digits}} {sign} ",
        subsequent_indent=f"{'':>{digits}}     ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
