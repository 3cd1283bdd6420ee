"""What ``launch`` tells a script for another library's workers: one sentence, and a diff or lines.

Such a script would start, but its workers would train through a process group of their own, which
no protocol reaches. Its text is read, never run, and nothing is written. This module must not
know engines or settings.
"""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..program import ScriptProgram
from .reading import INIT, WRAP, Source, note_of_writes

_STEP_LINES = """\
    for epoch in pace.epochs(10):
        for inputs, targets in loader:
            with pace.step():                        # zero_grad ... optimizer.step()"""
_PLAIN = (
    "the lines are pace = paceline.connect(), model, optimizer, loader = pace.prepare(model, "
    "optimizer, loader) before the loop, and with pace.step(): around what it does with a batch"
)
_FOREIGN = {
    "accelerate.Accelerator": "Accelerate",
    "lightning.Trainer": "Lightning",
    "lightning.pytorch.Trainer": "Lightning",
    "pytorch_lightning.Trainer": "Lightning",
    "transformers.Trainer": "the Trainer of transformers",
    "deepspeed.initialize": "DeepSpeed",
    "horovod.torch.init": "Horovod",
}
"""What begins a run of another library, and what people call that library."""
STRATEGY = "paceline.lightning.PacelineStrategy"
_LOOKING = ("accelerate", "transformers")
"""Make a process group by themselves where RANK and WORLD_SIZE are set."""


class Reading(NamedTuple):
    """What was read in a script that can be launched.

    Attributes:
        has_group: whether it, or a library of its own, makes a process group of torch's own where
            RANK and WORLD_SIZE are set: for its other starts.
        notes: sentences that the user should read before the run.
        writes: the sentence on what several workers would write at the same time; or empty.
    """

    has_group: bool = False
    notes: tuple[str, ...] = ()
    writes: str = ""


def check_script(program: ScriptProgram) -> Reading:
    """Refuse a script that is not there, is no Python, or is written for another library's workers.

    Raises:
        ConfigError: what is wrong, with the diff that the script needs where it can be derived.
    """
    path = find(program)
    if path is None:
        return Reading()
    name = str(path) if program.is_module else program.path
    try:
        source = Source(path.read_text(encoding="utf-8-sig"))
    except SyntaxError as error:
        where = f"{name}:{error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{where} is no valid Python ({error.msg}){line}") from None
    except (OSError, UnicodeDecodeError, ValueError):
        return Reading()  # the interpreter says it better
    hint = advise(source, name)
    if hint is not None:
        raise ConfigError(hint)
    return read(source, name)


def read(source: Source, name: str) -> Reading:
    """What is to be known of a script that can be launched."""
    group, writes = next(source.calls(INIT), None), note_of_writes(source, name)
    if group is None:
        return Reading(has_group=bool(source.imports(*_LOOKING)), writes=writes)
    note = (
        f"{name}:{group.lineno} makes a process group of torch's own, for other launchers: RANK "
        "and WORLD_SIZE are not set here, so that a branch which looks for them is not taken "
        "(pace.worker, pace.num_workers and pace.is_main say who is who)"
    )
    return Reading(True, (note,), writes)


def advise(source: Source, name: str) -> str | None:
    """What a script for another library's workers needs; None where nothing can be seen here."""
    if next(source.calls("paceline.connect", STRATEGY), None) is not None:
        return None
    who = _whose(source, name)
    if not who:
        return None
    from .check import judge  # here: only who is refused needs libcst

    verdict = judge(source, name)
    if not verdict.diff:
        return verdict.reason
    notes = "".join(f"\n{one}" for one in verdict.notes)
    return f"{who}; under paceline it needs this change:\n\n{verdict.diff}{notes}".rstrip("\n")


def _whose(source: Source, name: str) -> str:
    """The half of a sentence that says whose workers a script has; empty: nobody else's."""
    if (foreign := _foreign(source)) is not None:
        return (
            f"{name}:{foreign[0].lineno} is written for {foreign[1]}, whose workers no protocol of "
            "paceline could reach"
        )
    if (group := next(source.calls(WRAP, INIT), None)) is not None:
        return (
            f"{name}:{group.lineno} uses torch's own process group and never calls "
            "paceline.connect(), so no protocol could reach it"
        )
    return ""


