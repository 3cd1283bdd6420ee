"""The edits that a script would get, one for each price with words and each rule that mends.

    text -> edit 1 -> edit 2 -> ...      each is made on the text that the last left

This module must not know files, nor run anything.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import libcst as cst

from ...porting.tree import TreeEdits
from ..catalogue import RULES
from ..examine import is_taken_back
from ..facts import Facts
from ..findings import Diagnosis, ScriptFinding, Severity
from ..mends import give
from ..observed.observation import Price, PriceOutcome
from ..rule import ScriptRule

_ROW = re.compile(r"[^\n]*\n|[^\n]+")
"""A line as ``patch`` knows it, whatever else ends one elsewhere."""


class Edit(NamedTuple):
    """One fix.

    Attributes:
        name: the rule's, or the price's; what: in words.
        made: the text with it, of one without.
    """

    name: str
    what: str
    made: Callable[[str], str]


def edits_for(text: str, prices: Iterable[Price] = ()) -> list[Edit]:
    """Those that change this text, in the order in which they are made."""
    found: list[Edit] = []
    for edit in _all(prices):
        changed = edit.made(text)
        if changed != text:
            found.append(edit)
            text = changed
    return found


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all of them."""
    for one in edits:
        text = one.made(text)
    return text


def left_alone(found: Diagnosis) -> list[ScriptFinding]:
    """Bugs that no edit touches: what would mend them changes what is computed, or is a choice."""
    return [one for one in found.of(Severity.BUG) if not _mends(one.rule)]


def unmended(text: str, found: Diagnosis) -> list[ScriptFinding]:
    """Bugs of a kind that is mended mostly, and that stand where the text is not simple enough."""
    facts, left = Facts(text), set[tuple[str, int]]()
    for rule in RULES.values():
        for one in rule.check(facts) if rule.mend is not None else ():
            edits = TreeEdits()
            assert rule.mend is not None
            rule.mend(facts, one.node, edits)
            if not edits:
                left.add((rule.name, facts.script.line(one.node)))
    return [one for one in found.of(Severity.BUG) if (one.rule, one.line) in left]


def diff_of(before: str, after: str, name: str) -> str:
    """A unified diff, as ``patch`` takes it."""
    rows = difflib.unified_diff(_ROW.findall(before), _ROW.findall(after), f"a/{name}", f"b/{name}")
    whole = []
    for row in rows:
        whole.append(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n")
    return "".join(whole)


def _mends(name: str) -> bool:
    rule = RULES.get(name)
    return rule is not None and rule.mend is not None


def _all(prices: Iterable[Price]) -> Iterator[Edit]:
    """Those of prices first: they are found by the numbers of lines, and move none."""
    for one in prices:
        if one.words and one.outcome is PriceOutcome.WORTH and not one.changes:
            yield Edit(one.name, one.fix, _by_price(one))
    for rule in RULES.values():
        if rule.mend is not None:
            yield Edit(rule.name, rule.fix, _by_rule(rule))


def _by_rule(rule: ScriptRule) -> Callable[[str], str]:
    def made(text: str) -> str:
        facts, edits, rows = Facts(text), TreeEdits(), text.splitlines()
        assert rule.mend is not None
        for one in rule.check(facts):
            if not is_taken_back(rule.name, facts.script.line(one.node), rows):
                rule.mend(facts, one.node, edits)
        return facts.script.module.visit(edits).code if edits else text

    return made


def _by_price(price: Price) -> Callable[[str], str]:
    """The call that begins in its line is given the words."""

    def made(text: str) -> str:
        facts, edits = Facts(text), TreeEdits()
        name = "DataLoader" if "DataLoader" in price.fix else ""
        called = [
            one for one in facts.script.every_call
            if facts.script.line(one) == price.line
            and (one in facts.loaders if name else _is_optimizer(facts, one))
        ]  # fmt: skip
        if len(called) == 1:
            give(edits, called[0], **dict(price.words))
        return facts.script.module.visit(edits).code if edits else text

    return made


def _is_optimizer(facts: Facts, call: cst.Call) -> bool:
    return "optim." in facts.meaning(call)
