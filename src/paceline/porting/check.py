"""What ``launch --check`` says of a script: the change that it needs, or why none will do.

    text -> nothing to add | a diff, and what to know of it | a sentence why it cannot be carried

The script is read, never run, and nothing is written. This module must not know engines or
settings.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from ..errors import ConfigError
from ..program import ScriptProgram
from .accelerate import is_for_accelerate, leave_accelerate
from .counting import count_of
from .dataflow import Flow
from .endless import endless
from .loops import Stepping
from .porting import STRATEGY, by_hand, find, left_over, read
from .reading import Source, note_of_writes
from .rewrite import port
from .together import carried_states, computes, rates_by_hand, schedules_now_and_then
from .tree import CannotDerive, SourceTree, by_name, positional

_BY_HAND = (
    "takes its batches by next(), so each worker counts its own: where they do not step together "
    "(k-sync, async and their kin) they come to the end of their counts at different versions; for "
    "batch in pace.updates(n, loader) ends everywhere at one"
)


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
        source = Source(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is no valid Python ({error.msg})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python in UTF-8: {error}") from None
    return judge(source, str(path))


def judge(source: Source, name: str) -> CheckResult:
    """What a text needs; ``name`` is its path."""
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
    more = [*_notes_of_loop(source.text, name), note_of_writes(ported, name), left_over(ported)]
    return CheckResult(
        script=name,
        diff=unified(source.text, after, _label(name)),
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


def _notes_of_loop(text: str, name: str) -> Iterator[str]:
    """What is other with several workers, and not for the converter to decide."""
    script = SourceTree(text)
    flow = Flow(script)
    training = Stepping(flow)
    yield from _notes_of_sums(training, name)
    yield from _notes_of_together(training, name)
    if training.loop.numbers is not None:
        yield (
            f"{name}:{script.line(training.loop.node)} each number of "
            f"{script.code(training.loop.numbers)} is a mini-batch of one worker, and an update "
            "averages as many as the protocol says: with K workers under full-sync K times the "
            "batch, and 1/K of the updates in an epoch"
        )
    if training.loop.counts_updates:
        yield (
            f"{name}:{script.line(training.loop.node)} random numbers that its turns draw follow "
            "from the turn's number, the same whoever draws them, and are others than before; a "
            "batch is what one worker draws"
        )
        yield from _notes_of_numbers(training, name)
        yield from _notes_of_breaks(script, training, name)
    steps = [call for call, _ in training.steps]
    if training.loop.taken is not None:
        if endless(flow, training.loop, steps) is None:
            yield f"{name}:{script.line(training.loop.taken.line)} {_BY_HAND}"
        else:
            yield from _notes_of_breaks(script, training, name)
    yield from _notes_of_further_loaders(script, training, name)
    for call in script.calls("DataParallel"):
        yield (
            f"{name}:{script.line(call)} DataParallel lets each worker use all GPUs that it sees; "
            "leave it out"
        )


def _notes_of_sums(training: Stepping, name: str) -> Iterator[str]:
    """Where a loss is a sum over a batch."""
    script, flow = training.flow.script, training.flow
    for node in flow.reached([training.loop.node.body]):
        for call in (one for one in script.within(node) if isinstance(one, cst.Call)):
            made = [call, *(flow.origins(call.func) if call.func is not node else ())]
            words = [by_name(one) for one in made if isinstance(one, cst.Call)]
            if any("reduction" in one and "sum" in script.code(one["reduction"]) for one in words):
                yield (
                    f"{name}:{script.line(call)} sums the loss over a batch, and workers average "
                    "their sums: with K of them an update is 1/K of one worker's; write the mean, "
                    "or K times the learning rate"
                )
    for call in script.every_call:
        if "ignore_index" in by_name(call):
            yield (
                f"{name}:{script.line(call)} averages over the targets that ignore_index leaves, "
                "and several workers weigh their means by samples: where samples have different "
                "numbers of them write with pace.step() as step: and step.weight = float((y != "
                "index).sum())"
            )


def _notes_of_together(training: Stepping, name: str) -> Iterator[str]:
    """Why `prepare` is told that workers must step together."""
    line = training.flow.script.line
    where = "is refused where workers do not step together (k-sync, async and their kin)"
    for one in rates_by_hand(training):
        yield (
            f"{name}:{line(one)} sets a learning rate by hand for each step, so the script "
            f"{where}; a LambdaLR that is given to prepare goes everywhere"
        )
    for one in schedules_now_and_then(training):
        yield (
            f"{name}:{line(one)} steps a scheduler behind some of the steps, so the script "
            f"{where}; stepped behind every one (a LambdaLR whose factor stays 1 elsewhere) it "
            "goes everywhere"
        )
    for state in carried_states(training):
        yield (
            f"{name}:{line(state)} carries {state.value} from turn to turn, each worker its own, "
            f"so the script {where}; under local-sgd:H a turn is gone through H times"
        )


def _notes_of_numbers(training: Stepping, name: str) -> Iterator[str]:
    """Where a turn's number is more than how far training is."""
    used = computes(training)
    if used is not None:
        code = training.flow.script.code(used)
        yield (
            f"{name}:{training.flow.script.line(used)} computes with {code}, the number of a turn: "
            "it is pace.turn, so that what goes into an update is what one process learns from in "
            "that turn, the same in each worker; to share the turns out write for number in "
            f"pace.updates(n), and number for {code}"
        )


def _notes_of_further_loaders(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Where the loop takes from another loader by ``next``."""
    flow, own = training.flow, training.loop.loader
    if own is None:
        return
    calls = dict.fromkeys(
        one
        for node in flow.reached([training.loop.node.body])
        for one in script.within(node)
        if isinstance(one, cst.Call) and script.meaning(one.func) == "next"
    )
    found: dict[str, cst.Call] = {}
    for call in calls:
        made = flow.origins(positional(call)[0]) if positional(call) else []
        for one in made:
            is_iterator = isinstance(one, cst.Call) and script.meaning(one.func) == "iter"
            if not isinstance(one, cst.Call) or not is_iterator or not positional(one):
                continue
            loader = positional(one)[0]
            if training.is_loader(loader) and script.code(loader) != script.code(own):
                found.setdefault(script.code(loader), call)
    for loader_name, call in found.items():
        yield (
            f"{name}:{script.line(call)} takes from {loader_name} by next(), and these lines do "
            "not prepare it, so every worker goes through all of it; for a part each, behind the "
            f"first prepare: {loader_name} = pace.prepare({loader_name})"
        )


def _notes_of_breaks(script: SourceTree, training: Stepping, name: str) -> Iterator[str]:
    """Where one worker leaves a loop of updates by what it alone sees."""
    loop = training.loop.node
    counter = count_of(training.flow, loop, [call for call, _ in training.steps]).counter
    for node in (one for one in script.within(loop.body) if isinstance(one, cst.Break)):
        ups = list(script.up(node))
        if loop not in ups:
            continue  # of a function that is made there
        tests = [one.test for one in ups[: ups.index(loop)] if isinstance(one, cst.If)]
        is_own = next(one for one in ups if isinstance(one, cst.For | cst.While)) is loop
        is_alike = any(counter in script.inside(one) or _is_asked(script, one) for one in tests)
        if is_own and not is_alike:
            yield (
                f"{name}:{script.line(node)} leaves the loop in one worker alone, where the others "
                "do not see the same; write pace.stop() before it, which ends it in all"
            )


def _is_asked(script: SourceTree, test: cst.BaseExpression) -> bool:
    """Whether a condition is what the command line says: ``args.dry_run``."""
    return (
        re.fullmatch(r"(args|opts?|options|config|cfg|flags)\.\w+", script.code(test)) is not None
    )


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
