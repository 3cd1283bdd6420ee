"""From a script for DistributedDataParallel to the same script for Paceline, pass by pass.

Passes of one round read one tree, and what one changes may stand inside of another's change:

    model, optimizer, loader   ->  one line after they exist: pace.prepare(...)
    for batch, for epoch       ->  with pace.step(), pace.epochs
    and, where the group is made in any case:
    rank as a device           ->  pace.device, and set_device nothing
    DDP(model), model.module   ->  model
    DistributedSampler         ->  nothing, nor set_epoch: mini-batches are leased
    spawn(f, args=(a, b))      ->  f(pace.worker, a, b): paceline launch starts the workers
    init, barrier, destroy     ->  nothing
    get_rank, get_world_size   ->  pace.is_main, pace.worker, pace.num_workers

Where the group is made under an ``if``, that branch stays as it is: `launch` sets no RANK for such
a script, so it runs as it does by plain ``python``. What is left of the group's calls, a reduction
for one, is left, and fails by name. This module must not know where a script lies or who asked.
"""

from collections.abc import Callable

import libcst as cst

from .dataflow import Flow, Parts
from .reading import INIT, WRAP
from .tree import CannotDerive, SourceTree, TreeEdits, by_name, imported, positional

_SAMPLER = "DistributedSampler"


def port(text: str) -> str:
    """The script as it would be written for Paceline.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found, or something of its group would
            stay that cannot.
    """
    script = SourceTree(text)
    is_flagged = Parts(script).is_flagged
    if script.uses("pace"):
        raise CannotDerive
    rounds: list[list[Callable[[SourceTree, TreeEdits], None]]]
    rounds = [[_prepare, _peek, _step, _epochs, _clip], [_connect]]
    if not is_flagged:
        rounds[1:1] = [[_ask_pace, _devices, _samplers, _unwrap, _modules, _group], [_spawn]]
        rounds[-1].insert(0, _unused)
    for passes in rounds:
        edits = TreeEdits()
        for edit in passes:
            edit(script, edits)
        if edits:
            script = SourceTree(script.module.visit(edits).code)
    if not is_flagged and script.calls(INIT, WRAP, _SAMPLER, "BatchSampler"):
        raise CannotDerive
    return script.module.code


def names_of(text: str) -> list[str] | None:
    """Model, optimizer and loader, by their names; None where they cannot be found."""
    try:
        return Parts(SourceTree(text)).names
    except CannotDerive:
        return None


# -- the loop -------------------------------------------------------------------------------------


def _prepare(script: SourceTree, edits: TreeEdits) -> None:
    """One line after model, optimizer, loader and its schedulers exist."""
    parts = Parts(script)
    flow, scope = parts.flow, parts.scope
    binders = [one for name in parts.names if (one := flow.binder(name, scope)) is not None]
    place = flow.place([*binders, *parts.wraps], parts.uses)
    _check_loader(parts)
    names = list(parts.names)
    for value, name in script.assigned:
        meaning = script.meaning(value.func) if isinstance(value, cst.Call) else ""
        if "lr_scheduler." in meaning and script.scope(value) is scope:
            names.append(name)
            place = flow.place([place, value], parts.uses)
    listed = ", ".join(names)
    # DistributedDataParallel's loaders count per worker; so the run keeps its mathematics.
    batch = "" if parts.is_flagged else ', batch="per-worker"'
    edits.insert(place, f"{listed} = pace.prepare({listed}{batch})")


def _check_loader(parts: Parts) -> None:
    """What the loop runs over is a loader, and no list of one's own."""
    binder = parts.flow.binder(parts.names[2], parts.scope)
    while isinstance(binder, cst.Assign) and not parts.flow.makes_loader(binder.value):
        if not isinstance(binder.value, cst.Name):
            raise CannotDerive
        binder = parts.flow.binder(binder.value.value, parts.scope)


def _peek(script: SourceTree, edits: TreeEdits) -> None:
    """A look at one batch beside the loop is one into the plain loader: it opens no epoch."""
    loader = script.code(Flow(script).loop().loader)
    for call in script.calls("iter"):
        for one in positional(call)[:1]:
            if script.code(one) == loader:
                edits.replace(one, f"{loader}.plain")


