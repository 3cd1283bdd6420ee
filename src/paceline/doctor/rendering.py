"""What the doctor found, in lines for a terminal.

    train.py: 2 bugs, 1 that could cost (not measured)

    train.py:31  bug  amp-backward-inside: backward() runs under autocast
        why  ...
        fix  ...

This module must not know how anything was found.
"""

import textwrap
from collections.abc import Iterator

from .findings import Diagnosis, ScriptFinding, Severity
from .rule import ScriptRule
from .selftest import ExampleResult

_WIDTH = 100


def render_diagnosis(found: Diagnosis, *, with_notes: bool) -> Iterator[str]:
    """The verdict first, then bugs, then what could cost; notes where they were asked for."""
    yield f"{found.script}: {_verdict(found)}"
    told: set[tuple[str, str]] = set()
    for severity in Severity:
        if severity is Severity.NOTE and not with_notes:
            continue
        for one in found.of(severity):
            is_told = (one.rule, one.fix) in told
            told.add((one.rule, one.fix))
            yield from _finding(found.script, one, is_told)
    notes = len(found.of(Severity.NOTE))
    tail = []
    if notes and not with_notes:
        tail.append(f"{_count(notes, 'note')} on tensor cores and number formats: --notes")
    if found.num_ignored:
        tail.append(f"{found.num_ignored} taken back by # doctor: ok")
    if tail:
        yield ""
        yield from tail


def render_bugs(found: Diagnosis, *, with_notes: bool) -> Iterator[str]:
    """What is wrong in its text; of what could cost only how much: that is measured elsewhere."""
    bugs = found.bugs
    if bugs:
        yield ""
        yield f"{_count(len(bugs), 'bug')} in its text:"
    for one in bugs + (found.of(Severity.NOTE) if with_notes else []):
        yield from _finding(found.script, one, False)
    if found.costs:
        yield ""
        yield (
            f"{_count(len(found.costs), 'place')} in its text that could cost elsewhere: "
            f"paceline doctor {found.script} --static"
        )


def _verdict(found: Diagnosis) -> str:
    if not found.has_torch and not found.findings:
        return "it does not use torch, so there is nothing to say"
    bugs, costs = len(found.of(Severity.BUG)), len(found.of(Severity.COST))
    parts = [_count(bugs, "bug")] if bugs else []
    if costs:
        parts.append(f"{_count(costs, 'place')} that could cost time or memory (not measured)")
    if parts:
        return ", ".join(parts)
    return f"nothing wrong is seen in its text ({found.num_rules} rules; it was not run)"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _finding(script: str, one: ScriptFinding, is_told: bool) -> Iterator[str]:
    """Why and what to write instead only the first time."""
    if not is_told:
        yield ""
    says = {
        Severity.BUG: "bug", Severity.COST: "could cost, not measured", Severity.NOTE: "note"
    }[one.severity]  # fmt: skip
    yield f"{script}:{one.line}  {one.rule} ({says}): {one.what}"
    for name, text in () if is_told else (("why", one.why), ("fix", one.fix)):
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent=f"    {name}  ", subsequent_indent=" " * 9,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def render_rules(groups: dict[str, tuple[ScriptRule, ...]]) -> Iterator[str]:
    """Every rule in a line, by group."""
    width = max(len(rule.name) for rules in groups.values() for rule in rules)
    for group, rules in groups.items():
        yield f"{group}:"
        for rule in rules:
            yield f"  {rule.name:<{width}}  {rule.severity.value:<4}  {rule.what}"


def render_tests(results: list[ExampleResult]) -> Iterator[str]:
    """What failed, then the count."""
    wrong = [one for one in results if not one.is_right]
    for one in wrong:
        kind, word = ("sick", "does not fire") if one.is_sick else ("healthy", "fires")
        yield f"{one.rule}: {word} in its {kind} example {one.place}"
    rules = len({one.rule for one in results})
    yield f"{len(results) - len(wrong)} of {len(results)} examples of {rules} rules are right"