def _foreign(source: Source) -> tuple[ast.Call, str] | None:
    """What begins a run of another library, and that library."""
    for call in (one for one in ast.walk(source.tree) if isinstance(one, ast.Call)):
        library = _FOREIGN.get(source.meaning(call.func))
        if library is not None:
            return call, library
    return None


def by_hand(source: Source, name: str, why: str) -> str:
    """Why a script cannot be carried, and the lines to write by hand."""
    who, because = _whose(source, name), f" ({why})" if why else ""
    if (foreign := _foreign(source)) is not None:
        return f"{who}; {_other_library(source, foreign[1])}{because}"
    if not who:
        reason = why or "it is written in a way that is not followed"
        return f"{name}: {reason}" if why else f"{name}: {reason}; {_PLAIN}"
    from .parts import names_of

    lines = _own_lines(source, names_of(source.text))
    return f"{who}{because}; under paceline it needs these lines in place of those:\n\n{lines}"


def _other_library(source: Source, library: str) -> str:
    """The lines of a script whose workers are another library's."""
    if library == "Lightning":
        return (
            "under paceline it needs a strategy:\n\n"
            "    from paceline.lightning import PacelineStrategy\n"
            "    trainer = Trainer(strategy=PacelineStrategy(), ...)\n\n"
            "then start it as now, by python, with Trainer(devices=2), or by paceline launch"
        )
    prepared = next((one for one in source.calls("prepare") if one.args), None)
    names = "model, optimizer, loader"
    if prepared is not None and all(isinstance(one, ast.Name) for one in prepared.args):
        names = ", ".join(map(source.code, prepared.args))
    line = "" if prepared is None else f"  # line {prepared.lineno}"
    backward = ", pace.backward(loss)" if library == "Accelerate" else ""
    subclass = (
        "a subclass of 20 lines does the same (docs/frameworks.md), "
        if "Trainer" in library
        else ""
    )
    return (
        "under paceline the script has a loop of its own, with these lines:\n\n"
        "    import paceline\n"
        "    pace = paceline.connect()\n"
        f"    {names} = pace.prepare({names}){line}\n"
        f"{_STEP_LINES}\n\n"
        f"pace.is_main, pace.print, pace.device, pace.once(){backward} and pace.evaluate(fn, "
        f"loader) take the place of its own; {subclass}or start it by its own launcher"
    )


def _own_lines(source: Source, parts: list[str] | None) -> str:
    """The lines that a script needs, with the numbers of those that they stand for."""
    group, wrap = next(source.calls(INIT), None), next(source.calls(WRAP), None)
    instead = [f"instead of line {one.lineno}" if one else "" for one in (group, wrap)]
    names = ", ".join(parts or ("model", "optimizer", "loader"))
    rows = [
        ("import paceline", ""),
        ("pace = paceline.connect()", instead[0]),
        (f'{names} = pace.prepare({names}, batch="per-worker")', instead[1]),
    ]
    lines = [f"    {text}{f'  # {note}' if note else ''}" for text, note in rows]
    if next(source.calls("DataLoader"), None) is None:
        lines.append("    # loader: a DataLoader over a map-style data set; none was found here")
    return "\n".join([*lines, _STEP_LINES])


def find(program: ScriptProgram) -> Path | None:
    """The script's file; None for a module that has none."""
    if not program.is_module:
        path = Path(program.path)
        if not path.is_file():
            raise ConfigError(f"there is no script {program.path} (looked in {Path.cwd()})")
        return path
    beside = Path(*program.path.split("."))
    for path in (beside.with_suffix(".py"), beside / "__main__.py"):
        if path.is_file():
            return path
    try:
        spec = importlib.util.find_spec(program.path)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(f"there is no module {program.path} here or among the installed ones")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def left_over(source: Source) -> str:
    """A sentence on the lines that still speak to a process group, which is no longer there."""
    if next(source.calls(INIT), None) is not None:
        return ""  # they stand in a branch that is not taken
    rest = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and source.meaning(node.func).startswith("torch.distributed.")
    ]
    numbers = sorted({node.lineno for node in rest})
    if not numbers:
        return ""
    lines = "".join(f"\n    {number}: {source.lines[number - 1].strip()}" for number in numbers)
    return (
        "These lines then speak to a process group that is not there (paceline launch starts the "
        f"workers; pace.sum adds over them):{lines}"
    )