def _step(script: SourceTree, edits: TreeEdits) -> None:
    """``with pace.step()`` around what is done with a batch."""
    step = cst.WithItem(cst.parse_expression("pace.step()"))

    def wrapped(body: cst.BaseSuite) -> cst.BaseSuite:
        if not isinstance(body, cst.IndentedBlock):
            raise CannotDerive
        inner = body.with_changes(header=cst.TrailingWhitespace())
        return body.with_changes(body=[cst.With(items=[step], body=inner)], footer=())

    edits.change(Flow(script).loop().node.body, wrapped)


def _epochs(script: SourceTree, edits: TreeEdits) -> None:
    """``pace.epochs`` where epochs are counted from 0."""
    for call in script.calls("range"):
        loop = script.parents[call]
        counted = script.code(loop.target) if isinstance(loop, cst.For) else ""
        if "epoch" in counted and len(call.args) == 1:
            edits.replace(call.func, "pace.epochs")


def _clip(script: SourceTree, edits: TreeEdits) -> None:
    """Clipping is of the averaged gradient."""
    for call in script.calls("utils.clip_grad_norm_"):
        if len(call.args) == 2 and "unscale_" not in script.module.code:
            edits.replace(call.func, "pace.clip_grad_norm_")


def _connect(script: SourceTree, edits: TreeEdits) -> None:
    """``import paceline`` beside torch's, and ``pace`` after the imports on top."""
    lines: list[cst.CSTNode] = list(script.module.body)
    tops = {lines.index(at): one for one in script.imports if (at := script.parents[one]) in lines}
    if not tops:
        raise CannotDerive
    last = min(tops)
    while last + 1 in tops:
        last += 1
    torches = [at for at, one in tops.items() if script.code(one).split()[1].startswith("torch")]
    edits.insert(lines[[*torches, last][0]], "import paceline", is_before=True)
    edits.insert(lines[last], "\npace = paceline.connect()")


# -- the group ------------------------------------------------------------------------------------


def _device_names(script: SourceTree) -> set[str]:
    """What stands for this process's device: ``device_ids=[rank]`` and ``set_device`` say so."""
    names = {'int(os.environ["LOCAL_RANK"])', "int(os.environ['LOCAL_RANK'])"}
    for call in script.calls(WRAP):
        listed = by_name(call).get("device_ids")
        if isinstance(listed, cst.List):
            names.update(script.code(one.value) for one in listed.elements)
    for call in script.calls("cuda.set_device"):
        names.update(map(script.code, positional(call)))
    for _ in range(3):  # self.gpu_id = gpu_id, and what is set from that
        names |= {name for value, name in script.assigned if script.code(value) in names}
    return names


def _devices(script: SourceTree, edits: TreeEdits) -> None:
    """What is moved to this process's device is moved to pace's; the launcher has set it."""
    names = _device_names(script)
    for node in script.nodes:
        if isinstance(node, cst.FormattedString):
            if script.code(node)[2:].startswith("cuda") and names & script.inside(node):
                edits.replace(node, "pace.device")
        elif isinstance(node, cst.Call):
            if script.meaning(node.func) == "torch.device" and names & script.inside(node):
                edits.replace(node, "pace.device")
            elif isinstance(node.func, cst.Attribute):
                _move(script, edits, node, node.func.attr, names)
    edits.remove_calls(script, "cuda.set_device")


def _move(
    script: SourceTree, edits: TreeEdits, call: cst.Call, verb: cst.Name, names: set[str]
) -> None:
    """``x.to(rank)``, ``x.cuda(rank)`` and ``x.cuda()``."""
    place = script.code(positional(call)[0]) if positional(call) else ""
    if verb.value == "to" and place in names:
        edits.replace(positional(call)[0], "pace.device")
    if verb.value == "cuda" and (place in names or not place) and "torch" not in place:
        args = [cst.Arg(cst.parse_expression("pace.device")), *(a for a in call.args if a.keyword)]
        edits.replace(verb, "to")
        edits.change(call, lambda new: new.with_changes(args=args))


