"""From a script for one process, or for a process group, to the same script for Paceline.

Passes of one round read one tree, and what one changes may stand inside of another's change:

    model, optimizer, loader   ->  one line before the loop that trains: pace.prepare(...)
    for batch, for epoch       ->  with pace.step(), pace.epochs; without a loader: pace.updates
    clip_grad_norm_            ->  pace's, of the averaged gradient
    weights clamped behind     ->  a hook of the step (around_step.py)
    torch.save, download=True  ->  under if pace.is_main, or with pace.once()
    a process group            ->  nothing (group.py), where the group is made in any case

Where the group is made under an ``if``, that branch stays as it is: `launch` sets no RANK for such
a script, so it runs as by plain ``python``. Above 300 lines, since all passes of one round are read
together. This module must not know where a script lies.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

import libcst as cst

from .around_step import clip, step_hooks
from .counting import TurnCount, count_of
from .dataflow import AnyLoop, Flow
from .endless import Endless
from .group import leave_group
from .iterators import row_that_takes
from .leftovers import leftovers
from .loops import Loop
from .parts import Parts
from .reading import INIT, WRAP, Source, writes
from .refusals import refuse_anywhere, refuse_loop
from .together import needs_together
from .tree import Binding, CannotDerive, SourceTree, TreeEdits, positional

_INDEXED = re.compile(r"""['"](cuda|xpu):\d+['"]""")
_REPEATABLE = ("mkdir", "makedirs", "shutil.copy", "shutil.copy2", "shutil.copyfile")
"""Endings of what may be done again by each worker behind the first, before `prepare`."""
_IN_PLACE = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear")
"""Methods that leave a list, a set or a dict otherwise than it was."""


def port(text: str) -> str:
    """The script as it would be written for Paceline.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found, something in it cannot be
            carried, or something of its group would stay that cannot.
    """
    script = SourceTree(text)
    if taken := script.uses("pace"):
        raise CannotDerive(f"line {script.line(taken[0])} has a use of its own for the name pace")
    refuse_anywhere(script)
    parts = Parts(script)
    refuse_loop(parts.training)
    edits = TreeEdits()
    for hook in step_hooks(parts):
        for one in hook.lines:
            edits.remove(one)
        for text in hook.text:
            edits.insert(parts.before, text, is_before=True)
    if not parts.is_flagged:
        _lengths(parts, edits)
    _prepare(parts, edits)
    _loop(parts, edits)
    _clear_first(parts, edits)
    clip(parts, edits)
    guard(script, parts.flow, parts.before, edits)
    _device(script, edits)
    if parts.is_flagged:
        _main(script, edits)
    script = SourceTree(script.module.visit(edits).code)
    if not parts.is_flagged:
        script = leave_group(script)
    edits = TreeEdits()
    connect(script, edits)
    return script.module.visit(edits).code


# -- the four lines --------------------------------------------------------------------------------


def _loop(parts: Parts, edits: TreeEdits) -> None:
    """The step block and what gives it its batches, by the kind of the loop."""
    if parts.endless is not None:
        _endless(parts, parts.endless, edits)
    elif parts.loop.counts_updates:
        _updates(parts, edits)
    else:
        if parts.loop.loader is not None:
            _peek(parts, edits)
        step(parts.loop, edits)
        epochs(parts.script, parts.epochs, edits)


def _prepare(parts: Parts, edits: TreeEdits) -> None:
    """One line before the loop, after all that it is given exists."""
    given, returned = [*parts.names], [*parts.names]
    if len(parts.models) > 1 and len(parts.optimizers) == 1:
        both = f"[{', '.join(parts.models)}]"
        given[: len(parts.models)] = [f"{_modules(parts.script)}.ModuleList({both})"]
        returned[: len(parts.models)] = ["_"]
    if parts.loop.numbers is not None:
        name = _name_of_numbers(parts.script)
        given.append(parts.script.code(parts.loop.numbers))
        returned.append(name)
        edits.replace(parts.loop.numbers, name)
    if not parts.is_flagged:  # DistributedDataParallel's loaders count per worker
        given.append('batch="per-worker"')
    given += ["closures=True"] * parts.training.calls_again
    given += ["together=True"] * needs_together(parts.training)
    call = f"pace.prepare({', '.join(given)})"
    _declare(parts, returned, edits)
    edits.insert(parts.before, f"{', '.join(returned)} = {call}", is_before=True)


