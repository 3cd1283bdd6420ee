"""``paceline doctor``: find bugs and costs in a training script, and measure each fix.

    --rules | --test-rules | a model | --undo | --fix | --annotate | --static | the script runs

Above 300 lines, since each of these modes has its flags.
"""

import json as encoder
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from ..errors import ConfigError
from .flags import say, show

if TYPE_CHECKING:
    from ..doctor.findings import Diagnosis
    from ..doctor.observed.launching import ScriptRun
    from ..doctor.observed.observation import Observation


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Flags of ``doctor``.

    Parameters
    ----------
    static
        Only read the script; do not run it.
    input
        Shape of one input of a model, pkg.module:model, batch first (repeat it for several inputs):
        64,3,32,32 or 64,128:int64.
    seconds
        About how many seconds to spend on measuring the fixes; 0 tries none.
    only
        Try only the fixes whose names begin with this, such as num_workers [default: all].
    wait
        How many seconds to wait for the first training step; for each later step it waits a minute
        longer.
    fix
        Print a unified diff of the fixes that do not change the numbers, checked over 20 steps.
    apply
        With --fix, apply that diff to the script.
    undo
        Put the script back as it was before --fix --apply.
    annotate
        Print the script with its faults and what is right under each line, without running it.
    notes
        Also print advice for tensor cores; other formats always include it.
    strict
        Also exit with code 1 for likely costs.
    rules
        List all rules.
    test_rules
        Try each rule on its own examples.
    json
        Print the result as one JSON object.
    sarif
        Print the result as SARIF 2.1.0, for code hosts; with --static.
    """

    static: bool = False
    input: list[str] | None = None
    seconds: float = 60.0
    only: str = ""
    wait: float = 120.0
    fix: bool = False
    apply: bool = False
    undo: bool = False
    annotate: bool = False
    notes: bool = False
    strict: bool = False
    rules: bool = False
    test_rules: bool = False
    json: bool = False
    sarif: bool = False


NO_FLAGS = DoctorFlags()


def doctor(script: str | None = None, /, *args: str, flags: DoctorFlags = NO_FLAGS) -> None:
    """Find bugs in a training script, where a step's time goes, and what each fix saves.

    The script runs with its arguments in a process of its own for a few dozen steps; then each fix
    is tried between its steps, in turn with none, until it is clear whether it saves 2 %. With
    --static the script is only read. Exit code 0 if the file has no bug at the end, also after
    --fix --apply; 1 if it has one, even if the diff of --fix mends it; 2 if nothing could be read
    or observed. A line that ends in # doctor: ok is not reported.

    Example: paceline doctor train.py --lr 0.1
    Example: paceline doctor train.py --fix > fix.diff
    Example: paceline doctor nets:resnet --input 64,3,32,32
    Example: paceline doctor train.py --static --sarif > doctor.sarif

    Parameters
    ----------
    script
        A Python script, or a model of your own, package.module:model.
    args
        The script's own arguments; put them after -- where doctor has flags of the same name.
    """
    mode = _mode(script, flags)
    _refuse_idle(mode, args, flags)
    if flags.rules or flags.test_rules:
        _about_rules(flags)
    elif script is not None and mode == _MODEL:
        _show_model(script, flags)
    else:
        _show_script(_path(script, flags), args, flags)


def _show_script(path: Path, args: Sequence[str], flags: DoctorFlags) -> None:
    """Undo a fix, or read, fix, annotate or run the script; exit 1 if its file still has bugs."""
    if flags.undo:
        from ..doctor.fixes.applying import undo

        undo(path)
        print(f"{path} is as it was before --fix --apply")
        return
    from ..doctor.examine import examine

    result = examine(path)
    if flags.fix:
        _show_fixed(result, path, args, flags)
        result = examine(path)
    elif flags.annotate:
        _show_annotated(result, path, flags)
    elif flags.static:
        _show_static(result, flags)
    else:
        _show_observed(result, path, args, flags)
    if result.bugs or (flags.strict and result.costs):
        sys.exit(1)


_MODEL = "for a model"
_EFFECTIVE_FLAGS = {
    "with --test-rules": {"rules", "test_rules", "json"},
    "with --rules": {"rules", "json"},
    _MODEL: {"input", "json", "strict"},
    "with --undo": {"undo"},
    "with --fix --static": {"fix", "static", "json", "strict"},
    "with --fix": {"fix", "apply", "json", "strict", "seconds", "only", "wait"},
    "with --annotate": {"annotate", "static", "json", "strict"},
    "with --static": {"static", "json", "sarif", "notes", "strict"},
    "where the script runs": {"json", "notes", "strict", "seconds", "only", "wait"},
}
"""Each mode in words, and the flags that have an effect in it."""
_RUNS = ("with --fix", "where the script runs")


_SPEC = re.compile(r"(?!\S*\.py:)[\w.]*:[\w.]*")
"""A module and a name in it; not a script's line (a.py:3), a drive or an address."""