def _samplers(script: SourceTree, edits: TreeEdits) -> None:
    """Loaders shuffle by themselves; ``set_epoch`` has nobody to speak to."""
    shuffles: dict[str, str] = {}
    for call in script.calls(_SAMPLER):
        shuffle = by_name(call).get("shuffle")
        text, statement = script.code(call), script.statement(call)
        if isinstance(statement, cst.Assign) and statement.value is call:
            text = script.code(statement.targets[0].target)
            if _is_used(script, text):
                edits.replace(call, "None")
            else:
                edits.remove(statement)
        shuffles[text] = script.code(shuffle) if shuffle else "True"
    for call in script.calls("DataLoader"):
        sampler = by_name(call).get("sampler")
        if sampler is None or script.code(sampler) not in shuffles:
            continue
        edits.replace(sampler, shuffles[script.code(sampler)])
        for one in call.args:
            if one.value is sampler:
                edits.change(one, lambda new: new.with_changes(keyword=cst.Name("shuffle")))
            elif one.keyword and one.keyword.value == "shuffle":
                edits.remove(one)
    edits.remove_calls(script, "set_epoch")


def _is_used(script: SourceTree, sampler: str) -> bool:
    """Whether a sampler is more than made, given to loaders, and told of epochs."""
    used = script.uses(sampler)
    gone = [one for call in script.calls("DataLoader") if (one := by_name(call).get("sampler"))]
    gone += [one.func.value for one in script.calls("set_epoch") if hasattr(one.func, "value")]
    return not sampler.isidentifier() or len(used) > 1 + sum(one in used for one in gone)


def _unwrap(script: SourceTree, edits: TreeEdits) -> None:
    """``DDP(model)`` is the model."""
    for call in script.calls(WRAP):
        statement = script.statement(call)
        if not positional(call) or not isinstance(statement, cst.Assign):
            raise CannotDerive
        if script.code(positional(call)[0]) == script.code(statement.targets[0].target):
            edits.remove(statement)
        else:
            edits.change(call, lambda new: new.args[0].value)


def _modules(script: SourceTree, edits: TreeEdits) -> None:
    """``model.module`` is the model, unless a class of the script's own has such a part."""
    for one in script.nodes:
        if isinstance(one, cst.Attribute) and one.attr.value == "module":
            is_set = isinstance(script.parents[one], cst.AssignTarget | cst.AnnAssign)
            if is_set or script.code(one.value) == "self":
                raise CannotDerive
            edits.change(one, lambda new: new.value)


def _group(script: SourceTree, edits: TreeEdits) -> None:
    """Nothing is left to set up, to take down or to wait for."""
    edits.remove_calls(script, INIT, "distributed.destroy_process_group", "distributed.barrier")


def _spawn(script: SourceTree, edits: TreeEdits) -> None:
    """The launcher has begun the processes: each calls the function itself."""
    for call in script.calls("multiprocessing.spawn", "mp.spawn"):
        statement = script.statement(call)
        if not positional(call) or not isinstance(statement, cst.Expr):
            raise CannotDerive
        called, more, *_ = [*positional(call), by_name(call).get("args"), None]
        rest = [] if more is None else [f"*{script.code(more)}"]
        if isinstance(more, cst.Tuple):
            rest = [script.code(one.value) for one in more.elements]
        edits.replace(call, f"{script.code(called)}({', '.join(['pace.worker', *rest])})")


def _ask_pace(script: SourceTree, edits: TreeEdits) -> None:
    """Who am I, and how many are we."""
    for call in script.calls("distributed.get_world_size"):
        edits.replace(call, "pace.num_workers")
    for call in script.calls("distributed.get_rank"):
        around = script.parents[call]
        if isinstance(around, cst.Comparison) and script.code(around).endswith(" == 0"):
            edits.replace(around, "pace.is_main")
        else:
            edits.replace(call, "pace.worker")


def _unused(script: SourceTree, edits: TreeEdits) -> None:
    """What of torch's own nobody uses any more is not imported."""
    group = (WRAP, _SAMPLER, "torch.distributed", "torch.multiprocessing")
    for node in script.imports:
        names = imported(node)
        idle = [
            one
            for one, name, full in names
            if not script.uses(name) and (full.endswith(group) or "torch.distributed." in full)
        ]
        for one in idle if len(idle) < len(names) else [node] * len(idle):
            edits.remove(one)
