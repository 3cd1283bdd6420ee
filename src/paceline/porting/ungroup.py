"""A script that makes a process group in any case, without one: pass by pass.

    rank as a device, set_device     ->  pace.device, nothing
    DDP(model), model.module         ->  model
    DistributedSampler, set_epoch    ->  nothing: mini-batches are leased
    spawn(f, args=(a, b))            ->  f(pace.worker, a, b)
    init, barrier, destroy           ->  nothing
    get_rank, get_world_size         ->  pace.is_main, pace.worker, pace.num_workers

It stands on ``pace`` being known everywhere. What is left of the group's calls, a reduction for
one, is left, and fails by name. This module must not know loops or what is prepared.
"""

import ast
from collections.abc import Callable, Iterator

from .dataflow import CannotDerive
from .syntax import Edit, Source

WRAP = "parallel.DistributedDataParallel"
INIT = "distributed.init_process_group"
_SAMPLER = "DistributedSampler"


def ungroup(source: Source) -> Source:
    """The script without its process group.

    Raises:
        CannotDerive: something of it would stay that cannot.
    """
    passes: tuple[Callable[[Source], list[Edit]], ...] = (
        _devices, _set_device, _drop_samplers, _unwrap, _modules, _drop_group, _spawn, _ask_pace,
        _imports,
    )  # fmt: skip
    for edits_of in passes:
        source = source.edited(edits_of(source))
    if next(source.calls(INIT, WRAP, _SAMPLER, "BatchSampler"), None) is not None:
        raise CannotDerive
    return source


# -- devices --------------------------------------------------------------------------------------


def _device_names(source: Source) -> set[str]:
    """What stands for this process's device: ``device_ids=[rank]`` and ``set_device`` say so."""
    names = {'int(os.environ["LOCAL_RANK"])', "int(os.environ['LOCAL_RANK'])"}
    for call in source.calls(WRAP):
        for word in call.keywords:
            if word.arg == "device_ids" and isinstance(word.value, ast.List):
                names.update(map(source.code, word.value.elts))
    for call in source.calls("cuda.set_device"):
        names.update(map(source.code, call.args))
    for _ in range(3):  # self.gpu_id = gpu_id, and what is set from that
        for one in ast.walk(source.tree):
            if isinstance(one, ast.Assign) and source.code(one.value) in names:
                names.update(source.code(target) for target in one.targets)
    return names


