"""What ``launch`` tells a script for DistributedDataParallel: one sentence and a diff.

Such a script would start, but its workers would train through a process group of their own, which
no protocol reaches. Its text is read, never run, and nothing is written. This module must not
know engines or settings.
"""

import ast
import difflib
import importlib.util
from pathlib import Path

from .errors import ConfigError
from .program import ScriptProgram
from .rewrite import WRAP, CannotDerive, port
from .syntax import Source

FOUR_LINES = """\
    import paceline
    pace = paceline.connect()                        # instead of init_process_group
    model, optimizer, loader = pace.prepare(model, optimizer, loader, batch="per-worker")
    for epoch in pace.epochs(10):
        for inputs, targets in loader:
            with pace.step():                        # zero_grad ... optimizer.step()"""


def check_script(program: ScriptProgram) -> None:
    """Refuse a script that is not there, is no Python, or is for DistributedDataParallel.

    Raises:
        ConfigError: what is wrong, with the diff that the script needs where it can be derived.
    """
    path = _find(program)
    if path is None:
        return
    name = str(path) if program.is_module else program.path
    try:
        source = Source(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        where = f"{name}:{error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"{where} is no valid Python ({error.msg}){line}") from None
    except (OSError, UnicodeDecodeError, ValueError):
        return  # the interpreter says it better
    hint = advise(source, name)
    if hint is not None:
        raise ConfigError(hint)


def advise(source: Source, name: str) -> str | None:
    """What a script needs to be launched; None where it needs nothing that can be seen here."""
    wraps = [*source.calls(WRAP, "distributed.init_process_group")]
    if not wraps or next(source.calls("paceline.connect"), None) is not None:
        return None
    sentence = (
        f"{name}:{wraps[0].lineno} uses torch's own process group and never calls "
        "paceline.connect(), so no protocol could reach it; under paceline it needs"
    )
    try:
        ported = port(source)
    except (CannotDerive, SyntaxError, StopIteration):
        return f"{sentence} these lines in place of those:\n\n{FOUR_LINES}"
    diff = difflib.unified_diff(
        source.lines, ported.lines, f"{name} (now)", f"{name} (for paceline)", n=1
    )
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in diff)
    return f"{sentence} this change:\n\n{text}{_left_over(ported)}".rstrip("\n")


def _find(program: ScriptProgram) -> Path | None:
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


def _left_over(source: Source) -> str:
    """The lines that still speak to a process group, which is no longer there."""
    rest = [*source.calls("multiprocessing.spawn"), *source.calls("mp.spawn")]
    rest += [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and source.meaning(node.func).startswith("torch.distributed.")
    ]
    numbers = sorted({node.lineno for node in rest})
    if not numbers:
        return ""
    lines = "".join(f"    {number}: {source.lines[number - 1].strip()}\n" for number in numbers)
    return (
        "\nThese lines then speak to a process group that is not there (paceline launch starts "
        f"the workers; pace.sum adds over them):\n{lines}"
    )
