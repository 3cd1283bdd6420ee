"""From a script for DistributedDataParallel to the same script for Paceline, pass by pass.

Each pass reads the text again, so none knows what the ones before it moved:

    DistributedSampler      ->  nothing: mini-batches are leased
    DDP(model)              ->  model, optimizer, loader = pace.prepare(model, optimizer, loader)
    init_process_group      ->  pace = paceline.connect()
    for epoch, for batch    ->  pace.epochs, with pace.step()
    get_rank() == 0         ->  pace.is_main

This module must not know where a script lies or who asked.
"""

import ast
from collections.abc import Callable

from .syntax import Edit, Source

WRAP = "parallel.DistributedDataParallel"
_SAMPLER = "DistributedSampler"
_CONNECT = "pace = paceline.connect()"


class CannotDerive(Exception):
    """The script is written in a way that the passes do not follow."""


def port(source: Source) -> Source:
    """The script as it would be written for Paceline.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found.
    """
    passes: tuple[Callable[[Source], list[Edit]], ...] = (
        _drop_samplers, _prepare, _unwrap, _connect, _drop_group, _loop, _ask_pace, _import,
    )  # fmt: skip
    for edits_of in passes:
        source = source.edited(edits_of(source))
    return source


def _drop_samplers(source: Source) -> list[Edit]:
    """Loaders shuffle by themselves; ``set_epoch`` has nobody to speak to."""
    edits = []
    shuffles: dict[str, str] = {}
    for call in source.calls(_SAMPLER):
        shuffle = next((source.code(k.value) for k in call.keywords if k.arg == "shuffle"), "True")
        statement = source.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            shuffles[source.code(statement.targets[0])] = shuffle
            edits.append(source.remove(statement))
        else:
            shuffles[source.code(call)] = shuffle
    for call in source.calls("DataLoader"):
        known = {keyword.arg: keyword for keyword in call.keywords}
        sampler = known.get("sampler")
        if sampler is None or source.code(sampler.value) not in shuffles:
            continue
        edits += [
            _without(source, call, keyword) for name, keyword in known.items() if name == "shuffle"
        ]
        start = source.span(sampler.value)[0] - len("sampler=")
        new = f"shuffle={shuffles[source.code(sampler.value)]}"
        edits.append(Edit(start, source.span(sampler.value)[1], new))
    for call in source.calls("set_epoch"):
        if isinstance(call.func, ast.Attribute) and source.code(call.func.value) in shuffles:
            edits.append(source.remove(source.statement(call)))
    return edits


def _without(source: Source, call: ast.Call, keyword: ast.keyword) -> Edit:
    """Take one keyword argument out of a call, with the comma before it."""
    stop = source.span(keyword.value)[1]
    start = source.text.rfind(",", 0, stop - len(source.code(keyword.value)))
    if start < source.span(call)[0]:
        raise CannotDerive
    return Edit(start, stop, "")


def _prepare(source: Source) -> list[Edit]:
    """One line after model, optimizer and loader exist."""
    wrap = next(source.calls(WRAP), None)
    if wrap is None:
        raise CannotDerive
    model = source.statement(wrap)
    if not isinstance(model, ast.Assign) or not isinstance(model.targets[0], ast.Name):
        raise CannotDerive
    scope = source.scope(wrap)
    made = [
        _first_assignment(source, scope, lambda dotted: dotted.startswith("torch.optim.")
                          and "lr_scheduler" not in dotted),
        _first_assignment(source, scope, lambda dotted: dotted.endswith("DataLoader")),
    ]  # fmt: skip
    names = [model.targets[0].id, *(source.code(one.targets[0]) for one in made)]
    last = max((model, *made), key=lambda one: one.lineno)
    if any(source.parent(one) is not source.parent(last) for one in (model, *made)):
        raise CannotDerive
    listed = ", ".join(names)
    # DistributedDataParallel's loaders count per worker; so the run keeps its mathematics.
    return [source.insert_after(last, f'{listed} = pace.prepare({listed}, batch="per-worker")')]


def _first_assignment(
    source: Source, scope: ast.AST, is_wanted: Callable[[str], bool]
) -> ast.Assign:
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.targets[0], ast.Name)
            and is_wanted(source.meaning(node.value.func))
            and source.scope(node) is scope
        ):
            return node
    raise CannotDerive


