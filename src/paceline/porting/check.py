"""Answers ``launch --check``: the change that a script needs, or why it cannot be ported.

    text -> nothing to add | a diff and notes on it | a sentence why the script cannot be ported

If the training loop is in a file that the script imports, both are read, and the diff is of both.
The script is read, never run, and nothing is written. This module must not know engines or
settings.
"""

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..program import ScriptProgram
from .accelerate import is_for_accelerate, leave_accelerate
from .loops import NO_LOOP
from .notes import notes_of_loop
from .parts import STARTED
from .porting import STRATEGY, by_hand, find, is_foreign, left_over, read
from .project import files_with_steps, has_steps, in_their_files, join, loop_is_used
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
    if not result.reason or mark or has_steps(source.text):
        return result
    return _judge_project(path, source, result)


def _judge_project(path: Path, source: Source, result: CheckResult) -> CheckResult:
    """Return the change that a script needs if a file that it imports has its loop."""
    for other, text in files_with_steps(path):
        sources = (source, Source(text))
        name = str(path.parent / os.path.relpath(other, path.resolve().parent))
        try:
            return _judge_together(sources, (str(path), name))
        except CannotDerive as error:
            reason = error.why.removesuffix(f"; {STARTED}")
        if not loop_is_used(source.text, text):
            continue
        if not _is_refused(source) and not (alone := judge(sources[1], name)).reason:
            return dataclasses.replace(alone, script=str(path))
        if NO_LOOP in result.reason:
            detail = f"its loop is in another file: {reason or f'{name}, which is not understood'}"
            reason = by_hand(source, str(path), detail, is_in_files=True)
            result = CheckResult(script=str(path), reason=reason)
    return result


def _is_refused(source: Source) -> bool:
    """Whether a script cannot stay as it is: it has workers of its own, or another library's."""
    try:
        refuse_anywhere(SourceTree(source.text))
    except CannotDerive:
        return True
    return is_foreign(source)


def _judge_together(sources: Sequence[Source], names: Sequence[str]) -> CheckResult:
    """Return the change of a script and of a file that it imports.

    Raises:
        CannotDerive: there is none.
    """
    texts = [source.text for source in sources]
    try:
        after = port_together(texts)
        ported = [Source(text) for text in after]
        is_per_worker = any(_PER_WORKER in text for text in after)
        notes = [*notes_of_loop(join(texts), names[0], is_per_worker=is_per_worker)]
    except SyntaxError:
        raise CannotDerive from None
    except CannotDerive as error:
        raise CannotDerive(in_their_files(error.why, names, texts)) from None
    notes = [in_their_files(note, names, texts) for note in notes]
    for one, name in zip(ported, names, strict=True):
        notes += [note_of_writes(one, name), left_over(one)]
    files = list(zip(texts, after, names, strict=True))
    return CheckResult(
        script=names[0],
        diff="".join(unified(old, new, _label(name)) for old, new, name in files if old != new),
        added=sum(added_lines(old, new) for old, new, _ in files),
        notes=tuple(note for note in notes if note),
    )


_PER_WORKER = 'batch="per-worker"'
"""What ``prepare`` is given where a batch of the loader is one worker's, as under DDP."""


def judge(source: Source, name: str, mark: str = "") -> CheckResult:
    """Return the change that a script's text needs.

    Args:
        name: its path.
        mark: what its file begins with before the text: a byte order mark, or nothing.
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
        diff=unified(mark + source.text, mark + after, _label(name)),
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
