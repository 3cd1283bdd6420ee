"""What ``launch --check`` says of a script: the change that it needs, or why none will do.

    text -> nothing to add | a diff, and what to know of it | a sentence why it cannot be carried

The script is read, never run, and nothing is written. This module must not know engines or
settings.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..program import ScriptProgram
from .accelerate import is_for_accelerate, leave_accelerate
from .notes import notes_of_loop
from .porting import STRATEGY, by_hand, find, left_over, read
from .reading import Source, note_of_writes
from .rewrite import port
from .tree import CannotDerive

_MARK = "\ufeff"
"""What some editors begin a file of UTF-8 with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a script needs.

    Attributes:
        script: its path.
        diff: a unified diff for ``patch -p0``, here or, for a script that lies elsewhere, in its
            folder; empty: there is nothing to add, or it cannot be carried.
        added: lines that are new or changed in it, without those that are only indented.
        reason: why it cannot be carried, one sentence; empty: it can.
        notes: what to know of the script with these lines, a sentence each.
    """

    script: str
    diff: str = ""
    added: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The one object of ``--json``."""
        return {
            "script": self.script,
            "verdict": "refused" if self.reason else "change" if self.diff else "nothing to add",
            "diff": self.diff,
            "added_lines": self.added,
            "reason": self.reason or None,
            "notes": list(self.notes),
        }


def check(program: ScriptProgram) -> CheckResult:
    """Read a script.

    Raises:
        ConfigError: it is not there, or no Python.
    """
    path = find(program)
    if path is None:
        raise ConfigError(f"module {program.path} has no file of Python to read")
    try:
        text = path.read_bytes().decode("utf-8")
        source = Source(text.removeprefix(_MARK))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is no valid Python ({error.msg})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python in UTF-8: {error}") from None
    return judge(source, str(path), _MARK if text.startswith(_MARK) else "")


def judge(source: Source, name: str, mark: str = "") -> CheckResult:
    """What a text needs; ``name`` is its path, and ``mark`` what stands before it in its file."""
    if next(source.calls("paceline.connect", STRATEGY), None) is not None:
        known = read(source, name)
        return CheckResult(
            script=name, notes=tuple(one for one in (*known.notes, known.writes) if one)
        )
    try:
        is_foreign = is_for_accelerate(source)
        after, notes = leave_accelerate(source.text) if is_foreign else (port(source.text), ())
        ported = Source(after)
    except (CannotDerive, SyntaxError) as error:
        why = error.why if isinstance(error, CannotDerive) else ""
        return CheckResult(script=name, reason=by_hand(source, name, why))
    more = [*notes_of_loop(source.text, name), note_of_writes(ported, name), left_over(ported)]
    return CheckResult(
        script=name,
        diff=unified(mark + source.text, mark + after, _label(name)),
        added=added_lines(source.text, after),
        notes=(*notes, *(one for one in more if one)),
    )


def _label(name: str) -> str:
    """What a diff calls a file: as seen from here, or from its own folder; patch takes no other."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    is_below = not path.is_absolute() and ".." not in path.parts
    return path.as_posix() if is_below else path.name


def unified(before: str, after: str, name: str) -> str:
    """A diff that ``patch -p0`` and ``git apply`` take, of whatever line ends."""
    old, new = _rows(before), _rows(after)
    rows = list(difflib.unified_diff(old, new, name, name))
    ended = [
        one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in rows
    ]
    return "".join(ended)


def added_lines(before: str, after: str) -> int:
    """Lines that are new or changed, apart from their indentation and empty ones."""
    old = [one.strip() for one in _rows(before) if one.strip()]
    new = [one.strip() for one in _rows(after) if one.strip()]
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return len(new) - sum(one.size for one in blocks)


def _rows(text: str) -> list[str]:
    r"""Lines as diffs count them: a form feed ends none."""
    return [f"{one}\n" for one in text.split("\n")[:-1]] + [
        one for one in (text.rsplit("\n")[-1],) if one
    ]