def _unwrap(source: Source) -> list[Edit]:
    """``DDP(model)`` is the model; ``model.module`` is, too."""
    edits = []
    for call in source.calls(WRAP):
        statement = source.statement(call)
        inner = source.code(call.args[0]) if call.args else ""
        if not inner or not isinstance(statement, ast.Assign):
            raise CannotDerive
        name = source.code(statement.targets[0])
        edits.append(
            source.remove(statement) if inner == name else source.replace(call, inner)
        )  # fmt: skip
        edits += [
            source.replace(node, name)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and source.code(node) == f"{name}.module"
        ]
    return edits


def _connect(source: Source) -> list[Edit]:
    """The connection stands where the process group was made, else on top of its function."""
    prepare = next(source.calls("pace.prepare"))
    scope = source.scope(prepare)
    for call in source.calls("distributed.init_process_group"):
        if source.scope(call) is scope:
            return [source.replace(source.statement(call), _CONNECT)]
    first = scope.body[0]
    if isinstance(scope, ast.Module):
        first = source.statement(prepare)
    return [source.insert_before(first, _CONNECT)]


def _drop_group(source: Source) -> list[Edit]:
    """Nothing is left to set up, to take down or to wait for."""
    names = ("init_process_group", "destroy_process_group", "barrier")
    return [
        source.remove(statement)
        for call in source.calls(*(f"distributed.{name}" for name in names))
        if isinstance(statement := source.statement(call), ast.Expr)
    ]


def _loop(source: Source) -> list[Edit]:
    """``with pace.step()`` around a step, ``pace.epochs`` around epochs."""
    prepare = source.statement(next(source.calls("pace.prepare")))
    assert isinstance(prepare, ast.Assign)
    assert isinstance(prepare.targets[0], ast.Tuple)
    optimizer = source.code(prepare.targets[0].elts[1])
    edits = []
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        if any(_is_step(source, one, optimizer) for one in loop.body):
            edits.append(source.insert_before(loop.body[0], "with pace.step():"))
            edits += source.indent(loop.body)
            if source.scope(loop) is not source.scope(prepare):
                edits.append(source.insert_before(source.scope(loop).body[0], _CONNECT))
    if not edits:
        raise CannotDerive
    for call in source.calls("range"):
        loop_of = source.parent(call)
        if (
            isinstance(loop_of, ast.For)
            and "epoch" in source.code(loop_of.target)
            and len(call.args) == 1
            and source.scope(loop_of) is source.scope(prepare)
        ):
            edits.append(source.replace(call.func, "pace.epochs"))
    return edits


def _is_step(source: Source, statement: ast.stmt, optimizer: str) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = source.code(statement.value)
    return call.startswith(f"{optimizer}.step(") or call.endswith(f".step({optimizer})")


def _ask_pace(source: Source) -> list[Edit]:
    """Who am I, and how many are we: where ``pace`` is known."""
    knows = {source.scope(call) for call in source.calls("paceline.connect")}
    connected = min(call.lineno for call in source.calls("paceline.connect"))
    edits = []
    for call in source.calls("distributed.get_rank", "distributed.get_world_size"):
        if source.scope(call) not in knows or call.lineno < connected:
            continue
        around = source.parent(call)
        if source.meaning(call.func).endswith("get_world_size"):
            edits.append(source.replace(call, "pace.num_workers"))
        elif isinstance(around, ast.Compare) and source.code(around).endswith(" == 0"):
            edits.append(source.replace(around, "pace.is_main"))
        else:
            edits.append(source.replace(call, "pace.worker"))
    return edits


def _import(source: Source) -> list[Edit]:
    """``import paceline`` comes, and what nobody uses any more goes."""
    used = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    imports = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    first = next(
        (one for one in imports if source.code(one).split()[1].startswith("torch")), imports[0]
    )
    edits = [source.insert_before(first, "import paceline")]
    for node in imports:
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        kept = [
            one
            for one in node.names
            if (one.asname or one.name.split(".")[0]) in used
            or not f"{prefix}{one.name}".endswith((WRAP, _SAMPLER, "torch.distributed"))
        ]
        if not kept:
            edits.append(source.remove(node))
        elif len(kept) < len(node.names) and isinstance(node, ast.ImportFrom):
            names = ", ".join(ast.unparse(one) for one in kept)
            edits.append(source.replace(node, f"from {node.module} import {names}"))
    return edits
