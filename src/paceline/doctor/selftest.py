"""Try each rule on its own examples: it must fire in every sick one and in no healthy one.

`paceline doctor --test-rules` and the tests run it, in one process.
"""

from collections.abc import Iterable
from typing import NamedTuple

from .examine import findings_of
from .facts import Facts
from .rule import ScriptRule


class ExampleResult(NamedTuple):
    """The result of one rule on one of its examples.

    Attributes:
        rule: the rule's name.
        is_sick: whether the example is a sick one.
        place: the example's number among the sick or the healthy ones, from 1.
        is_right: whether the rule fires in a sick example, or not in a healthy one.
    """

    rule: str
    is_sick: bool
    place: int
    is_right: bool


def test_rules(rules: Iterable[ScriptRule]) -> list[ExampleResult]:
    """Try every rule on every example of its own."""
    return [
        ExampleResult(rule.name, is_sick, place, _fires(rule, text) is is_sick)
        for rule in rules
        for is_sick, texts in ((True, rule.sick), (False, rule.healthy))
        for place, text in enumerate(texts, 1)
    ]


def _fires(rule: ScriptRule, text: str) -> bool:
    return next(findings_of(rule, Facts(text)), None) is not None
