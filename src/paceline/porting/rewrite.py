"""Rewrites a script for one process, or for a process group, as the same script for Paceline.

The passes of one round read the same tree, and a pass may change nodes inside another's change:

    model, optimizer, loader   ->  one line before the loop that trains: pace.prepare(...)
    for batch, for epoch       ->  with pace.step(), pace.epochs; without a loader: pace.updates
    clip_grad_norm_            ->  pace's, of the averaged gradient
    weights clamped after it   ->  a hook of the step (around_step.py)
    torch.save, download=True  ->  under if pace.is_main, or with pace.once()
    mkdir                      ->  with pace.once() as is_first, under if is_first
    a process group            ->  removed (group.py), if the group is always made

If the group is made under an ``if``, that branch stays as it is: `launch` sets no RANK for such a
script, so it runs as under plain ``python``. Above 300 lines, since all passes of one round belong
together. This module must not know where a script lies.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

import libcst as cst

from .around_step import clip, draws, step_hooks
from .counting import TurnCount, count_of
from .dataflow import AnyLoop, Flow
from .endless import Endless
from .group import leave_group, refuse_untraced_modules
from .iterators import inner_loader, row_that_takes
from .leftovers import leftovers
from .loops import Loop, forward_of, makers_of
from .parts import Parts
from .project import check_names, join, split
from .reading import INIT, WRAP, Source, rereads, writes
from .refusals import refuse_anywhere, refuse_loop
from .together import needs_together
from .tree import Binding, Block, CannotDerive, SourceTree, TreeEdits, positional

_INDEXED = re.compile(r"""['"](cuda|xpu):\d+['"]""")
_DEVICE = re.compile(r"""['"]((cuda|xpu)(:\d+)?|mps|cpu)['"]""")
_REPEATABLE = ("shutil.copy", "shutil.copy2", "shutil.copyfile")
"""Endings of functions that each worker may repeat after the first one, before `prepare`."""
_FOLDERS = ("mkdir", "makedirs")
"""Endings of functions that fail if they are repeated, and whose folders all workers need."""
_TESTS = re.compile(r"exists|\bis_?(dir|file)\b|listdir|\bi?r?glob\(")
"""In a condition: what workers may find to be different while one of them writes."""
_ALONE, _ONCE = "if {pace}.is_main:", "with {pace}.once():"
_FIRST = "with {pace}.once() as is_first:\n    if is_first:"
"""Headers of lines: one worker runs them; all do, one before the others; all wait for the one."""
_DEPTH = 8
_IN_PLACE = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear")
"""Methods that change a list, a set or a dict."""


def port(text: str) -> str:
    """Return the script as it would be written for Paceline.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found, something in it cannot be
            ported, or something of its process group that cannot stay would stay.
    """
    return port_together([text])[0]


def port_together(texts: Sequence[str], module: str = "") -> list[str]:
    """Return a script, and the file that has its loop, as they would be written for Paceline.

    Args:
        module: the name by which the script imports the other file.

    Raises:
        CannotDerive: see `port`; or a file would use what only the other one has.
    """
    joined = _ported(SourceTree(join(texts, module))).module.code
    results = [_connected(part) for part in split(joined, texts, module)]
    for before, after in zip(texts, results, strict=True) if module else ():
        check_names(before, after, is_script=before is texts[0])
    return results


def _connected(text: str) -> str:
    """Return a file with the line that makes ``pace``, if it uses it."""
    script, edits = SourceTree(text), TreeEdits()
    if script.uses("pace"):
        connect(script, edits)
    return script.module.visit(edits).code


