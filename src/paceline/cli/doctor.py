"""``paceline doctor``: what is wrong in a training script, what is slow, what each fix is worth.

    --rules | --test-rules | a model | --undo | --fix | --annotate | --static | the script runs

Above 300 lines, since each of these ways has its flags.
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
        Read the script, and never run it.
    input
        Shape of one input of a model, pkg.module:model, batch first (repeat it for several inputs):
        64,3,32,32 or 64,128:int64.
    seconds
        About how many seconds to spend on finding what each fix is worth; 0 tries none.
    only
        Try only the fixes whose names begin so, as num_workers [default: all].
    wait
        How many seconds to wait for the first training step; from each step to the next it waits a
        minute longer.
    fix
        Print a unified diff of what can be fixed without changing numbers, proved over 20 steps.
    apply
        Write that diff into the script; with --fix.
    undo
        Put the script back as it was before --fix --apply.
    annotate
        Print the script as a listing, with what is wrong and what is right under each line; it is
        not run.
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
    """Find what is wrong in a training script, where a step's time goes, what each fix is worth.

    The script runs in a process of its own for some dozen steps, with its arguments; then fixes
    are tried between its steps, in turn with none, until it is clear whether they save 2 %. With
    --static it is only read. Exit code 0 where the file has no bug at the end, also after --fix
    --apply; 1 where it has one, mended by the diff of --fix or not; 2 where nothing could be read
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
    way = _way(script, flags)
    _refuse_idle(way, args, flags)
    if flags.rules or flags.test_rules:
        _about_rules(flags)
    elif script is not None and way == _MODEL:
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
_HEARD = {
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
"""Each way in words, and the flags that have an effect in it."""
_RUNS = ("with --fix", "where the script runs")


_SPEC = re.compile(r"(?!\S*\.py:)[\w.]*:[\w.]*")
"""A module and a name in it; no line of a script, drive or address."""


def _way(script: str | None, flags: DoctorFlags) -> str:
    """The first way that the flags ask for."""
    is_spec = (
        script is not None and _SPEC.fullmatch(script) is not None and not Path(script).exists()
    )
    is_asked = (
        flags.test_rules, flags.rules, bool(flags.input) or is_spec, flags.undo,
        flags.fix and flags.static, flags.fix, flags.annotate, flags.static, True,
    )  # fmt: skip
    return next(way for way, is_it in zip(_HEARD, is_asked, strict=True) if is_it)


def _refuse_idle(way: str, args: Sequence[str], flags: DoctorFlags) -> None:
    """Refuse flags that would do nothing, misspelled ones included.

    Raises:
        ConfigError: there is such a flag.
    """
    if flags.sarif and way == "where the script runs":
        raise ConfigError("--sarif holds only what is found by reading: add --static")
    if flags.apply and way != "with --fix":
        raise ConfigError("--apply needs a proof by running: use --fix --apply without --static")
    idle = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(flags)
        if field.name not in _HEARD[way] and getattr(flags, field.name) != field.default
    ]
    if idle:
        do = "does" if len(idle) == 1 else "do"
        raise ConfigError(f"{', '.join(idle)} {do} nothing {way}: leave it out")
    if flags.notes and (flags.json or flags.sarif):
        raise ConfigError("--json and --sarif include the notes already; leave --notes out")
    if args and way not in _RUNS:
        raise ConfigError(f"{' '.join(args)} is for a script, and none runs {way}")
    if flags.only and not flags.seconds:
        raise ConfigError("--only selects the fixes to try, and --seconds 0 tries none")


def _show_model(spec: str, flags: DoctorFlags) -> None:
    """Make a model, walk it with inputs of these shapes, and print the findings."""
    from ..doctor.built.checks import check
    from ..doctor.built.tables import render_model
    from ..doctor.built.walk import walk
    from ..doctor.findings import Severity
    from ..exports.subject import own_subject, parse_input

    if not flags.input:
        raise ConfigError(
            f"doctor {spec} needs the shape of an input, batch first: --input 64,3,32,32"
        )
    shapes = [parse_input(one) for one in flags.input]
    batches = {int(one.partition(",")[0].partition(":")[0]) for one in flags.input}
    if len(batches) > 1:
        raise ConfigError(f"every --input must have the same batch size, got {sorted(batches)}")
    (batch,) = batches
    seen = walk(own_subject(spec, shapes, flag="").model, batch, shapes)
    result = check(seen)
    show(
        flags.json,
        lambda: {"model": spec, "findings": [one.to_json() for one in result],
                 "parameters": seen.num_parameters, "output": list(seen.outputs)},
        lambda: render_model(spec, seen, result),
    )  # fmt: skip
    bad = {Severity.BUG, Severity.COST} if flags.strict else {Severity.BUG}
    if any(one.severity in bad for one in result):
        sys.exit(1)


def _path(script: str | None, flags: DoctorFlags) -> Path:
    """The script.

    Raises:
        ConfigError: there is no script, or flags exclude each other.
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
    """The diff on standard output, all else on standard error."""
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
        lambda: {**result.to_json(), "right": [one._asdict() for one in right]},
        lambda: annotate(text, result, right),
    )


def _show_observed(
    result: "Diagnosis", path: Path, args: Sequence[str], flags: DoctorFlags
) -> None:
    """Run the script; if it does not parse, show that line as the finding."""
    from ..doctor.observed.launching import observe

    if any(finding.rule == "syntax" for finding in result.findings):
        _show_static(result, flags)
        return
    _check_runs(result, path)
    seen = observe(_run_of(path, args, flags))
    if flags.only and not seen.prices:
        say(f"--only {flags.only}: no fix whose name begins so was tried")
    show(
        flags.json,
        lambda: {**result.to_json(), "measured": True, "observation": seen.to_json()},
        lambda: _both(result, seen, flags),
    )


def _both(result: "Diagnosis", seen: "Observation", flags: DoctorFlags) -> Iterator[str]:
    from ..doctor.observed.lines import render_observation
    from ..doctor.rendering import render_bugs

    yield from render_observation(result.script, seen)
    yield from render_bugs(result, with_notes=flags.notes)


def _about_rules(flags: DoctorFlags) -> None:
    from ..doctor.catalogue import GROUPS, RULES
    from ..doctor.rendering import render_rules, render_tests
    from ..doctor.selftest import test_rules

    if not flags.test_rules:
        show(flags.json, lambda: {"rules": [one.to_json() for one in RULES.values()]},
             lambda: render_rules(GROUPS))  # fmt: skip
        return
    results = test_rules(RULES.values())
    show(flags.json, lambda: {"examples": [result._asdict() for result in results]},
         lambda: render_tests(results))  # fmt: skip
    if not all(result.is_right for result in results):
        sys.exit(1)