def _devices(source: Source) -> list[Edit]:
    names = _device_names(source)
    edits = []
    covered: set[ast.AST] = set()
    for call in (one for one in ast.walk(source.tree) if isinstance(one, ast.Call)):
        if source.meaning(call.func) == "torch.device" and _mentions(source, call, names):
            edits.append(source.replace(call, "pace.device"))
            covered.update(ast.walk(call))
    for node in ast.walk(source.tree):
        if node in covered:
            continue
        if isinstance(node, ast.JoinedStr) and _mentions(source, node, names):
            if source.code(node)[2:].startswith("cuda"):
                edits.append(source.replace(node, "pace.device"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            edits += _moved(source, node, node.func, names)
    return edits


def _mentions(source: Source, node: ast.AST, names: set[str]) -> bool:
    return any(source.code(one) in names for one in ast.walk(node) if isinstance(one, ast.expr))


def _moved(source: Source, call: ast.Call, func: ast.Attribute, names: set[str]) -> list[Edit]:
    """``x.to(rank)``, ``x.cuda(rank)`` and ``x.cuda()``."""
    place = source.code(call.args[0]) if call.args else ""
    if func.attr == "to" and place in names:
        return [source.replace(call.args[0], "pace.device")]
    if func.attr == "cuda" and (place in names or not place) and "torch" not in place:
        start = source.span(func.value)[1]
        rest = "".join(f", {source.code(word)}" for word in call.keywords)  # type: ignore[arg-type]
        return [Edit(start, source.span(call)[1], f".to(pace.device{rest})")]
    return []


def _set_device(source: Source) -> list[Edit]:
    """The launcher has set it."""
    return [
        source.remove(source.statement(call))
        for call in source.calls("cuda.set_device")
        if isinstance(source.statement(call), ast.Expr)
    ]


# -- the loader -----------------------------------------------------------------------------------


def _drop_samplers(source: Source) -> list[Edit]:
    """Loaders shuffle by themselves; ``set_epoch`` has nobody to speak to."""
    edits = []
    shuffles: dict[str, str] = {}
    used = [node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)]
    for call in source.calls(_SAMPLER):
        shuffle = next((source.code(k.value) for k in call.keywords if k.arg == "shuffle"), "True")
        statement = source.statement(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            name = source.code(statement.targets[0])
            shuffles[name] = shuffle
            gone = 1 + len(list(_loaders_with(source, name))) + len(list(_set_epochs(source, name)))
            is_used = used.count(name) > gone or not isinstance(statement.targets[0], ast.Name)
            edits.append(source.replace(call, "None") if is_used else source.remove(statement))
        else:
            shuffles[source.code(call)] = shuffle
    for text, shuffle in shuffles.items():
        for call, word in _loaders_with(source, text):
            edits += [_without(source, call, one) for one in call.keywords if one.arg == "shuffle"]
            start, stop = source.span(word.value)[0] - len("sampler="), source.span(word.value)[1]
            edits.append(Edit(start, stop, f"shuffle={shuffle}"))
    edits += [source.remove(source.statement(call)) for call in _set_epochs(source, "")]
    return edits


def _loaders_with(source: Source, text: str) -> Iterator[tuple[ast.Call, ast.keyword]]:
    """Loaders that are given this sampler."""
    for call in source.calls("DataLoader"):
        for word in call.keywords:
            if word.arg == "sampler" and source.code(word.value) == text:
                yield call, word


def _set_epochs(source: Source, name: str) -> Iterator[ast.Call]:
    """``set_epoch`` of this sampler, or of any."""
    for call in source.calls("set_epoch"):
        func = call.func
        is_own = not name or (isinstance(func, ast.Attribute) and source.code(func.value) == name)
        if is_own and isinstance(source.statement(call), ast.Expr):
            yield call


def _without(source: Source, call: ast.Call, keyword: ast.keyword) -> Edit:
    """Take one keyword argument out of a call, with the comma before it."""
    stop = source.span(keyword.value)[1]
    start = source.text.rfind(",", 0, stop - len(source.code(keyword.value)))
    if start < source.span(call)[0]:
        raise CannotDerive
    return Edit(start, stop, "")


# -- the model ------------------------------------------------------------------------------------


def _unwrap(source: Source) -> list[Edit]:
    """``DDP(model)`` is the model."""
    edits = []
    for call in source.calls(WRAP):
        statement = source.statement(call)
        inner = source.code(call.args[0]) if call.args else ""
        if not inner or not isinstance(statement, ast.Assign):
            raise CannotDerive
        is_same = inner == source.code(statement.targets[0])
        edits.append(source.remove(statement) if is_same else source.replace(call, inner))
    return edits


def _modules(source: Source) -> list[Edit]:
    """``model.module`` is the model, unless a class of the script's own has such a part."""
    found = [one for one in ast.walk(source.tree) if isinstance(one, ast.Attribute)]
    found = [one for one in found if one.attr == "module"]
    if any(isinstance(one.ctx, ast.Store) or source.code(one.value) == "self" for one in found):
        raise CannotDerive
    return [source.replace(one, source.code(one.value)) for one in found]


# -- the group ------------------------------------------------------------------------------------


def _drop_group(source: Source) -> list[Edit]:
    """Nothing is left to set up, to take down or to wait for."""
    names = ("init_process_group", "destroy_process_group", "barrier")
    return [
        source.remove(statement)
        for call in source.calls(*(f"distributed.{name}" for name in names))
        if isinstance(statement := source.statement(call), ast.Expr)
    ]


def _spawn(source: Source) -> list[Edit]:
    """The launcher has begun the processes: each calls the function itself."""
    edits = []
    for call in source.calls("multiprocessing.spawn", "mp.spawn"):
        statement = source.statement(call)
        if not call.args or not isinstance(statement, ast.Expr) or statement.value is not call:
            raise CannotDerive
        more = next((word.value for word in call.keywords if word.arg == "args"), None)
        more = call.args[1] if more is None and len(call.args) > 1 else more
        rest = [] if more is None else [f"*{source.code(more)}"]
        if isinstance(more, ast.Tuple):
            rest = [source.code(one) for one in more.elts]
        listed = ", ".join(["pace.worker", *rest])
        edits.append(source.replace(call, f"{source.code(call.args[0])}({listed})"))
    return edits


def _ask_pace(source: Source) -> list[Edit]:
    """Who am I, and how many are we."""
    edits = []
    for call in source.calls("distributed.get_rank", "distributed.get_world_size"):
        around = source.parent(call)
        if source.meaning(call.func).endswith("get_world_size"):
            edits.append(source.replace(call, "pace.num_workers"))
        elif isinstance(around, ast.Compare) and source.code(around).endswith(" == 0"):
            edits.append(source.replace(around, "pace.is_main"))
        else:
            edits.append(source.replace(call, "pace.worker"))
    return edits


def _imports(source: Source) -> list[Edit]:
    """What of torch's own nobody uses any more goes."""
    used = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    group = (WRAP, _SAMPLER, "torch.distributed", "torch.multiprocessing")
    edits = []
    for node in source.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        kept = [
            one
            for one in node.names
            if (one.asname or one.name.split(".")[0]) in used
            or not (f"{prefix}{one.name}".endswith(group) or prefix == "torch.distributed.")
        ]
        if not kept:
            edits.append(source.remove(node))
        elif len(kept) < len(node.names) and isinstance(node, ast.ImportFrom):
            names = ", ".join(ast.unparse(one) for one in kept)
            edits.append(source.replace(node, f"from {node.module} import {names}"))
    return edits