def _ported(script: SourceTree) -> SourceTree:
    """Return the script with all lines but the one that makes ``pace``."""
    if uses := script.uses("pace"):
        raise CannotDerive(f"line {script.line(uses[0])} already uses the name pace")
    refuse_anywhere(script)
    parts = Parts(script)
    refuse_loop(parts.training)
    if not parts.is_flagged:
        refuse_untraced_modules(script)
    edits = TreeEdits()
    for hook in step_hooks(parts):
        for line in hook.lines:
            edits.remove(line)
        for statement in hook.text:
            edits.insert(parts.before, statement, is_before=True)
    if not parts.is_flagged:
        _lengths(parts, edits)
    _prepare(parts, edits)
    _loop(parts, edits)
    _clear_first(parts, edits)
    clip(parts, edits)
    guarded = guard(script, parts.flow, parts.before, edits)
    if parts.loop.numbers is not None:  # each worker shuffles for itself
        _refuse_lone_draws(parts.flow, guarded, parts.loop)
    _device(script, edits)
    if parts.is_flagged:
        _main(script, edits)
    script = SourceTree(script.module.visit(edits).code)
    return script if parts.is_flagged else leave_group(script)


# -- the four lines --------------------------------------------------------------------------------


def _loop(parts: Parts, edits: TreeEdits) -> None:
    """Add the step block, and change what gives it its batches, by the kind of the loop."""
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
    """Insert the line of `prepare` before the loop, after everything that it is given exists."""
    arguments, returned = [*parts.names], [*parts.names]
    if len(parts.models) > 1 and len(parts.optimizers) == 1:
        both = f"[{', '.join(parts.models)}]"
        arguments[: len(parts.models)] = [f"{_modules(parts.script)}.ModuleList({both})"]
        returned[: len(parts.models)] = ["_"]
    if parts.loop.numbers is not None:
        name = _name_of_numbers(parts.script)
        arguments.append(parts.script.code(parts.loop.numbers))
        returned.append(name)
        edits.replace(parts.loop.numbers, name)
    if not parts.is_flagged:  # DistributedDataParallel's loaders count per worker
        arguments.append('batch="per-worker"')
    arguments += ["closures=True"] * parts.training.calls_again
    arguments += ["together=True"] * needs_together(parts.training)
    call = f"pace.prepare({', '.join(arguments)})"
    _declare(parts, returned, edits)
    edits.insert(parts.before, f"{', '.join(returned)} = {call}", is_before=True)


def _lengths(parts: Parts, edits: TreeEdits) -> None:
    """Keep the numbers of steps that schedules were given, now that loaders have no samplers."""
    script = parts.script
    for call in script.calls("len") if script.calls("DistributedSampler") else ():
        is_before = script.order[call] < script.order[parts.before]
        if is_before and [script.code(argument) for argument in positional(call)] == [parts.loader]:
            edits.replace(call, f"-(-len({parts.loader}) // pace.num_workers)")


def _declare(parts: Parts, names: Sequence[str], edits: TreeEdits) -> None:
    """Declare names ``global`` or ``nonlocal`` that a function would now bind for itself."""
    scope = parts.scope
    if isinstance(scope, cst.Module):
        return
    homes = {
        name: parts.flow.home(name, scope) for name in names if name.isidentifier() and name != "_"
    }
    statements = scope.body.body[scope.get_docstring() is not None :]
    for keyword, is_meant in (("global", True), ("nonlocal", False)):
        outer = [
            name
            for name, home in homes.items()
            if home is not scope and isinstance(home, cst.Module) is is_meant
        ]
        if outer:
            edits.insert(statements[0], f"{keyword} {', '.join(outer)}", is_before=True)


def _name_of_numbers(script: SourceTree) -> str:
    """Return the name for the range that `prepare` returns."""
    free_names = [name for name in ("numbers", "lease_numbers") if not script.uses(name)]
    if not free_names:
        raise CannotDerive
    return free_names[0]


def _modules(script: SourceTree) -> str:
    """Return what ``torch.nn`` is called in the script."""
    for name in ("nn", "torch.nn"):
        if script.meaning(cst.parse_expression(name)) == "torch.nn":
            return name
    raise CannotDerive


def _peek(parts: Parts, edits: TreeEdits) -> None:
    """Let ``iter`` outside the loop look at the plain loader, so that it opens no epoch."""
    script, loop = parts.script, parts.loop
    assert loop.loader is not None
    if inner_loader(parts.flow, loop.loader):
        return
    names = {script.scope(loop.node): script.code(loop.loader), parts.scope: parts.loader}
    own_iterations = [] if loop.taken is None else loop.taken.iterations
    for call in script.calls("iter"):
        if call in own_iterations:
            continue
        scope = script.scope(call)
        is_prepared = scope is not parts.scope or script.order[call] > script.order[parts.before]
        for iterated in positional(call)[:1]:
            if is_prepared and script.code(iterated) == names.get(scope):
                edits.replace(iterated, f"{names[scope]}.plain")