def _lengths(parts: Parts, edits: TreeEdits) -> None:
    """What a schedule was told of a loader whose sampler gave it a share: as many steps as then."""
    script = parts.script
    for call in script.calls("len") if script.calls("DistributedSampler") else ():
        is_before = script.order[call] < script.order[parts.before]
        if is_before and [script.code(one) for one in positional(call)] == [parts.loader]:
            edits.replace(call, f"-(-len({parts.loader}) // pace.num_workers)")


def _declare(parts: Parts, names: Sequence[str], edits: TreeEdits) -> None:
    """What a function is to bind, and has from outside, stays what it is outside."""
    scope = parts.scope
    if isinstance(scope, cst.Module):
        return
    homes = {one: parts.flow.home(one, scope) for one in names if one.isidentifier() and one != "_"}
    rows = scope.body.body[scope.get_docstring() is not None :]
    for word, is_meant in (("global", True), ("nonlocal", False)):
        outer = [
            one
            for one, home in homes.items()
            if home is not scope and isinstance(home, cst.Module) is is_meant
        ]
        if outer:
            edits.insert(rows[0], f"{word} {', '.join(outer)}", is_before=True)


def _name_of_numbers(script: SourceTree) -> str:
    """What `prepare` gives back for a range."""
    free = [one for one in ("numbers", "lease_numbers") if not script.uses(one)]
    if not free:
        raise CannotDerive
    return free[0]


def _modules(script: SourceTree) -> str:
    """What ``torch.nn`` is called there."""
    for name in ("nn", "torch.nn"):
        if script.meaning(cst.parse_expression(name)) == "torch.nn":
            return name
    raise CannotDerive


def _peek(parts: Parts, edits: TreeEdits) -> None:
    """A look at one batch beside the loop is one into the plain loader: it opens no epoch."""
    script, loop = parts.script, parts.loop
    assert loop.loader is not None
    names = {script.scope(loop.node): script.code(loop.loader), parts.scope: parts.loader}
    own = [] if loop.taken is None else loop.taken.iterations
    for call in (one for one in script.calls("iter") if one not in own):
        scope = script.scope(call)
        is_prepared = scope is not parts.scope or script.order[call] > script.order[parts.before]
        for one in positional(call)[:1]:
            if is_prepared and script.code(one) == names.get(scope):
                edits.replace(one, f"{names[scope]}.plain")


def step(loop: Loop, edits: TreeEdits, first: str = "", who: str = "pace") -> None:
    """``with pace.step()`` around what is done with a batch, after a ``first`` line, or after that
    in which the batch is taken.
    """
    item = cst.WithItem(cst.parse_expression(f"{who}.step()"))

    def wrapped(body: cst.BaseSuite) -> cst.BaseSuite:
        if not isinstance(body, cst.IndentedBlock):
            raise CannotDerive
        rows = list(body.body)
        first_row = 0 if loop.taken is None else 1 + row_that_takes(rows)
        inner = body.with_changes(body=rows[first_row:], header=cst.TrailingWhitespace())
        lines = [cst.parse_statement(first)] if first else rows[:first_row]
        return body.with_changes(body=[*lines, cst.With(items=[item], body=inner)], footer=())

    edits.change(loop.node.body, wrapped)