def _mode(script: str | None, flags: DoctorFlags) -> str:
    """The first mode that the flags select."""
    is_spec = (
        script is not None and _SPEC.fullmatch(script) is not None and not Path(script).exists()
    )
    is_selected = (
        flags.test_rules, flags.rules, bool(flags.input) or is_spec, flags.undo,
        flags.fix and flags.static, flags.fix, flags.annotate, flags.static, True,
    )  # fmt: skip
    return next(mode for mode, is_on in zip(_EFFECTIVE_FLAGS, is_selected, strict=True) if is_on)


def _refuse_idle(mode: str, args: Sequence[str], flags: DoctorFlags) -> None:
    """Refuse flags that would have no effect, misspelled ones included.

    Raises:
        ConfigError: there is such a flag.
    """
    if flags.sarif and mode == "where the script runs":
        raise ConfigError("--sarif holds only what is found by reading: add --static")
    if flags.apply and mode != "with --fix":
        raise ConfigError("--apply needs a proof by running: use --fix --apply without --static")
    idle = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(flags)
        if field.name not in _EFFECTIVE_FLAGS[mode] and getattr(flags, field.name) != field.default
    ]
    if idle:
        have, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise ConfigError(f"{', '.join(idle)} {have} no effect {mode}: leave {them} out")
    if flags.notes and (flags.json or flags.sarif):
        raise ConfigError("--json and --sarif include the notes already; leave --notes out")
    if args and mode not in _RUNS:
        raise ConfigError(f"{' '.join(args)!r} is for a script, and no script runs {mode}")
    if flags.only and not flags.seconds:
        raise ConfigError("--only selects the fixes to try, and --seconds 0 tries none")


def _show_model(spec: str, flags: DoctorFlags) -> None:
    """Build a model, trace it with inputs of these shapes, and print the findings."""
    from ..doctor.built.checks import check
    from ..doctor.built.tables import render_model
    from ..doctor.built.walk import walk
    from ..doctor.findings import Severity
    from ..exports.subject import own_subject, parse_input

    if not flags.input:
        raise ConfigError(
            f"doctor {spec} needs the shape of an input, batch first: --input 64,3,32,32"
        )
    shapes = [parse_input(text) for text in flags.input]
    batches = {int(text.partition(",")[0].partition(":")[0]) for text in flags.input}
    if len(batches) > 1:
        raise ConfigError(f"every --input must have the same batch size, got {sorted(batches)}")
    (batch,) = batches
    walked = walk(own_subject(spec, shapes, flag="").model, batch, shapes)
    findings = check(walked)
    show(
        flags.json,
        lambda: {"model": spec, "findings": [finding.to_json() for finding in findings],
                 "parameters": walked.num_parameters, "output": list(walked.outputs)},
        lambda: render_model(spec, walked, findings),
    )  # fmt: skip
    bad = {Severity.BUG, Severity.COST} if flags.strict else {Severity.BUG}
    if any(finding.severity in bad for finding in findings):
        sys.exit(1)