def step(loop: Loop, edits: TreeEdits, first: str = "", pace: str = "pace") -> None:
    """Put ``with pace.step()`` around what is done with a batch.

    Args:
        first: a line to put before it; by default it follows the line that takes the batch.
        pace: what the script calls the result of `connect`.
    """
    item = cst.WithItem(cst.parse_expression(f"{pace}.step()"))

    def wrapped(body: cst.BaseSuite) -> cst.BaseSuite:
        if not isinstance(body, cst.IndentedBlock):
            raise CannotDerive
        rows = list(body.body)
        first_row = 0 if loop.taken is None else 1 + row_that_takes(rows)
        inner = body.with_changes(body=rows[first_row:], header=cst.TrailingWhitespace())
        lines = [cst.parse_statement(first)] if first else rows[:first_row]
        return body.with_changes(body=[*lines, cst.With(items=[item], body=inner)], footer=())

    edits.change(loop.node.body, wrapped)


def epochs(script: SourceTree, loop: AnyLoop | None, edits: TreeEdits, pace: str = "pace") -> None:
    """Let the loop over epochs go over ``pace.epochs`` if it goes over numbers."""
    if not isinstance(loop, cst.For):
        return
    for call in script.calls("range"):
        ancestry = [call, *script.up(call)]
        if any(node is loop.iter for node in ancestry):
            wrappers = [
                node for node in ancestry if isinstance(node, cst.Call) and _takes_all(script, node)
            ]
            if wrappers:
                values = script.code(wrappers[-1])
                is_list = script.code(wrappers[-1].func) != "reversed"
                iterable = values if is_list else f"list({values})"
                edits.replace(wrappers[-1], f"{pace}.epochs({iterable})")
            elif len(call.args) == 1:
                edits.replace(call.func, f"{pace}.epochs")
            else:
                edits.replace(call, f"{pace}.epochs({script.code(call)})")
            return


def _takes_all(script: SourceTree, call: cst.Call) -> bool:
    """Whether a call goes through its whole argument before it returns anything."""
    return script.meaning(call.func) in ("list", "reversed", "sorted", "tuple")


def connect(script: SourceTree, edits: TreeEdits) -> None:
    """Insert ``import paceline`` beside torch's import, and ``pace`` after the first imports."""
    lines: list[cst.CSTNode] = list(script.module.body)
    top_imports = {
        lines.index(line): node
        for node in script.imports
        if (line := script.parents[node]) in lines
    }
    future_imports = [
        index
        for index, node in top_imports.items()
        if script.code(node).startswith("from __future__ ")
    ]
    if future_imports and len(future_imports) == len(top_imports):  # all others are under a try
        for text in ("import paceline", "\npace = paceline.connect()"):
            edits.insert(lines[max(future_imports) + 1], text, is_before=True)
        return
    top_imports = {
        index: node for index, node in top_imports.items() if index not in future_imports
    }
    if not top_imports:
        raise CannotDerive
    torch_imports = [
        index
        for index, node in top_imports.items()
        if script.code(node).split()[1].startswith("torch")
    ]
    last = [*torch_imports, min(top_imports)][0]
    while last + 1 in top_imports:
        last += 1
    edits.insert(lines[[*torch_imports, last][0]], "import paceline", is_before=True)
    edits.insert(lines[last], "\npace = paceline.connect()")


# -- a loop without a loader -----------------------------------------------------------------------


def _updates(parts: Parts, edits: TreeEdits) -> None:
    """Let a loop that counts its steps go over ``pace.updates``."""
    script, loop = parts.script, parts.loop.node
    count = count_of(parts.flow, loop, [call for call, _ in parts.training.steps])
    if count.end is not None:
        edits.remove(count.end)
    _draw_first(parts.flow, loop, edits)
    _keep_numbers(parts, count, edits)
    step(parts.loop, edits, _numbered(script, count, loop, edits))
    target = script.code(loop.target) if isinstance(loop, cst.For) else "_"
    _counted(loop, "_" if count.name is not None else target, count.total, edits)


