"""Reads a script together with the file of its project that has the training loop.

    main.py  imports  engine.py, which steps in a loop
        ->  one text, in which the loop's model, optimizer and loader can be traced to main.py
        ->  the two texts again, after it was rewritten

In the one text the lines of main.py keep their numbers, those of engine.py follow a border. This
module must not know how a tree is edited.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow
from .loops import OptimizerSteps
from .reading import files_of
from .tree import CannotDerive, SourceTree, border

_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)


class ProjectFile(NamedTuple):
    """A file of a project that steps an optimizer.

    Attributes:
        module: the name by which the script imports it.
        is_repeated: whether the script calls its loop in a loop of its own.
    """

    path: Path
    module: str
    text: str
    is_repeated: bool


def files_with_loop(script: Path, main: str) -> Iterator[ProjectFile]:
    """Yield the files, of those that a script imports, whose training loops it uses.

    Args:
        main: the script's text.
    """
    folder = script.resolve().parent
    for path, text in files_of(script):
        owners, functions = _names_with_loop(text)
        if not owners:
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        tree = SourceTree(f"{main}\n{border(module)}\n")
        uses = [
            node
            for node in tree.nodes
            if isinstance(node, cst.Name | cst.Attribute) and tree.name_beside(node) in owners
        ]
        calls = [call.func for call in tree.calls(*functions)]
        is_repeated = any(isinstance(up, AnyLoop) for one in (*uses, *calls) for up in tree.up(one))
        if uses:
            yield ProjectFile(path, module, text, is_repeated)


def has_steps(text: str) -> bool:
    """Whether a file steps an optimizer."""
    steps = _steps_of(text)
    return steps is not None and bool(steps.steps)


def _steps_of(text: str) -> OptimizerSteps | None:
    """Return the steps of optimizers in a file; None if it has none, or cannot be read."""
    if "step(" not in text:
        return None
    with suppress(CannotDerive):
        return OptimizerSteps(Flow(SourceTree(text)))
    return None


def _names_with_loop(text: str) -> tuple[set[str], set[str]]:
    """Return the functions and classes whose loops step, and the functions, with methods."""
    found = _steps_of(text)
    if found is None:
        return set(), set()
    flow, script = found.flow, found.script
    chains = (chain for call, _ in found.steps for chain in flow.around_steps(call))
    scopes = {script.scope(loop) for chain in chains for loop in chain}
    functions = [scope for scope in scopes if isinstance(scope, cst.FunctionDef)]
    owners = {(flow.owner(function) or function).name.value for function in functions}
    return owners, {function.name.value for function in functions}


# -- one text of two -------------------------------------------------------------------------------


def join(texts: Sequence[str], module: str) -> str:
    """Return one text of a script and the file of a module; of a script alone, that.

    Raises:
        CannotDerive: both define a function or a class of the same name.
    """
    if len(texts) == 1:
        return texts[0]
    first, second = map(_defined, texts)
    if both := sorted(first & second):
        raise CannotDerive(f"both files define {both[0]}(); rename one of them")
    return f"\n{border(module)}\n".join(text.removesuffix("\n") for text in texts) + "\n"


def split(joined: str, texts: Sequence[str], module: str) -> list[str]:
    """Return the texts that `join` made one of, as they are now.

    Raises:
        CannotDerive: the border is gone.
    """
    if len(texts) == 1:
        return [joined]
    parts = joined.removesuffix("\n").split(f"\n{border(module)}\n")
    if len(parts) != len(texts):
        raise CannotDerive
    ends = ["\n" if text.endswith("\n") else "" for text in texts]
    return [part + end for part, end in zip(parts, ends, strict=True)]


def _defined(text: str) -> set[str]:
    return {node.name for node in ast.parse(text).body if isinstance(node, _NAMED[:3])}


def check_names(before: str, after: str, *, is_script: bool) -> None:
    """Refuse a change by which a file would use what only another one has.

    Args:
        is_script: whether it is the script that is started; the others run when it imports them.

    Raises:
        CannotDerive: it would, or it would use ``pace`` while it is imported.
    """
    old, new = ast.parse(before), ast.parse(after)
    added = _free(new) - _free(old) - {"pace", "paceline"}
    at_top = {one.id for one in _at_import(old) if isinstance(one, ast.Name)}
    added |= _declared(new) - _declared(old) - at_top
    if added:
        raise CannotDerive(f"it has no name for {', '.join(sorted(added))}")
    used = [one for one in _at_import(new) if isinstance(one, ast.Name) and one.id == "pace"]
    if not is_script and len(used) > 1:  # its own line binds it
        raise CannotDerive("it writes or downloads while it is imported, which all workers do")


def _free(tree: ast.Module) -> set[str]:
    """Return the names that a file reads and binds nowhere."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names - _bound(tree.body) - set(dir(builtins))


def _bound(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements bind, in whatever function."""
    bound: set[str] = set()
    for node in (part for statement in body for part in ast.walk(statement)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, _NAMED) and node.name:
            bound.add(node.name)
    return bound


def _declared(tree: ast.Module) -> set[str]:
    """Return the names that functions declare ``global``."""
    return {name for one in ast.walk(tree) if isinstance(one, ast.Global) for name in one.names}


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a file is imported."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(node)


def placed(sentence: str, names: Sequence[str], texts: Sequence[str]) -> str:
    """Return a sentence on the one text with the files that its lines stand in.

    Args:
        sentence: it begins with the script, and a line.
        names: of both files, as the user is told.
    """
    first = len(texts[0].removesuffix("\n").split("\n")) + 1

    def place(number: str, word: str = "") -> str:
        line = int(number)
        return f"{word}{number}" if line <= first else f"{names[1]}:{line - first}"

    def each(replaced: Callable[[str], str], found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda number: replaced(number[0]), found[0])

    own = rf"{re.escape(names[0])}:(\d+)"
    sentence = re.sub(own, lambda found: place(found[1], f"{names[0]}:"), sentence)
    several = r"\blines \d+(?:(?:, | and | to )\d+)*"
    sentence = re.sub(several, lambda found: each(place, found), sentence)
    sentence = re.sub(r"\bline (\d+)", lambda found: place(found[1], "line "), sentence)
    return re.sub(rf"\blines (?={re.escape(names[1])}:\d)", "", sentence)