def epochs(script: SourceTree, loop: AnyLoop | None, edits: TreeEdits, who: str = "pace") -> None:
    """``pace.epochs`` where the loop over epochs is one over numbers."""
    if not isinstance(loop, cst.For):
        return
    for call in script.calls("range"):
        way = [call, *script.up(call)]
        if any(one is loop.iter for one in way):
            made = [one for one in way if isinstance(one, cst.Call) and _takes_all(script, one)]
            if made:
                values, is_list = script.code(made[-1]), script.code(made[-1].func) != "reversed"
                given = values if is_list else f"list({values})"
                edits.replace(made[-1], f"{who}.epochs({given})")
            elif len(call.args) == 1:
                edits.replace(call.func, f"{who}.epochs")
            else:
                edits.replace(call, f"{who}.epochs({script.code(call)})")
            return


def _takes_all(script: SourceTree, call: cst.Call) -> bool:
    """Whether it goes through all that it is given before it gives anything."""
    return script.meaning(call.func) in ("list", "reversed", "sorted", "tuple")


def connect(script: SourceTree, edits: TreeEdits) -> None:
    """``import paceline`` beside torch's, and ``pace`` after the imports on top."""
    lines: list[cst.CSTNode] = list(script.module.body)
    tops = {lines.index(at): one for one in script.imports if (at := script.parents[one]) in lines}
    first = [at for at, one in tops.items() if script.code(one).startswith("from __future__ ")]
    if first and len(first) == len(tops):  # what else it imports stands under a try
        for text in ("import paceline", "\npace = paceline.connect()"):
            edits.insert(lines[max(first) + 1], text, is_before=True)
        return
    tops = {at: one for at, one in tops.items() if at not in first}
    if not tops:
        raise CannotDerive
    torches = [at for at, one in tops.items() if script.code(one).split()[1].startswith("torch")]
    last = [*torches, min(tops)][0]
    while last + 1 in tops:
        last += 1
    edits.insert(lines[[*torches, last][0]], "import paceline", is_before=True)
    edits.insert(lines[last], "\npace = paceline.connect()")


# -- a loop without a loader -----------------------------------------------------------------------


def _updates(parts: Parts, edits: TreeEdits) -> None:
    """``pace.updates`` where a loop counts its steps."""
    script, loop = parts.script, parts.loop.node
    count = count_of(parts.flow, loop, [call for call, _ in parts.training.steps])
    if count.end is not None:
        edits.remove(count.end)
    _draw_first(parts.flow, loop, edits)
    _keep_numbers(parts, count, edits)
    step(parts.loop, edits, _numbered(script, count, loop, edits))
    target = script.code(loop.target) if isinstance(loop, cst.For) else "_"
    _counted(loop, "_" if count.name is not None else target, count.total, edits)


def _endless(parts: Parts, found: Endless, edits: TreeEdits) -> None:
    """``for batch in pace.updates(n, loader)`` where batches were taken by hand."""
    script, loop = parts.script, parts.loop
    for line in found.gone:
        edits.remove(line)
    if found.batch is not None:
        edits.replace(found.batch, found.target)
    if found.source is not None:
        edits.replace(found.source, script.code(positional(found.source)[0]))
    if found.counted.end is not None:
        edits.remove(found.counted.end)
    step(loop._replace(taken=None), edits, _numbered(script, found.counted, loop.node, edits))
    total = found.counted.total or "None"
    _counted(loop.node, found.target, f"{total}, {found.loader}", edits)


def _clear_first(parts: Parts, edits: TreeEdits) -> None:
    """What a turn that is called off would leave to the next one."""
    script, loop = parts.script, parts.loop
    texts = [
        script.code(one.clears).strip().rstrip(";").strip()
        for one in leftovers(parts.flow, loop.node)
        if one.is_visible
    ]
    body = loop.node.body
    if not texts or not isinstance(body, cst.IndentedBlock):
        return
    first_row = body.body[0 if loop.taken is None else 1 + row_that_takes(body.body)]
    for text in texts:
        edits.insert(first_row, text, is_before=True)


def _counted(loop: AnyLoop, target: str, given: str, edits: TreeEdits) -> None:
    """``for target in pace.updates(given)`` in the place of a loop's head."""
    over = cst.parse_expression(f"pace.updates({given})")
    name = cst.parse_expression(target)

    def counted(new: AnyLoop) -> cst.For:
        body, orelse, above = new.body, new.orelse, new.leading_lines
        return cst.For(name, over, body, orelse=orelse, leading_lines=above)  # type: ignore[arg-type]  # a target may be any expression that parses

    edits.change(loop, counted)