def _endless(parts: Parts, endless: Endless, edits: TreeEdits) -> None:
    """Let a loop that takes batches by hand go over ``pace.updates(n, loader)``."""
    script, loop = parts.script, parts.loop
    for line in endless.gone:
        edits.remove(line)
    if endless.batch is not None:
        edits.replace(endless.batch, endless.target)
    if endless.source is not None:
        edits.replace(endless.source, script.code(positional(endless.source)[0]))
    if endless.counted.end is not None:
        edits.remove(endless.counted.end)
    step(loop._replace(taken=None), edits, _numbered(script, endless.counted, loop.node, edits))
    total = endless.counted.total or "None"
    _counted(loop.node, endless.target, f"{total}, {endless.loader}", edits)


def _clear_first(parts: Parts, edits: TreeEdits) -> None:
    """Clear at the beginning of a turn what a turn that is called off would leave."""
    loop = parts.loop
    clearings = [rest.text for rest in leftovers(parts.flow, loop.node) if rest.is_visible]
    body = loop.node.body
    if not clearings or not isinstance(body, cst.IndentedBlock):
        return
    first_row = body.body[0 if loop.taken is None else 1 + row_that_takes(body.body)]
    for clearing in clearings:
        edits.insert(first_row, clearing, is_before=True)


def _counted(loop: AnyLoop, target: str, arguments: str, edits: TreeEdits) -> None:
    """Replace a loop's head by ``for target in pace.updates(arguments)``."""
    updates_call = cst.parse_expression(f"pace.updates({arguments})")
    name = cst.parse_expression(target)

    def with_new_head(new: AnyLoop) -> cst.For:
        body, orelse, above = new.body, new.orelse, new.leading_lines
        return cst.For(name, updates_call, body, orelse=orelse, leading_lines=above)  # type: ignore[arg-type]  # a target may be any expression that parses

    edits.change(loop, with_new_head)


def _numbered(script: SourceTree, count: TurnCount, loop: AnyLoop, edits: TreeEdits) -> str:
    """Return the line that sets the number of a turn; empty if none is needed."""
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
    """Let batches that are drawn one turn ahead be drawn in their own turns, which are counted."""
    script = flow.script
    inside = set(script.within(loop.body))
    drawn_before = {
        script.code(binding.node): binding.node
        for binding in script.bindings
        if script.order[binding.node] < script.order[loop]
        and isinstance(binding.value, cst.Call)
        and script.scope(binding.node) is script.scope(loop)
    }
    bindings = [binding for binding in script.bindings if binding.node in inside]
    for node in dict.fromkeys(binding.node for binding in bindings):
        first = drawn_before.get(script.code(node))
        if first is None or not _is_ahead(script, node, bindings, inside):
            continue
        line = script.block_line(node)
        block = script.parents[line]
        names = [binding.name for binding in bindings if binding.node is node]
        is_line = isinstance(line, cst.SimpleStatementLine)
        if not is_line or not isinstance(block, cst.IndentedBlock):
            continue
        if _is_of_turns(flow, loop, first, block, names):
            edits.remove(node)
            edits.remove(first)
            edits.insert(block.body[0], script.code(node), is_before=True)


def _is_of_turns(
    flow: Flow, loop: AnyLoop, first: cst.CSTNode, block: cst.IndentedBlock, names: Sequence[str]
) -> bool:
    """Whether every turn assigns these names again in ``block``, and nothing else uses them."""
    script = flow.script
    between = takewhile(lambda node: node is not loop, script.up(block))
    if not all(isinstance(node, cst.For | cst.IndentedBlock) for node in between):
        return False  # under an if some turns make it
    if script.parents[script.block_line(first)] not in list(script.up(loop)):
        return False
    own_nodes = {*script.within(first), *script.within(block)}
    end = max(script.order[node] for node in script.within(loop))
    return not any(
        use not in own_nodes
        and script.order[first] < script.order[use] <= end
        and flow.home(name, script.scope(use)) is flow.home(name, script.scope(loop))
        for name in names
        for use in script.uses(name)
    )