def _path(script: str | None, flags: DoctorFlags) -> Path:
    """The path of the script.

    Raises:
        ConfigError: no script is given, or flags exclude each other or are out of range.
    """
    if script is None:
        raise ConfigError("doctor needs a script: paceline doctor train.py, or --rules")
    if flags.json and flags.sarif:
        raise ConfigError("--json and --sarif are two formats of one output; give one of them")
    for name, value in (("--seconds", flags.seconds), ("--wait", flags.wait)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be a number of seconds >= 0, got {value:g}")
    return Path(script)


def _show_static(result: "Diagnosis", flags: DoctorFlags) -> None:
    from ..doctor.rendering import render_diagnosis
    from ..doctor.sarif import to_sarif

    if flags.sarif:
        print(encoder.dumps(to_sarif(result), indent=1))
        return
    show(flags.json, result.to_json, lambda: render_diagnosis(result, with_notes=flags.notes))


def _show_fixed(result: "Diagnosis", path: Path, args: Sequence[str], flags: DoctorFlags) -> None:
    """Print the diff on standard output, all else on standard error."""
    from ..doctor.fixes.asked import fix, fix_by_text

    _check_runs(result, path)
    if flags.static:
        report = fix_by_text(path, result)
    else:
        say("observing, then comparing")
        report = fix(_run_of(path, args, flags), result, is_applied=flags.apply)
    if flags.json:
        print(encoder.dumps(report.to_json()))
        return
    for line in report.lines():
        say(line)
    print(report.diff, end="")


def _check_runs(result: "Diagnosis", path: Path) -> None:
    """Refuse a script that cannot be run.

    Raises:
        ConfigError: it does not parse, or uses no torch.
    """
    for finding in result.findings:
        if finding.rule == "syntax":
            raise ConfigError(f"{path}:{finding.line} does not parse: {finding.what}")
    if not result.has_torch:
        raise ConfigError(f"{path} does not use torch, so there are no training steps to observe")


def _run_of(path: Path, args: Sequence[str], flags: DoctorFlags) -> "ScriptRun":
    from ..doctor.observed.launching import ScriptRun

    return ScriptRun(
        script=path, args=tuple(args), price_s=flags.seconds, only=flags.only, first_s=flags.wait
    )


def _show_annotated(result: "Diagnosis", path: Path, flags: DoctorFlags) -> None:
    from ..doctor.annotated import annotate, rights_of
    from ..doctor.examine import read

    text = read(path)
    right = rights_of(text)
    show(
        flags.json,
        lambda: {**result.to_json(), "right": [line._asdict() for line in right]},
        lambda: annotate(text, result, right),
    )


def _show_observed(
    result: "Diagnosis", path: Path, args: Sequence[str], flags: DoctorFlags
) -> None:
    """Run the script and print what was observed; if it does not parse, print only that line."""
    from ..doctor.observed.launching import observe

    if any(finding.rule == "syntax" for finding in result.findings):
        _show_static(result, flags)
        return
    _check_runs(result, path)
    observation = observe(_run_of(path, args, flags))
    if flags.only and not observation.prices:
        say(f"--only {flags.only}: no fix with a name that begins with this was tried")
    show(
        flags.json,
        lambda: {**result.to_json(), "measured": True, "observation": observation.to_json()},
        lambda: _both(result, observation, flags),
    )


def _both(result: "Diagnosis", observation: "Observation", flags: DoctorFlags) -> Iterator[str]:
    from ..doctor.observed.lines import render_observation
    from ..doctor.rendering import render_bugs

    yield from render_observation(result.script, observation)
    yield from render_bugs(result, with_notes=flags.notes)


def _about_rules(flags: DoctorFlags) -> None:
    from ..doctor.catalogue import GROUPS, RULES
    from ..doctor.rendering import render_rules, render_tests
    from ..doctor.selftest import test_rules

    if not flags.test_rules:
        show(flags.json, lambda: {"rules": [rule.to_json() for rule in RULES.values()]},
             lambda: render_rules(GROUPS))  # fmt: skip
        return
    results = test_rules(RULES.values())
    show(flags.json, lambda: {"examples": [result._asdict() for result in results]},
         lambda: render_tests(results))  # fmt: skip
    if not all(result.is_right for result in results):
        sys.exit(1)
