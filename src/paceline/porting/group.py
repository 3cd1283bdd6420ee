"""From a script whose workers are a process group of torch's own to one that `launch` starts.

    rank as a device           ->  pace.device, and set_device nothing
    DDP(model), model.module   ->  model
    DistributedSampler         ->  nothing, nor set_epoch: mini-batches are leased
    spawn(f, args=(a, b))      ->  f(pace.worker, a, b): paceline launch starts the workers, and
    f(0, a, b) beside it           f(pace.worker, a, b); as many as spawn starts: pace.num_workers
    init, barrier, destroy     ->  nothing
    get_rank, get_world_size   ->  pace.is_main, pace.worker, pace.num_workers

What is left of the group's calls, a reduction for one, is left, and fails by name. The loop is not
its business. This module must not know where a script lies or who asked.
"""

import libcst as cst

from .reading import INIT, WRAP
from .tree import CannotDerive, SourceTree, TreeEdits, by_name, imported, positional

_SAMPLER = "DistributedSampler"
_GPUS = "torch.cuda.device_count"


def leave_group(script: SourceTree) -> SourceTree:
    """The script without its process group.

    Raises:
        CannotDerive: something of the group would stay that cannot.
    """
    for passes in ((_ask_pace, _devices, _samplers, _unwrap, _modules, _group), (_unused, _spawn)):
        edits = TreeEdits()
        for edit in passes:
            edit(script, edits)
        script = SourceTree(script.module.visit(edits).code)
    if script.calls(INIT, WRAP, _SAMPLER, "BatchSampler"):
        raise CannotDerive
    return script


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
    tests: dict[str, str] = {}
    for call in script.calls(_SAMPLER):
        given = positional(call)
        shuffle = by_name(call).get("shuffle", given[3] if len(given) > 3 else None)
        text, statement = script.code(call), script.statement(call)
        test = _only_with(statement, call)
        if isinstance(statement, cst.Assign) and (statement.value is call or test is not None):
            text = script.code(statement.targets[0].target)
            if _is_used(script, text):
                _refuse_hidden(script, text)
                edits.replace(call, "None")
            else:
                edits.remove(statement)
        shuffles[text] = script.code(shuffle) if shuffle else "True"
        if test is not None and shuffles[text] == "True":
            tests[text] = script.code(test)
    for call in script.calls("DataLoader"):
        sampler = by_name(call).get("sampler")
        if sampler is None or script.code(sampler) not in shuffles:
            continue
        name = script.code(sampler)
        edits.replace(sampler, shuffles[name])
        if name in tests:
            edits.replace(sampler, _shuffled_if(script, call, name, tests[name]))
        for one in call.args:
            if one.value is sampler:
                edits.change(one, lambda new: new.with_changes(keyword=cst.Name("shuffle")))
            elif one.keyword and one.keyword.value == "shuffle":
                edits.remove(one)
    edits.remove_calls(script, "set_epoch")


def _only_with(statement: cst.CSTNode, call: cst.Call) -> cst.BaseExpression | None:
    """The condition of ``sampler = DistributedSampler(data) if condition else None``."""
    value = statement.value if isinstance(statement, cst.Assign) else None
    if not isinstance(value, cst.IfExp) or value.body is not call:
        return None
    is_none = isinstance(value.orelse, cst.Name) and value.orelse.value == "None"
    return value.test if is_none else None


def _shuffled_if(script: SourceTree, call: cst.Call, sampler: str, test: str) -> str:
    """When a loader shuffles whose sampler, which shuffles, is there under a condition only.

    Raises:
        CannotDerive: it cannot be seen whether it shuffles without.
    """
    given = by_name(call).get("shuffle")
    without = "False" if given is None else script.code(given).strip("()")
    if without in ("True", f"{sampler} is None", f"not {sampler}"):
        return "True"
    if without != "False":
        raise CannotDerive(
            f"line {script.line(call)} shuffles by {without}, and by its sampler where {test}; "
            "write shuffle=True"
        )
    return test


def _is_used(script: SourceTree, sampler: str) -> bool:
    """Whether a sampler is more than made, given to loaders, and told of epochs."""
    used = script.uses(sampler)
    gone = [one for call in script.calls("DataLoader") if (one := by_name(call).get("sampler"))]
    gone += [one.func.value for one in script.calls("set_epoch") if hasattr(one.func, "value")]
    return not sampler.isidentifier() or len(used) > 1 + sum(one in used for one in gone)


def _refuse_hidden(script: SourceTree, sampler: str) -> None:
    """Raise CannotDerive where a loader that is to shuffle would not, without a word."""
    met = [by_name(call).get("sampler") for call in script.calls("DataLoader")]
    uses = [one for one in script.nodes if script.code(one) == sampler]
    hidden = [one for one in uses if isinstance(script.parents[one], cst.DictElement)]
    if hidden or not any(one in met for one in uses):
        raise CannotDerive(
            f"line {script.line((hidden or uses)[0])}: {sampler} does not reach its loader as "
            f"DataLoader(..., sampler={sampler}), so it cannot be seen whether that is to shuffle; "
            "write it so, or shuffle=True in its place"
        )


def _unwrap(script: SourceTree, edits: TreeEdits) -> None:
    """``DDP(model)`` is the model."""
    for call in script.calls(WRAP):
        statement = script.statement(call)
        if not positional(call) or not isinstance(statement, cst.Assign):
            raise CannotDerive
        is_all = statement.value is call
        if is_all and script.code(positional(call)[0]) == script.code(statement.targets[0].target):
            edits.remove(statement)
        else:
            edits.change(call, lambda new: new.args[0].value)


def _modules(script: SourceTree, edits: TreeEdits) -> None:
    """``model.module`` is the model, unless a class of the script's own has such a part."""
    parsed = {name for value, name in script.assigned if _is_parsed(value)}
    for one in script.nodes:
        if isinstance(one, cst.Attribute) and one.attr.value == "module":
            if script.code(one.value) in parsed:
                continue
            is_set = isinstance(script.parents[one], cst.AssignTarget | cst.AnnAssign)
            if is_set or script.code(one.value) == "self":
                raise CannotDerive
            edits.change(one, lambda new: new.value)


def _is_parsed(value: cst.BaseExpression) -> bool:
    """Whether it is what a command line says: ``args.module`` is a word of that."""
    func = value.func if isinstance(value, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value == "parse_args"


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
        for beside in script.calls(script.code(called)):
            if beside.args and script.code(beside.args[0].value) == "0":
                edits.replace(beside.args[0].value, "pace.worker")
        number = by_name(call).get("nprocs")
        named = "" if number is None else script.code(number)
        for value, name in script.assigned:
            is_call = isinstance(value, cst.Call) and script.meaning(value.func) == _GPUS
            if is_call and name == named:
                edits.replace(value, "pace.num_workers")


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