def _is_ahead(
    script: SourceTree, node: cst.CSTNode, bindings: list[Binding], inside: set[cst.CSTNode]
) -> bool:
    """Whether a turn uses what a node makes before it, and the node needs nothing of the turn."""
    names = {binding.name for binding in bindings if binding.node is node}
    others = {binding.name for binding in bindings if binding.name not in names}
    value = next(binding.value for binding in bindings if binding.node is node)
    uses = [use for name in names for use in script.uses(name) if use in inside]
    is_before = any(script.order[use] < script.order[node] for use in uses)
    return is_before and not others & script.inside(value)


def _keep_numbers(parts: Parts, count: TurnCount, edits: TreeEdits) -> None:
    """Let all workers have the main worker's turn number if it outlasts the loop: ``best = it``."""
    script, loop = parts.script, parts.loop.node
    inside, last = set(script.within(loop)), max(script.order[node] for node in script.within(loop))
    names = dict.fromkeys(
        binding.name
        for binding in script.bindings
        if binding.node in inside
        and binding.name != count.name
        and script.code(binding.value) == count.name
    )
    rows = [
        f"{name} = int(pace.sum({name} if pace.is_main else 0))"
        for name in names
        if any(
            script.order[use] > last and script.scope(use) is parts.scope
            for use in script.uses(name)
        )
    ]
    if rows and script.scope(loop) is parts.scope:
        edits.insert(script.block_line(loop), "; ".join(rows))


# -- beside the loop -------------------------------------------------------------------------------


def _device(script: SourceTree, edits: TreeEdits) -> None:
    """Replace devices with numbers by the worker's device, which the launcher has set."""
    for value, _ in script.assigned:
        code = script.code(value)
        if not _INDEXED.search(code) or "device_ids" in code:
            continue
        choices = _choices(value)
        if all(_is_device(script, choice) for choice in choices):
            is_text = any(isinstance(choice, cst.SimpleString) for choice in choices)
            edits.replace(value, "str(pace.device)" if is_text else "pace.device")
            continue
        for choice in choices if isinstance(value, cst.IfExp) else ():
            moved_to = _moved_to(choice)
            if _INDEXED.fullmatch(script.code(moved_to or choice)):
                edits.replace(moved_to or choice, "pace.device" if moved_to else "str(pace.device)")


