"""Each rule is right on its own examples and has complete texts."""

import pytest

from paceline.doctor.catalogue import GROUPS, RULES
from paceline.doctor.findings import Severity
from paceline.doctor.selftest import test_rules as tried


def test_each_rule_fires_only_on_its_bad_examples() -> None:
    results = tried(RULES.values())
    assert [one for one in results if not one.is_right] == []
    assert {one.rule for one in results if one.is_sick} == RULES.keys()
    assert {one.rule for one in results if not one.is_sick} == RULES.keys()


def test_rule_names_are_unique_and_each_is_in_its_group() -> None:
    every = [rule for rules in GROUPS.values() for rule in rules]
    assert len(every) == len(RULES)
    assert all(rule.group == group for group, rules in GROUPS.items() for rule in rules)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rule_promises_no_speedup(rule: object) -> None:
    """Nothing was measured, so no text states a figure."""
    from paceline.doctor.rule import ScriptRule

    assert isinstance(rule, ScriptRule)
    said = f"{rule.what} {rule.why} {rule.fix}"
    assert " %" not in said
    assert "x faster" not in said
    assert rule.severity in Severity
