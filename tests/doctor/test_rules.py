"""Each rule is right on its own examples and has complete texts."""

import pytest

from paceline.doctor.catalogue import GROUPS, RULES
from paceline.doctor.findings import Severity
from paceline.doctor.selftest import test_rules as tried


def test_each_rule_fires_only_on_its_bad_examples() -> None:
    results = tried(RULES.values())
    assert [result for result in results if not result.is_right] == []
    assert {result.rule for result in results if result.is_sick} == RULES.keys()
    assert {result.rule for result in results if not result.is_sick} == RULES.keys()


def test_rule_names_are_unique_and_each_is_in_its_group() -> None:
    every = [rule for rules in GROUPS.values() for rule in rules]
    assert len(every) == len(RULES)
    assert all(rule.group == group for group, rules in GROUPS.items() for rule in rules)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rule_promises_no_speedup(rule: object) -> None:
    """Nothing was measured, so no text states a figure."""
    from paceline.doctor.rule import ScriptRule

    assert isinstance(rule, ScriptRule)
    message = f"{rule.what} {rule.why} {rule.fix}"
    assert " %" not in message
    assert "x faster" not in message
    assert rule.severity in Severity