def _moved_to(value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the device of ``x.to(device)``; None for anything else."""
    func = value.func if isinstance(value, cst.Call) else None
    if not isinstance(value, cst.Call) or not isinstance(func, cst.Attribute):
        return None
    return next(iter(positional(value)), None) if func.attr.value == "to" else None


def _choices(value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return the values of ``a if x else b if y else c``, or the value."""
    if not isinstance(value, cst.IfExp):
        return [value]
    return [*_choices(value.body), *_choices(value.orelse)]


def _is_device(script: SourceTree, value: cst.BaseExpression) -> bool:
    """Whether a value is the name of a device, or made by ``torch.device``."""
    if isinstance(value, cst.Call):
        return script.meaning(value.func) == "torch.device"
    return isinstance(value, cst.SimpleString) and bool(_DEVICE.fullmatch(script.code(value)))


def _main(script: SourceTree, edits: TreeEdits) -> None:
    """Replace the True of ``master_process = True``, which only one of several workers is."""
    for value, name in script.assigned:
        is_name = re.search(r"(^|[._])(is_)?(master|main)(_process|_proc|_rank)?$", name)
        if is_name and script.code(value) == "True" and script.calls(INIT, WRAP):
            edits.replace(value, "pace.is_main")


def guard(
    script: SourceTree, flow: Flow, before: cst.CSTNode, edits: TreeEdits, pace: str = "pace"
) -> list[cst.CSTNode]:
    """Let one worker write what all would write at once; what all need, one writes first.

    Args:
        before: the line of `prepare`; all workers need what is made before it.
        pace: what the script calls the result of `connect`.

    Returns:
        The lines that only one worker runs now.
    """
    headers: dict[cst.CSTNode, str] = {}
    texts = {(line, func): text for line, func, text in writes(Source(script.module.code))}
    for call in script.every_call:
        text = texts.get((script.line(call), script.code(call.func)), "")
        line, header = _guarded(flow, call, text, before) if text else (None, "")
        if line is not None and headers.get(line) != _ONCE:
            headers[line] = header
    for line in _rereads(script, flow, before):
        headers.setdefault(line, _ONCE)
    for line in [line for line, header in headers.items() if header != _ALONE]:
        if not headers.keys().isdisjoint(script.up(line)):  # not all would reach it
            del headers[line]
    for lines in _neighbours(script, headers):
        edits.wrap(lines, headers[lines[0]].format(pace=pace))
    return [line for line, header in headers.items() if header != _ONCE]


def _guarded(
    flow: Flow, call: cst.Call, text: str, before: cst.CSTNode
) -> tuple[cst.CSTNode | None, str]:
    """Return the line, or None, that must not run in every worker at once, and its header.

    Args:
        text: how the call is shown to the user.
    """
    script, header = flow.script, _ALONE
    line, is_in_loop = _written_line(flow, call, before), any(flow.around(call))
    is_download = text.endswith("download=True)")
    if line is None or (is_download and is_in_loop):
        return None, ""
    is_before = script.order[call] < script.order[before] and not is_in_loop
    name = script.meaning(call.func) or script.code(call.func)  # Path("runs").mkdir has no meaning
    if is_download or (name.endswith((*_REPEATABLE, *_FOLDERS)) and is_before):
        line = _whole_test(flow, line, before)
        header = _FIRST if name.endswith(_FOLDERS) else _ONCE
    if line is None or (header == _FIRST and script.uses("is_first")):
        return None, ""
    is_bound = any(_changes(node) for node in script.within(line) if node is not call)
    return (None if is_bound and header != _ONCE else line), header


def _refuse_lone_draws(flow: Flow, guarded: list[cst.CSTNode], loop: Loop) -> None:
    """Raise CannotDerive if one worker alone would draw random numbers before an epoch's order.

    The orders that the workers draw for themselves would then differ: some samples would be used
    twice and others never.
    """
    script, outer = flow.script, loop.outer[-1]
    last = max(script.within(outer), key=script.order.__getitem__)
    own = set(_drawn(flow, [*guarded, loop.node.body]))  # each step seeds what it draws
    in_epochs = set(_drawn(flow, [outer])) - own
    orders = [call for call in _drawn(flow, [script.module]) if call not in own]
    orders = [call for call in orders if not _is_after(flow, call, last)]
    for line in (line for line in guarded if not _is_after(flow, line, last)):
        if not in_epochs and not any(_is_after(flow, call, line) for call in orders):
            continue
        for call in _drawn(flow, [line])[:1]:
            raise CannotDerive(
                f"line {script.line(line)} writes, which one worker does alone, and draws random "
                f"numbers by {script.code(call.func)}: the orders that each worker draws for its "
                "epochs would differ; draw in a line of its own above it"
            )


def _drawn(flow: Flow, nodes: list[cst.CSTNode]) -> list[cst.Call]:
    """Return the calls that draw random numbers, in nodes and in the functions and models called.

    Dropout does not, where the script calls ``eval``.
    """
    script, found, reached = flow.script, list[cst.Call](), flow.reached(nodes)
    for part in (part for node in reached for part in script.within(node)):
        if not isinstance(part, cst.Call):
            continue
        makers = [one for one in makers_of(flow, part.func) if isinstance(one, cst.Call)]
        models = [forward_of(flow, script.meaning(maker.func)) for maker in makers]
        called = flow.reached([model for model in models if model is not None])
        reached += [function for function in called if function not in reached]
        is_off = "dropout" in script.code(part.func) and script.calls("eval")
        if draws(script, part) and not is_off and flow.function_of(part) is None:
            found.append(part)
    return found


def _rereads(script: SourceTree, flow: Flow, before: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the lines, outside of loops, that read a file which only one worker writes now.

    The others come after it, so that none reads a file that is not there yet, or a part of it.
    What is read before `prepare` may be inside such a block already, as a download is.
    """
    read = set(rereads(Source(script.module.code)))
    lines = [
        script.block_line(call)
        for call in script.every_call
        if (script.line(call), script.code(call.func)) in read
        and not any(flow.around(call))
        and _is_after(flow, call, before)
    ]
    found = [
        _whole_test(flow, line, before)
        for line in lines
        if isinstance(line, cst.SimpleStatementLine)
    ]
    return [line for line in found if line is not None]


def _whole_test(flow: Flow, line: cst.CSTNode, before: cst.CSTNode) -> cst.CSTNode | None:
    """Return the outermost ``if`` around a line that looks for files; the line if there is none.

    All workers must reach a `once` block, but the first one changes what the others find. None:
    such an ``if`` cannot be in a block, or is around a call of the line's function.
    """
    script = flow.script
    outside = [up for call in flow.calls_of(script.scope(line)) for up in script.up(call.node)]
    if any(_tests_files(script, node) for node in outside):
        return None
    tests = [node for node in (line, *script.up(line)) if _tests_files(script, node)]
    if not tests:
        return line
    whole = script.block_line(tests[-1])
    return whole if _can_move(flow, whole, before) else None


def _tests_files(script: SourceTree, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.If) and _TESTS.search(script.code(node.test)) is not None


def _is_after(flow: Flow, node: cst.CSTNode, before: cst.CSTNode, depth: int = 0) -> bool:
    """Whether a node is reached after a line: it follows it, or all calls of its function do."""
    script, scope = flow.script, flow.script.scope(node)
    calls = flow.calls_of(scope) if scope is not script.scope(before) and depth < _DEPTH else []
    if not calls:
        return script.order[node] > script.order[before]
    return all(_is_after(flow, call.node, before, depth + 1) for call in calls)


def _changes(node: cst.CSTNode) -> bool:
    """Whether a node assigns to a name, or changes an object in place."""
    if isinstance(node, cst.Assign | cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
        return True
    func = node.func if isinstance(node, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value in _IN_PLACE


def _written_line(flow: Flow, call: cst.Call, before: cst.CSTNode) -> cst.CSTNode | None:
    """Return the line that only one worker may run; None if more depends on it than the writing."""
    script = flow.script
    line = script.block_line(call)
    if isinstance(line, cst.SimpleStatementLine):
        around = script.parents.get(script.parents[line])
        line = around if around and _tests_for_one_line(script, around) else line
    elif not isinstance(line, cst.With) and not _tests_for_one_line(script, line):
        return None
    return line if _can_move(flow, line, before) else None


def _tests_for_one_line(script: SourceTree, node: cst.CSTNode) -> bool:
    """Whether this is a line of a block, ``if not exists(path):`` with one line in it, no more."""
    if not isinstance(node, cst.If) or not _tests_files(script, node):
        return False
    is_alone = node.orelse is None and len(node.body.body) == 1
    return is_alone and isinstance(script.parents[node], Block)


def _can_move(flow: Flow, line: cst.CSTNode, before: cst.CSTNode) -> bool:
    """Whether a line may be in a block: it does not leave its own one, and trains nothing."""
    script = flow.script
    kept = cst.Return | cst.Yield | cst.Continue | cst.Break | cst.Global
    nodes = list(script.within(line))
    if any(isinstance(node, kept) or (node is before and node is not line) for node in nodes):
        return False
    training_calls = set(script.calls("step", "backward"))
    return all(training_calls.isdisjoint(script.within(node)) for node in flow.reached([line]))


def _neighbours(script: SourceTree, headers: dict[cst.CSTNode, str]) -> list[list[cst.CSTNode]]:
    """Group lines that follow one another and get the same header."""
    groups: list[list[cst.CSTNode]] = []
    for line in sorted(headers, key=script.order.__getitem__):
        block = script.parents[line]
        assert isinstance(block, cst.Module | cst.IndentedBlock)
        place = list(block.body).index(line)  # type: ignore[arg-type]  # a line of this block
        above = block.body[place - 1] if place else None
        if groups and groups[-1][-1] is above and headers[above] == headers[line]:
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups
