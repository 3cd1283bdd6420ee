"""Answers ``launch --check``: the change that a script needs, or why it cannot be ported.

    text -> nothing to add | a diff and notes on it | a sentence why the script cannot be ported

If the training loop is in a file that the script imports, both are read, and the diff is of both.
The script is read, never run, and nothing is written. This module must not know engines or
settings.
"""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError
from ..program import ScriptProgram
from .accelerate import is_for_accelerate, leave_accelerate
from .notes import notes_of_loop
from .parts import STARTED
from .porting import STRATEGY, by_hand, find, is_foreign, left_over, notes_of_groups, read
from .project import files_with_loop, has_steps, join, placed
from .reading import Source, note_of_writes
from .refusals import refuse_anywhere
from .rewrite import port, port_together
from .tree import CannotDerive, SourceTree

_MARK = "\ufeff"
"""The byte order mark with which some editors begin a UTF-8 file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The change that a script needs.

    Attributes:
        script: its path.
        diff: a unified diff for ``patch -p0``, run here or, for a script that lies elsewhere, in
            its folder; empty if there is nothing to add, or if the script cannot be ported.
        added: the number of lines that are new or changed, not counting those that are only
            indented.
        reason: why the script cannot be ported, in one sentence; empty if it can.
        notes: what to know of the changed script, a sentence each.
    """

    script: str
    diff: str = ""
    added: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "script": self.script,
            "verdict": "refused" if self.reason else "change" if self.diff else "nothing to add",
            "diff": self.diff,
            "added_lines": self.added,
            "reason": self.reason or None,
            "notes": list(self.notes),
        }


def check(program: ScriptProgram) -> CheckResult:
    """Read a script, and return the change that it needs.

    Raises:
        ConfigError: it does not exist, or is not Python.
    """
    path = find(program)
    if path is None:
        raise ConfigError(f"module {program.path} has no Python file to read")
    try:
        text = path.read_bytes().decode("utf-8")
        source = Source(text.removeprefix(_MARK))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid Python ({error.msg})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python in UTF-8: {error}") from None
    mark = _MARK if text.startswith(_MARK) else ""
    result = judge(source, str(path), mark)
    if mark or has_steps(source.text):
        return result
    return _judge_project(path, source, result)


def _judge_project(path: Path, source: Source, result: CheckResult) -> CheckResult:
    """Return the change that a script needs if a file that it imports has its loop."""
    files = list(files_with_loop(path, source.text)) if result.reason else []
    if not files or _has_workers(source):
        return result
    names = [os.path.relpath(file.path) for file in files]
    if len(files) > 1:
        both = f"{' and '.join(names)} all train, but a run has one training loop"
        return CheckResult(script=str(path), reason=f"{path}: the loops of {both}")
    [file], [name], script = files, names, os.path.relpath(path.resolve())
    others = Source(file.text)
    try:
        changed = _judge_together((source, others), (script, name), file.module)
    except CannotDerive as error:
        changed, reason = None, error.why.removesuffix(f"; {STARTED}")
    if changed is None and not file.is_repeated and not is_foreign(source):
        alone = judge(others, name, label=_label_beside(script, name))
        writes = note_of_writes(source, str(path))
        changed = None if alone.reason else replace(alone, notes=(*alone.notes, writes))
    if changed is None:
        detail = f"its loop is in another file: {reason or f'{name}, which is not understood'}"
        reason = by_hand(source, str(path), detail, is_in_files=True)
        return CheckResult(script=str(path), reason=reason)
    notes = tuple(note for note in (*changed.notes, *notes_of_groups(path)) if note)
    return replace(changed, script=str(path), notes=notes)


def _has_workers(source: Source) -> bool:
    """Whether a script itself has what cannot be ported, such as workers of its own."""
    try:
        refuse_anywhere(SourceTree(source.text))
    except CannotDerive:
        return True
    return False


def _judge_together(sources: Sequence[Source], names: Sequence[str], module: str) -> CheckResult:
    """Return the change of a script and of the file of a module that it imports.

    Raises:
        CannotDerive: there is none.
    """
    texts = [source.text for source in sources]
    try:
        after = port_together(texts, module)
        ported = [Source(text) for text in after]
        is_per_worker = any(_PER_WORKER in text for text in after)
        notes = [*notes_of_loop(join(texts, module), names[0], is_per_worker=is_per_worker)]
    except SyntaxError:
        raise CannotDerive from None
    except CannotDerive as error:
        raise CannotDerive(placed(error.why, names, texts)) from None
    notes = [placed(note, names, texts) for note in notes]
    for one, name in zip(ported, names, strict=True):
        left = left_over(one)
        notes += [note_of_writes(one, name), left and f"{name}: {left}"]
    labels = (_label(names[0]), _label_beside(*names))
    files = list(zip(texts, after, labels, strict=True))
    return CheckResult(
        script=names[0],
        diff="".join(unified(old, new, label) for old, new, label in files if old != new),
        added=sum(added_lines(old, new) for old, new, _ in files),
        notes=tuple(note for note in notes if note),
    )


_PER_WORKER = 'batch="per-worker"'
"""What ``prepare`` is given where a batch of the loader is one worker's, as under DDP."""


def judge(source: Source, name: str, mark: str = "", label: str = "") -> CheckResult:
    """Return the change that a script's text needs.

    Args:
        name: its path.
        mark: what its file begins with before the text: a byte order mark, or nothing.
        label: the file's name in the diff, if it is not the script that is started.
    """
    if next(source.calls("paceline.connect", STRATEGY), None) is not None:
        known = read(source, name)
        return CheckResult(
            script=name, notes=tuple(note for note in (*known.notes, known.writes) if note)
        )
    try:
        is_accelerated = is_for_accelerate(source)
        after, notes = leave_accelerate(source.text) if is_accelerated else (port(source.text), ())
        ported = Source(after)
    except (CannotDerive, SyntaxError) as error:
        reason = error.why if isinstance(error, CannotDerive) else ""
        return CheckResult(script=name, reason=by_hand(source, name, reason))
    further_notes = [
        *notes_of_loop(source.text, name, is_per_worker=_PER_WORKER in after),
        note_of_writes(ported, name),
        left_over(ported),
    ]
    return CheckResult(
        script=name,
        diff=unified(mark + source.text, mark + after, label or _label(name)),
        added=added_lines(source.text, after),
        notes=(*notes, *(note for note in further_notes if note)),
    )


def _label(name: str) -> str:
    """Return a file's name in a diff: relative to here or to its own folder, as patch demands."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    is_below = not path.is_absolute() and ".." not in path.parts
    return path.as_posix() if is_below else path.name


def _label_beside(script: str, name: str) -> str:
    """Return the name of a file in a diff whose script has its `_label`."""
    place = os.path.relpath(name, Path(script).parent)
    return (Path(_label(script)).parent / place).as_posix()


def unified(before: str, after: str, name: str) -> str:
    """Return a diff that ``patch -p0`` and ``git apply`` accept, whatever the line endings."""
    old, new = _rows(before), _rows(after)
    rows = list(difflib.unified_diff(old, new, name, name))
    terminated = [
        row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows
    ]
    return "".join(terminated)


def added_lines(before: str, after: str) -> int:
    """Count lines that are new or changed, ignoring indentation and empty lines."""
    old = [row.strip() for row in _rows(before) if row.strip()]
    new = [row.strip() for row in _rows(after) if row.strip()]
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return len(new) - sum(block.size for block in blocks)


def _rows(text: str) -> list[str]:
    r"""Return the lines of a text as diffs count them: a form feed does not end one."""
    return [f"{row}\n" for row in text.split("\n")[:-1]] + [
        row for row in (text.rsplit("\n")[-1],) if row
    ]
