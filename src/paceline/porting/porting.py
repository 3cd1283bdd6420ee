"""What ``launch`` tells the user of a script for another library's workers: a sentence, and a diff.

Such a script would start, but its workers would train through their own process group, outside of
paceline's protocols. If there is no diff, the lines to write by hand are shown. The text
is read, never run, and nothing is written. This module must not know engines or settings.
"""

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..program import ScriptProgram
from .reading import INIT, WRAP, Source, files_of, note_of_writes

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
"""The calls that begin a run of another library, and the library's usual name."""
STRATEGY = "paceline.lightning.PacelineStrategy"
_GROUP_MAKERS = ("accelerate", "transformers")
"""Packages that make a process group by themselves if RANK and WORLD_SIZE are set."""


class Reading(NamedTuple):
    """What was found in a script that can be launched.

    Attributes:
        has_group: whether the script, or a library that it uses, makes torch's own process group
            if RANK and WORLD_SIZE are set, for when other launchers start it.
        notes: sentences that the user should read before the run.
        writes: the sentence on what several workers would write at the same time, if anything.
    """

    has_group: bool = False
    notes: tuple[str, ...] = ()
    writes: str = ""


def check_script(program: ScriptProgram) -> Reading:
    """Read a script; refuse it if it is missing, not Python, or for another library's workers.

    Raises:
        ConfigError: what is wrong, with the diff that the script needs if it can be derived.
    """
    path = find(program)
    if path is None:
        return Reading()
    name = str(path) if program.is_module else program.path
    try:
        source = Source(path.read_text(encoding="utf-8-sig"))
    except SyntaxError as error:
        location = f"{name}:{error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{location} is not valid Python ({error.msg}){line}") from None
    except (OSError, UnicodeDecodeError, ValueError):
        return Reading()  # the interpreter explains it better
    hint = advise(source, name)
    if hint is not None:
        raise ConfigError(hint)
    reading, further = read(source, name), tuple(notes_of_groups(path))
    return reading._replace(
        has_group=reading.has_group or bool(further), notes=(*reading.notes, *further)
    )


def notes_of_groups(script: Path) -> Iterator[str]:
    """Yield what is to be known of other files of a script that make torch's process group."""
    for path, text in files_of(script):
        group = next(Source(text).calls(INIT), None)
        if group is not None:
            yield _note_of_group(os.path.relpath(path), group.lineno)


def _note_of_group(name: str, line: int) -> str:
    return (
        f"{name}:{line} makes a torch.distributed process group, for other launchers: RANK "
        "and WORLD_SIZE are not set here, so a branch that checks for them is not taken (use "
        "pace.worker, pace.num_workers and pace.is_main)"
    )


def read(source: Source, name: str) -> Reading:
    """Return what is to be known of a script that can be launched."""
    group, writes = next(source.calls(INIT), None), note_of_writes(source, name)
    if group is None:
        return Reading(has_group=bool(source.imports(*_GROUP_MAKERS)), writes=writes)
    return Reading(True, (_note_of_group(name, group.lineno),), writes)


def advise(source: Source, name: str) -> str | None:
    """Return what a script for another library's workers needs; None for any other script."""
    if next(source.calls("paceline.connect", STRATEGY), None) is not None:
        return None
    foreign = _foreign_workers(source, name)
    if not foreign:
        return None
    from .check import judge  # here: only scripts that are refused need libcst

    verdict = judge(source, name)
    if not verdict.diff:
        return verdict.reason
    notes = "".join(f"\n{note}" for note in verdict.notes)
    return f"{foreign}; under paceline it needs this change:\n\n{verdict.diff}{notes}".rstrip("\n")


def is_foreign(source: Source) -> bool:
    """Whether a script is for another library's workers, or for a process group of torch's."""
    return bool(_foreign_workers(source, ""))


