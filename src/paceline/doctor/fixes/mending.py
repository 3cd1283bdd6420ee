"""The edits of a script: one for each price with arguments, and one for each place that a rule mends.

    text -> edit 1 -> edit 2 -> ...      each is applied to the text that the last one left

This module must not know files, nor run anything.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import libcst as cst

from ...porting.tree import TreeEdits
from ..catalogue import RULES
from ..examine import is_suppressed
from ..facts import Facts
from ..findings import Diagnosis, ScriptFinding, Severity
from ..mends import set_arguments
from ..observed.observation import Price, PriceOutcome
from ..rule import ScriptRule
from ..syntax import lines_of

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
"""A line as ``patch`` splits them: at ``\\n`` alone, unlike `str.splitlines`."""


class Edit(NamedTuple):
    """One fix, as a change of the script's text.

    Attributes:
        name: the name of the rule or the price.
        what: the fix in words.
        line: the line that it fixes, from 1.
        apply: returns a text with the fix.
    """

    name: str
    what: str
    line: int
    apply: Callable[[str], str]


def edits_for(text: str, prices: Iterable[Price] = ()) -> list[Edit]:
    """Return the edits that change this text, in the order in which they are applied."""
    edits: list[Edit] = []
    for edit in _all(text, prices):
        changed = edit.apply(text)
        if changed != text:
            edits.append(edit)
            text = changed
    return edits


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits applied."""
    for edit in edits:
        text = edit.apply(text)
    return text


def left_alone(diagnosis: Diagnosis) -> list[ScriptFinding]:
    """Return the bugs whose rule has no mend: a fix changes what is computed, or is a choice."""
    return [bug for bug in diagnosis.of(Severity.BUG) if not _mends(bug.rule)]


def unmended(text: str, diagnosis: Diagnosis) -> list[ScriptFinding]:
    """Return the bugs whose rule has a mend that does not apply here: the text is too complex."""
    facts, left = Facts(text), set[tuple[str, int]]()
    for rule in RULES.values():
        for found in rule.check(facts) if rule.mend is not None else ():
            edits = TreeEdits()
            assert rule.mend is not None
            rule.mend(facts, found.node, edits)
            if not edits:
                left.add((rule.name, facts.script.line(found.node)))
    return [bug for bug in diagnosis.of(Severity.BUG) if (bug.rule, bug.line) in left]


def diff_of(before: str, after: str, name: str) -> str:
    """Return a unified diff that ``patch`` accepts."""
    old, new = _LINE.findall(before), _LINE.findall(after)
    lines = []
    for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _mends(name: str) -> bool:
    rule = RULES.get(name)
    return rule is not None and rule.mend is not None


def _all(text: str, prices: Iterable[Price]) -> Iterator[Edit]:
    """Yield the edits of prices, which need the original line numbers and keep them; then rules'.

    A rule's last place comes first, so that the numbers of those before it stay.
    """
    for price in prices:
        if price.words and price.outcome is PriceOutcome.WORTH and not price.changes:
            yield Edit(price.name, price.fix, price.line, _by_price(price))
    facts = Facts(text)
    for rule in RULES.values():
        lines = [facts.script.line(node) for node in _places(rule, facts, text)]
        for number, line in reversed([*enumerate(lines)]):
            yield Edit(rule.name, rule.fix, line, _by_rule(rule, number))


def _places(rule: ScriptRule, facts: Facts, text: str) -> list[cst.CSTNode]:
    """Return what a rule that mends finds, and no comment suppresses."""
    lines = lines_of(text)
    return [
        found.node
        for found in (rule.check(facts) if rule.mend is not None else ())
        if not is_suppressed(rule.name, facts.script.line(found.node), lines)
    ]


def _by_rule(rule: ScriptRule, number: int) -> Callable[[str], str]:
    """Return the edit that mends a rule's place of this number, from 0."""

    def apply(text: str) -> str:
        facts, edits = Facts(text), TreeEdits()
        assert rule.mend is not None
        for node in _places(rule, facts, text)[number : number + 1]:
            rule.mend(facts, node, edits)
        return facts.script.module.visit(edits).code if edits else text

    return apply


def _by_price(price: Price) -> Callable[[str], str]:
    """Return the edit that sets a price's arguments in the call that begins in its line."""

    def apply(text: str) -> str:
        facts, edits = Facts(text), TreeEdits()
        is_loader = "DataLoader" in price.fix
        calls = [
            call for call in facts.script.every_call
            if facts.script.line(call) == price.line
            and (call in facts.loaders if is_loader else _is_optimizer(facts, call))
        ]  # fmt: skip
        if len(calls) == 1:
            set_arguments(edits, calls[0], **dict(price.words))
        return facts.script.module.visit(edits).code if edits else text

    return apply


def _is_optimizer(facts: Facts, call: cst.Call) -> bool:
    return "optim." in facts.meaning(call)