def _numbered(script: SourceTree, count: TurnCount, loop: AnyLoop, edits: TreeEdits) -> str:
    """The line that says where training is, in each turn."""
    if count.name is None:
        return ""
    if count.first == "0":
        return f"{count.name} = {count.place}"
    if not count.is_changed:
        return f"{count.name} = {count.first} + {count.place}"
    first = f"first_{count.name.rpartition('.')[2]}"
    if script.uses(first):
        raise CannotDerive
    edits.insert(
        script.block_line(script.statement(loop)), f"{first} = {count.name}", is_before=True
    )
    return f"{count.name} = {first} + {count.place}"


def _draw_first(flow: Flow, loop: AnyLoop, edits: TreeEdits) -> None:
    """A batch that is drawn one turn ahead is drawn in its own: a turn is what is counted."""
    script = flow.script
    inside = set(script.within(loop.body))
    before = {
        script.code(one.node): one.node
        for one in script.bindings
        if script.order[one.node] < script.order[loop]
        and isinstance(one.value, cst.Call)
        and script.scope(one.node) is script.scope(loop)
    }
    own = [one for one in script.bindings if one.node in inside]
    for node in dict.fromkeys(one.node for one in own):
        first = before.get(script.code(node))
        if first is None or not _is_ahead(script, node, own, inside):
            continue
        line = script.block_line(node)
        block, made = script.parents[line], [one.name for one in own if one.node is node]
        if not isinstance(line, cst.SimpleStatementLine) or not isinstance(
            block, cst.IndentedBlock
        ):
            continue
        if _is_of_turns(flow, loop, first, block, made):
            edits.remove(node)
            edits.remove(first)
            edits.insert(block.body[0], script.code(node), is_before=True)


def _is_of_turns(
    flow: Flow, loop: AnyLoop, first: cst.CSTNode, block: cst.IndentedBlock, made: Sequence[str]
) -> bool:
    """Whether every turn makes this anew in ``block``, and nothing else uses what it makes."""
    script = flow.script
    between = takewhile(lambda one: one is not loop, script.up(block))
    if not all(isinstance(one, cst.For | cst.IndentedBlock) for one in between):
        return False  # under an if some turns make it
    if script.parents[script.block_line(first)] not in list(script.up(loop)):
        return False
    own = {*script.within(first), *script.within(block)}
    end = max(script.order[one] for one in script.within(loop))
    return not any(
        one not in own
        and script.order[first] < script.order[one] <= end
        and flow.home(name, script.scope(one)) is flow.home(name, script.scope(loop))
        for name in made
        for one in script.uses(name)
    )


def _is_ahead(
    script: SourceTree, node: cst.CSTNode, own: list[Binding], inside: set[cst.CSTNode]
) -> bool:
    """Whether a turn uses what this makes before it makes it, of nothing that is the turn's own."""
    made = {one.name for one in own if one.node is node}
    others = {one.name for one in own if one.name not in made}
    value = next(one.value for one in own if one.node is node)
    uses = [one for name in made for one in script.uses(name) if one in inside]
    is_before = any(script.order[one] < script.order[node] for one in uses)
    return is_before and not others & script.inside(value)


def _keep_numbers(parts: Parts, count: TurnCount, edits: TreeEdits) -> None:
    """A turn's number that outlasts the loop (``best = it``) is the main worker's, for all."""
    script, loop = parts.script, parts.loop.node
    inside, last = set(script.within(loop)), max(script.order[one] for one in script.within(loop))
    kept = dict.fromkeys(
        one.name
        for one in script.bindings
        if one.node in inside and one.name != count.name and script.code(one.value) == count.name
    )
    rows = [
        f"{name} = int(pace.sum({name} if pace.is_main else 0))"
        for name in kept
        if any(
            script.order[one] > last and script.scope(one) is parts.scope
            for one in script.uses(name)
        )
    ]
    if rows and script.scope(loop) is parts.scope:
        edits.insert(script.block_line(loop), "; ".join(rows))


# -- beside the loop -------------------------------------------------------------------------------


def _device(script: SourceTree, edits: TreeEdits) -> None:
    """A device with a number of its own is each worker's own; the launcher has set it."""
    for value, _ in script.assigned:
        if _INDEXED.search(script.code(value)) and "device_ids" not in script.code(value):
            is_device = isinstance(value, cst.Call) and script.meaning(value.func) == "torch.device"
            if is_device or isinstance(value, cst.IfExp | cst.SimpleString):
                edits.replace(value, "pace.device" if is_device else "str(pace.device)")


def _main(script: SourceTree, edits: TreeEdits) -> None:
    """``master_process = True``, for one process, is so in one of several."""
    for value, name in script.assigned:
        is_name = re.search(r"(^|[._])(is_)?(master|main)(_process|_proc|_rank)?$", name)
        if is_name and script.code(value) == "True" and script.calls(INIT, WRAP):
            edits.replace(value, "pace.is_main")


def guard(
    script: SourceTree, flow: Flow, before: cst.CSTNode, edits: TreeEdits, who: str = "pace"
) -> None:
    """What all workers would write at once is written by one; what they all need, by one first.

    Args:
        before: the line of `prepare`; what is made before it, all need.
        who: what `connect` gave is called there.
    """
    found: dict[cst.CSTNode, str] = {}
    there = {(line, func): text for line, func, text in writes(Source(script.module.code))}
    for call in script.every_call:
        text = there.get((script.line(call), script.code(call.func)))
        line = None if text is None else _written_line(flow, call, before)
        if text is None or line is None:
            continue
        is_download = text.endswith("download=True)")
        is_before = script.order[call] < script.order[before]
        is_once = is_download or (text.split("(")[0].endswith(_REPEATABLE) and is_before)
        is_bound = any(_changes(one) for one in script.within(line) if one is not call)
        if any(flow.around(call)):
            if is_download:
                continue
            is_once = False
        if not is_bound or is_once:
            found[line] = f"with {who}.once():" if is_once else f"if {who}.is_main:"
    for lines in _neighbours(script, found):
        edits.wrap(lines, found[lines[0]])


def _changes(node: cst.CSTNode) -> bool:
    """Whether this gives a name, or what a name stands for, another value."""
    if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
        return True
    func = node.func if isinstance(node, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value in _IN_PLACE


def _written_line(flow: Flow, call: cst.Call, before: cst.CSTNode) -> cst.CSTNode | None:
    """The line that may be done by one worker; None: more than the writing hangs on it."""
    script = flow.script
    line = script.block_line(call)
    if isinstance(line, cst.SimpleStatementLine):
        around = script.parents.get(script.parents[line])
        if isinstance(around, cst.If) and around.orelse is None and len(around.body.body) == 1:
            line = around if re.search("exists|isdir", script.code(around.test)) else line
    elif not isinstance(line, cst.With):
        return None
    kept = cst.Return | cst.Yield | cst.Continue | cst.Break | cst.Global
    held = list(script.within(line))
    if any(isinstance(one, kept) or (one is before and one is not line) for one in held):
        return None
    trains = set(script.calls("step", "backward"))
    if any(not trains.isdisjoint(script.within(one)) for one in flow.reached([line])):
        return None
    return line


def _neighbours(script: SourceTree, found: dict[cst.CSTNode, str]) -> list[list[cst.CSTNode]]:
    """Lines that stand one below the other, and go under one head."""
    groups: list[list[cst.CSTNode]] = []
    for line in sorted(found, key=script.order.__getitem__):
        block = script.parents[line]
        assert isinstance(block, cst.Module | cst.IndentedBlock)
        place = list(block.body).index(line)  # type: ignore[arg-type]  # a line of this block
        above = block.body[place - 1] if place else None
        if groups and groups[-1][-1] is above and found[above] == found[line]:
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups
