"""Render a diagnosis as lines for a terminal.

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


def render_diagnosis(diagnosis: Diagnosis, *, with_notes: bool) -> Iterator[str]:
    """Yield the verdict, then the bugs, the possible costs, and the notes if they are wanted."""
    yield f"{diagnosis.script}: {_verdict(diagnosis)}"
    explained: set[tuple[str, str]] = set()
    for severity in Severity:
        if severity is Severity.NOTE and not with_notes:
            continue
        for finding in diagnosis.of(severity):
            is_explained = (finding.rule, finding.fix) in explained
            explained.add((finding.rule, finding.fix))
            yield from _finding(diagnosis.script, finding, is_explained)
    notes = len(diagnosis.of(Severity.NOTE))
    tail = []
    if notes and not with_notes:
        tail.append(f"{_count(notes, 'note')} on tensor cores and number formats: --notes")
    if diagnosis.num_ignored:
        tail.append(f"{diagnosis.num_ignored} suppressed by # doctor: ok")
    if tail:
        yield ""
        yield from tail


def render_bugs(diagnosis: Diagnosis, *, with_notes: bool) -> Iterator[str]:
    """Yield the bugs that reading finds, and the number of possible costs, which are measured."""
    bugs = diagnosis.bugs
    if bugs:
        yield ""
        yield f"{_count(len(bugs), 'bug')} in its text:"
    for finding in bugs + (diagnosis.of(Severity.NOTE) if with_notes else []):
        yield from _finding(diagnosis.script, finding, False)
    if diagnosis.costs:
        yield ""
        yield (
            f"{_count(len(diagnosis.costs), 'place')} in its text that could cost elsewhere: "
            f"paceline doctor {diagnosis.script} --static"
        )


def _verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.has_torch and not diagnosis.findings:
        return "it does not use torch, so there is nothing to check"
    bugs, costs = len(diagnosis.of(Severity.BUG)), len(diagnosis.of(Severity.COST))
    parts = [_count(bugs, "bug")] if bugs else []
    if costs:
        parts.append(f"{_count(costs, 'place')} that could cost time or memory (not measured)")
    if parts:
        return ", ".join(parts)
    return f"nothing wrong was found in its text ({diagnosis.num_rules} rules; it was not run)"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _finding(script: str, finding: ScriptFinding, is_explained: bool) -> Iterator[str]:
    """Yield the lines of one finding, with its why and fix unless they were printed before."""
    if not is_explained:
        yield ""
    label = {
        Severity.BUG: "bug", Severity.COST: "could cost, not measured", Severity.NOTE: "note"
    }[finding.severity]  # fmt: skip
    yield f"{script}:{finding.line}  {finding.rule} ({label}): {finding.what}"
    for name, text in () if is_explained else (("why", finding.why), ("fix", finding.fix)):
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent=f"    {name}  ", subsequent_indent=" " * 9,
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def render_rules(groups: dict[str, tuple[ScriptRule, ...]]) -> Iterator[str]:
    """Yield one line per rule, by group."""
    width = max(len(rule.name) for rules in groups.values() for rule in rules)
    for group, rules in groups.items():
        yield f"{group}:"
        for rule in rules:
            yield f"  {rule.name:<{width}}  {rule.severity.value:<4}  {rule.what}"


def render_tests(results: list[ExampleResult]) -> Iterator[str]:
    """Yield one line per failed example, then how many examples are right."""
    failed = [result for result in results if not result.is_right]
    for result in failed:
        kind, fault = ("sick", "does not fire") if result.is_sick else ("healthy", "fires")
        yield f"{result.rule}: {fault} in its {kind} example {result.place}"
    rules = len({result.rule for result in results})
    yield f"{len(results) - len(failed)} of {len(results)} examples of {rules} rules are right"
