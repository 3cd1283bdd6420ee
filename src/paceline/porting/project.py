"""Reads a script together with the file of its project that has the training loop.

    main.py  imports  engine.py, which steps in a loop
        ->  one text, in which the loop's model, optimizer and loader can be traced to main.py
        ->  the two texts again, after it was rewritten

Only files in the script's own folder and below are read, never installed ones. This module must not
know how a tree is edited or what is told to the user.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import libcst as cst

from .dataflow import Flow
from .loops import OptimizerSteps
from .tree import CannotDerive, SourceTree

_BORDER = "# ---- paceline: the next file begins here ----"
_MOST_FILES = 40


def files_with_steps(script: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that a script imports, itself or through others, which step an optimizer."""
    pending, seen = [script.resolve()], {script.resolve()}
    for path in pending:
        text = _text_of(path)
        if path != pending[0] and text and has_steps(text):
            yield path, text
        for further in _imported_files(path, text, script.resolve().parent):
            if further not in seen and len(seen) < _MOST_FILES:
                seen.add(further)
                pending.append(further)


def has_steps(text: str) -> bool:
    """Whether a script steps an optimizer."""
    if "step(" not in text:
        return False
    try:
        return bool(OptimizerSteps(Flow(SourceTree(text))).steps)
    except CannotDerive:
        return False


def loop_is_used(main: str, other: str) -> bool:
    """Whether a script names a function, or its class, in which another file steps in a loop."""
    flow = Flow(script := SourceTree(other))
    chains = (chain for call, _ in OptimizerSteps(flow).steps for chain in flow.around_steps(call))
    scopes = {script.scope(loop) for chain in chains for loop in chain}
    owners = [flow.owner(scope) or scope for scope in scopes]
    names = [owner.name.value for owner in owners if not isinstance(owner, cst.Module)]
    return any(re.search(rf"\b{name}\b", main) for name in names)


def _text_of(path: Path) -> str:
    """Return a file's text; empty if it cannot be read, or begins with a byte order mark."""
    try:
        text = path.read_bytes().decode("utf-8")  # with its own line endings, for the diff
        ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return ""
    return text


def _imported_files(path: Path, text: str, folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(path.parents):
                continue
            start = path.parents[node.level - 1] if node.level else folder
            module = node.module or ""
            names = [(start, module)]
            names += [(start, f"{module}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for start, name in names:
            place = start.joinpath(*name.split(".")) if name else start
            for found in (place.with_suffix(".py"), place / "__init__.py"):
                if found.is_file() and found.resolve().is_relative_to(folder):
                    yield found.resolve()


# -- one text of several ---------------------------------------------------------------------------


def join(texts: Sequence[str]) -> str:
    """Return one text of several: the lines of the first keep their numbers.

    Raises:
        CannotDerive: two of them define a function or a class of the same name.
    """
    if len(texts) == 1:
        return texts[0]
    names = [name for text in texts for name in _defined(text)]
    if len(names) > len(set(names)):
        raise CannotDerive
    return f"\n{_BORDER}\n".join(text.removesuffix("\n") for text in texts) + "\n"


def split(joined: str, texts: Sequence[str]) -> list[str]:
    """Return the texts that `join` made one of, as they are now."""
    if len(texts) == 1:
        return [joined]
    parts = joined.removesuffix("\n").split(f"\n{_BORDER}\n")
    if len(parts) != len(texts):
        raise CannotDerive
    ends = ["\n" if text.endswith("\n") else "" for text in texts]
    return [part + end for part, end in zip(parts, ends, strict=True)]


def _defined(text: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds)]


def in_their_files(sentence: str, names: Sequence[str], texts: Sequence[str]) -> str:
    """Return a sentence on the joined text with the files that its lines stand in.

    Args:
        sentence: it begins with the first name, and a line.
        names: the files, by which they are told to the user.
    """
    first = len(texts[0].removesuffix("\n").split("\n")) + 1

    def placed(found: re.Match[str]) -> str:
        lines = [int(number) for number in re.findall(r"\d+", found[2])]
        if all(line <= first for line in lines):
            return found[0]
        return ", ".join(f"{names[1]}:{line - first}" for line in lines)

    lines = r"\d+(?:, \d+)*"
    return re.sub(rf"({re.escape(names[0])}:|\blines? )({lines})", placed, sentence)
