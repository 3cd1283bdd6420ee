"""Each rule on its own examples: it fires in each sick one and in no healthy one.

All in one process; `paceline doctor --test-rules`, and the tests.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .examine import findings_of
from .facts import Facts
from .rule import ScriptRule


class ExampleResult(NamedTuple):
    """One example of one rule.

    Attributes:
        place: which of the rule's sick or healthy ones, from 1.
        is_right: it fires in a sick one, and not in a healthy one.
    """

    rule: str
    is_sick: bool
    place: int
    is_right: bool


def test_rules(rules: Iterable[ScriptRule]) -> list[ExampleResult]:
    """Try every example."""
    return [
        ExampleResult(rule.name, is_sick, place, _fires(rule, text) is is_sick)
        for rule in rules
        for is_sick, texts in ((True, rule.sick), (False, rule.healthy))
        for place, text in enumerate(texts, 1)
    ]


def _fires(rule: ScriptRule, text: str) -> bool:
    return next(findings_of(rule, Facts(text)), None) is not None
