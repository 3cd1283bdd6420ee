"""``paceline doctor``: what is wrong in a training script, or could cost."""

import json as encoder
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .flags import Json, show


def doctor(
    script: str | None = None,
    /,
    *,
    static: Annotated[bool, Parameter(help="Read the script; never run it.")] = False,
    notes: Annotated[bool, Parameter(help="Also what tensor cores would want.")] = False,
    strict: Annotated[bool, Parameter(help="Exit code 1 also for what could cost.")] = False,
    rules: Annotated[bool, Parameter(help="List all rules.")] = False,
    test_rules: Annotated[bool, Parameter(help="Try each rule on its own examples.")] = False,
    json: Json = False,
    sarif: Annotated[bool, Parameter(help="SARIF 2.1.0, for code hosts.")] = False,
) -> None:
    """What is wrong in a training script, or could cost, with file and line.

    A finding is a bug, or something that could cost time or memory; by reading alone nothing is
    measured, so none has a figure. Exit code 0 where no bug is found, 1 where one is, 2 where
    nothing could be read. A line that ends in # doctor: ok is not spoken of.

    Example: paceline doctor train.py --static
    Example: paceline doctor train.py --static --sarif > doctor.sarif

    Parameters
    ----------
    script
        A script of Python.
    """
    if rules or test_rules:
        _about_rules(test_rules, json)
        return
    _check_asked(script, static, json and sarif)
    assert script is not None
    from ..doctor.examine import examine
    from ..doctor.findings import Severity
    from ..doctor.rendering import render_diagnosis
    from ..doctor.sarif import to_sarif

    found = examine(Path(script))
    if sarif:
        print(encoder.dumps(to_sarif(found), indent=1))
    else:
        show(json, found.to_json, lambda: render_diagnosis(found, with_notes=notes))
    if found.of(Severity.BUG) or (strict and found.of(Severity.COST)):
        sys.exit(1)


def _check_asked(script: str | None, is_static: bool, is_both: bool) -> None:
    """Refuse what cannot be answered.

    Raises:
        ConfigError: no script, both formats, or to run the script.
    """
    from ..errors import ConfigError

    if script is None:
        raise ConfigError("doctor wants a script: paceline doctor train.py --static, or --rules")
    if is_both:
        raise ConfigError("--json and --sarif are two formats of one output; give one of them")
    if not is_static:
        raise ConfigError(
            f"doctor reads a script and does not run one: paceline doctor {script} --static"
        )


def _about_rules(is_test: bool, json: bool) -> None:
    from ..doctor.catalogue import GROUPS, RULES
    from ..doctor.rendering import render_rules, render_tests
    from ..doctor.selftest import test_rules

    if not is_test:
        show(json, lambda: {"rules": [one.to_json() for one in RULES.values()]},
             lambda: render_rules(GROUPS))  # fmt: skip
        return
    results = test_rules(RULES.values())
    show(json, lambda: {"examples": [one._asdict() for one in results]},
         lambda: render_tests(results))  # fmt: skip
    if not all(one.is_right for one in results):
        sys.exit(1)