def _foreign_workers(source: Source, name: str) -> str:
    """Return the half of a sentence that names a script's foreign workers; empty if it has none."""
    if (foreign := _foreign_run(source)) is not None:
        return (
            f"{name}:{foreign[0].lineno} is written for {foreign[1]}, whose workers paceline's "
            "protocols cannot reach"
        )
    if (group := next(source.calls(WRAP, INIT), None)) is not None:
        return (
            f"{name}:{group.lineno} uses torch's own process group and never calls "
            "paceline.connect(), so paceline's protocols cannot reach it"
        )
    return ""


def _foreign_run(source: Source) -> tuple[ast.Call, str] | None:
    """Return the call that begins a run of another library, and that library, if there is one."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        library = _FOREIGN.get(source.meaning(call.func))
        if library is not None:
            return call, library
    return None


def by_hand(source: Source, name: str, detail: str, *, is_in_files: bool = False) -> str:
    """Return why a script cannot be ported, and the lines to write by hand.

    Args:
        is_in_files: whether the lines belong into several files.
    """
    foreign, explanation = _foreign_workers(source, name), f" ({detail})" if detail else ""
    if (run := _foreign_run(source)) is not None:
        return f"{foreign}; {_other_library(source, run[1])}{explanation}"
    if not foreign:
        reason = detail or "it is written in a way that is not understood"
        if is_in_files:
            return f"{name}: {reason}; {_PLAIN}; paceline.connect() is the same in each file"
        return f"{name}: {reason}" if detail else f"{name}: {reason}; {_PLAIN}"
    from .parts import names_of

    lines = _lines_by_hand(source, names_of(source.text))
    return (
        f"{foreign}{explanation}; under paceline it needs these lines in place of those:\n\n{lines}"
    )


def _other_library(source: Source, library: str) -> str:
    """Return the lines to write in a script whose workers are another library's."""
    if library == "Lightning":
        return (
            "under paceline it needs a strategy:\n\n"
            "    from paceline.lightning import PacelineStrategy\n"
            "    trainer = Trainer(strategy=PacelineStrategy(), ...)\n\n"
            "then start it as before, with python and Trainer(devices=2), or with paceline launch"
        )
    prepared = next((call for call in source.calls("prepare") if call.args), None)
    names = "model, optimizer, loader"
    if prepared is not None and all(isinstance(argument, ast.Name) for argument in prepared.args):
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
        f"loader) replace the library's own; {subclass}or start it with the library's launcher"
    )


def _lines_by_hand(source: Source, parts: list[str] | None) -> str:
    """Return the lines that a script needs, with the numbers of the lines that they replace."""
    group, wrap = next(source.calls(INIT), None), next(source.calls(WRAP), None)
    replaced = [f"instead of line {call.lineno}" if call else "" for call in (group, wrap)]
    names = ", ".join(parts or ("model", "optimizer", "loader"))
    rows = [
        ("import paceline", ""),
        ("pace = paceline.connect()", replaced[0]),
        (f'{names} = pace.prepare({names}, batch="per-worker")', replaced[1]),
    ]
    lines = [f"    {text}{f'  # {note}' if note else ''}" for text, note in rows]
    if next(source.calls("DataLoader"), None) is None:
        lines.append("    # loader: a DataLoader over a map-style dataset; none was found here")
    return "\n".join([*lines, _STEP_LINES])


def find(program: ScriptProgram) -> Path | None:
    """Return the script's file; None for a module that has none.

    Raises:
        ConfigError: there is no such script or module.
    """
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
    """Return a sentence on lines that still use the process group, which no longer exists."""
    if next(source.calls(INIT), None) is not None:
        return ""  # those lines are in a branch that is not taken
    calls = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and source.meaning(node.func).startswith("torch.distributed.")
    ]
    numbers = sorted({node.lineno for node in calls})
    if not numbers:
        return ""
    lines = "".join(f"\n    {number}: {source.lines[number - 1].strip()}" for number in numbers)
    return (
        "These lines then use a process group that does not exist (paceline launch starts the "
        f"workers; pace.sum adds over them):{lines}"
    )
