"""Rewrites a script that makes its own process group as one whose workers `launch` starts.

    rank as a device           ->  pace.device; set_device is removed
    DDP(model), model.module   ->  model; the .module of anything else stays
    DistributedSampler         ->  removed with its set_epoch: mini-batches are leased
    spawn(f, args=(a, b))      ->  f(pace.worker, a, b), since paceline launch starts the workers
    f(0, a, b) beside it       ->  f(pace.worker, a, b); spawn's nprocs is pace.num_workers
    init, barrier, destroy     ->  removed
    get_rank, get_world_size   ->  pace.is_main, pace.worker, pace.num_workers

Other calls of the group, such as a reduction, stay, and fail by name. The loop is rewritten
elsewhere. Above 300 lines, since what belongs to the group is told apart here from what only has
such a name. This module must not know where a script lies or what asked for the change.
"""

from collections.abc import Sequence

import libcst as cst

from .dataflow import Flow
from .loops import USES_OF_A_MODEL, makers_of
from .reading import INIT, WRAP
from .tree import CannotDerive, SourceTree, TreeEdits, by_name, imported, positional

_SAMPLER = "DistributedSampler"
_GPUS = "torch.cuda.device_count"


def leave_group(script: SourceTree) -> SourceTree:
    """Return the script without its process group.

    Raises:
        CannotDerive: something of the group that cannot stay would stay.
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
    """Return names of this process's device, by ``device_ids=[rank]`` and ``set_device``."""
    names = {'int(os.environ["LOCAL_RANK"])', "int(os.environ['LOCAL_RANK'])"}
    for call in script.calls(WRAP):
        device_ids = by_name(call).get("device_ids")
        if isinstance(device_ids, cst.List):
            names.update(script.code(element.value) for element in device_ids.elements)
    for call in script.calls("cuda.set_device"):
        names.update(map(script.code, positional(call)))
    for _ in range(3):  # self.gpu_id = gpu_id, and what is set from that
        names |= {name for value, name in script.assigned if script.code(value) in names}
    return names


def _devices(script: SourceTree, edits: TreeEdits) -> None:
    """Move to pace's device what is moved to this process's; the launcher has set it."""
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
    script: SourceTree, edits: TreeEdits, call: cst.Call, method: cst.Name, names: set[str]
) -> None:
    """Move by ``x.to(pace.device)`` instead of ``x.to(rank)``, ``x.cuda(rank)``, ``x.cuda()``."""
    argument = script.code(positional(call)[0]) if positional(call) else ""
    if method.value == "to" and argument in names:
        edits.replace(positional(call)[0], "pace.device")
    if method.value == "cuda" and (argument in names or not argument) and "torch" not in argument:
        args = [cst.Arg(cst.parse_expression("pace.device")), *(a for a in call.args if a.keyword)]
        edits.replace(method, "to")
        edits.change(call, lambda new: new.with_changes(args=args))


def _samplers(script: SourceTree, edits: TreeEdits) -> None:
    """Let loaders shuffle by themselves instead of by samplers, and remove their ``set_epoch``."""
    epoch_calls = _epoch_calls(script)
    for call in epoch_calls:
        edits.remove(script.statement(call))
    shuffles: dict[str, str] = {}
    conditions: dict[str, str] = {}
    for call in script.calls(_SAMPLER):
        arguments = positional(call)
        shuffle = by_name(call).get("shuffle", arguments[3] if len(arguments) > 3 else None)
        sampler_text, statement = script.code(call), script.statement(call)
        condition = _condition_of(statement, call)
        if isinstance(statement, cst.Assign) and (statement.value is call or condition is not None):
            sampler_text = script.code(statement.targets[0].target)
            if _is_used_elsewhere(script, sampler_text, epoch_calls):
                _refuse_hidden(script, sampler_text)
                edits.replace(call, "None")
            else:
                edits.remove(statement)
        shuffles[sampler_text] = script.code(shuffle) if shuffle else "True"
        if condition is not None and shuffles[sampler_text] == "True":
            conditions[sampler_text] = script.code(condition)
    for call in script.calls("DataLoader"):
        sampler = by_name(call).get("sampler")
        if sampler is None or script.code(sampler) not in shuffles:
            continue
        name = script.code(sampler)
        edits.replace(sampler, shuffles[name])
        if name in conditions:
            edits.replace(sampler, _shuffled_if(script, call, name, conditions[name]))
        for argument in call.args:
            if argument.value is sampler:
                edits.change(argument, lambda new: new.with_changes(keyword=cst.Name("shuffle")))
            elif argument.keyword and argument.keyword.value == "shuffle":
                edits.remove(argument)


def _epoch_calls(script: SourceTree) -> list[cst.Call]:
    """Return the calls of ``set_epoch`` of samplers that are removed; those of data sets stay."""
    flow = Flow(script)
    return [
        call
        for call in script.calls("set_epoch")
        if isinstance(call.func, cst.Attribute)
        and isinstance(script.statement(call), cst.Expr)
        and _is_removed(flow, call.func.value)
    ]


def _is_removed(flow: Flow, owner: cst.BaseExpression) -> bool:
    """Whether this is a DistributedSampler, or the sampler of a loader that may have one.

    The sampler of a loader that cannot be traced counts as one: `prepare` sets its epoch, too.
    """
    removed = flow.script.calls(_SAMPLER)
    if origins := flow.origins(owner):
        return any(origin in removed for origin in origins)
    is_of_loader = isinstance(owner, cst.Attribute) and owner.attr.value.endswith("sampler")
    if not isinstance(owner, cst.Attribute) or not is_of_loader:
        return False
    made = flow.script.calls("DataLoader")
    loaders = [origin for origin in flow.origins(owner.value) if origin in made]
    samplers = [by_name(loader).get("sampler") for loader in loaders]  # type: ignore[arg-type]  # made: calls
    return not loaders or any(
        origin in removed
        for sampler in samplers
        if sampler is not None
        for origin in flow.origins(sampler)
    )


def _condition_of(statement: cst.CSTNode, call: cst.Call) -> cst.BaseExpression | None:
    """Return the condition of ``sampler = DistributedSampler(data) if condition else None``."""
    value = statement.value if isinstance(statement, cst.Assign) else None
    if not isinstance(value, cst.IfExp) or value.body is not call:
        return None
    is_none = isinstance(value.orelse, cst.Name) and value.orelse.value == "None"
    return value.test if is_none else None


def _shuffled_if(script: SourceTree, call: cst.Call, sampler: str, test: str) -> str:
    """Return when a loader shuffles that has a shuffling sampler only under a condition.

    Raises:
        CannotDerive: it cannot be seen whether it shuffles without its sampler.
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


def _is_used_elsewhere(script: SourceTree, sampler: str, epoch_calls: Sequence[cst.Call]) -> bool:
    """Whether a sampler is used other than by loaders and calls of ``set_epoch``."""
    uses = script.uses(sampler)
    removed = [
        node for call in script.calls("DataLoader") if (node := by_name(call).get("sampler"))
    ]
    removed += [call.func.value for call in epoch_calls if isinstance(call.func, cst.Attribute)]
    return not sampler.isidentifier() or len(uses) > 1 + sum(node in uses for node in removed)


def _refuse_hidden(script: SourceTree, sampler: str) -> None:
    """Raise CannotDerive if a loader would silently stop shuffling."""
    samplers = [by_name(call).get("sampler") for call in script.calls("DataLoader")]
    uses = [node for node in script.nodes if script.code(node) == sampler]
    hidden = [use for use in uses if isinstance(script.parents[use], cst.DictElement)]
    if hidden or not any(use in samplers for use in uses):
        raise CannotDerive(
            f"line {script.line((hidden or uses)[0])}: {sampler} does not reach its loader as "
            f"DataLoader(..., sampler={sampler}), so it cannot be seen whether that is to shuffle; "
            "write it so, or shuffle=True in its place"
        )


def _unwrap(script: SourceTree, edits: TreeEdits) -> None:
    """Replace ``DDP(model)`` by the model."""
    for call in script.calls(WRAP):
        statement = script.statement(call)
        if not positional(call) or not isinstance(statement, cst.Assign):
            raise CannotDerive
        is_all = statement.value is call
        if is_all and script.code(positional(call)[0]) == script.code(statement.targets[0].target):
            edits.remove(statement)
        else:
            edits.change(call, lambda new: new.args[0].value)


def refuse_untraced_modules(script: SourceTree) -> None:
    """Refuse a model's ``.module`` of which it cannot be seen whether the model is wrapped.

    Raises:
        CannotDerive: there is one.
    """
    flow = Flow(script)
    for node in _module_attributes(script) if script.calls(WRAP) else ():
        owner = script.code(node.value)
        is_asked = any(
            isinstance(up, cst.If | cst.IfExp) and owner in script.inside(up.test)
            for up in script.up(node)
        )
        is_seen = makers_of(flow, node.value) or _is_named(flow, node.value)
        if _is_model(script, node) and not (is_asked or is_seen or _is_wrapped(flow, node.value)):
            raise CannotDerive(
                f"line {script.line(node)}: it cannot be seen whether {owner} is a model in "
                f"DistributedDataParallel, which is removed, and {owner}.module with it; write "
                f"{owner}.module if hasattr({owner}, 'module') else {owner}"
            )


def _modules(script: SourceTree, edits: TreeEdits) -> None:
    """Replace ``model.module`` by the model, if it is one that was wrapped."""
    flow = Flow(script)
    for node in _module_attributes(script):
        if _is_wrapped(flow, node.value):
            if isinstance(script.parents[node], cst.AssignTarget | cst.AnnAssign):
                raise CannotDerive
            edits.change(node, lambda new: new.value)


def _is_wrapped(flow: Flow, owner: cst.BaseExpression) -> bool:
    """Whether a model was wrapped, or is an attribute of the name of one that was."""
    script, wraps = flow.script, flow.script.calls(WRAP)
    if makers := makers_of(flow, owner):
        return any(maker in wraps for maker in makers)
    return isinstance(owner, cst.Attribute) and any(
        name.rpartition(".")[2] == owner.attr.value
        and any(maker in wraps for maker in makers_of(flow, value))
        for value, name in script.assigned
    )


def _is_model(script: SourceTree, node: cst.Attribute) -> bool:
    """Whether ``x.module`` is used as a model: it or ``x`` is called, or its weights are."""
    user = script.parents[node]
    if isinstance(user, cst.Attribute):
        return user.attr.value in USES_OF_A_MODEL
    return any(
        script.code(call.func) in (script.code(node), script.code(node.value))
        for call in script.every_call
    )


def _module_attributes(script: SourceTree) -> list[cst.Attribute]:
    """Return every ``x.module``, other than a part of an object's own: ``self.module``."""
    return [
        node
        for node in script.nodes
        if isinstance(node, cst.Attribute)
        and node.attr.value == "module"
        and script.code(node.value) != "self"
    ]


def _is_named(flow: Flow, owner: cst.BaseExpression) -> bool:
    """Whether an expression is imported, or assigned from what this file does not make."""
    script, code = flow.script, flow.script.code(owner)
    root = code.partition(".")[0]
    imports = {name for line in script.imports for _, name, _ in imported(line)}
    return root in imports or bool(flow.bindings(code, flow.home(root, script.scope(owner))))


def _group(script: SourceTree, edits: TreeEdits) -> None:
    """Remove what sets up, takes down or waits for the group."""
    edits.remove_calls(script, INIT, "distributed.destroy_process_group", "distributed.barrier")


def _spawn(script: SourceTree, edits: TreeEdits) -> None:
    """Call the function instead of spawning it, since the launcher has started the processes."""
    for call in script.calls("multiprocessing.spawn", "mp.spawn"):
        statement = script.statement(call)
        if not positional(call) or not isinstance(statement, cst.Expr):
            raise CannotDerive
        called, spawn_args, *_ = [*positional(call), by_name(call).get("args"), None]
        handed_on = [] if spawn_args is None else [f"*{script.code(spawn_args)}"]
        if isinstance(spawn_args, cst.Tuple):
            handed_on = [script.code(element.value) for element in spawn_args.elements]
        edits.replace(call, f"{script.code(called)}({', '.join(['pace.worker', *handed_on])})")
        for direct_call in script.calls(script.code(called)):
            if direct_call.args and script.code(direct_call.args[0].value) == "0":
                edits.replace(direct_call.args[0].value, "pace.worker")
        nprocs = by_name(call).get("nprocs")
        count_name = "" if nprocs is None else script.code(nprocs)
        for value, name in script.assigned:
            is_call = isinstance(value, cst.Call) and script.meaning(value.func) == _GPUS
            if is_call and name == count_name:
                edits.replace(value, "pace.num_workers")


def _ask_pace(script: SourceTree, edits: TreeEdits) -> None:
    """Let pace answer which worker this is and how many there are."""
    for call in script.calls("distributed.get_world_size"):
        edits.replace(call, "pace.num_workers")
    for call in script.calls("distributed.get_rank"):
        around = script.parents[call]
        if isinstance(around, cst.Comparison) and script.code(around).endswith(" == 0"):
            edits.replace(around, "pace.is_main")
        else:
            edits.replace(call, "pace.worker")


def _unused(script: SourceTree, edits: TreeEdits) -> None:
    """Remove imports of torch's distributed modules that are no longer used."""
    group = (WRAP, _SAMPLER, "torch.distributed", "torch.multiprocessing")
    for node in script.imports:
        names = imported(node)
        unused = [
            alias
            for alias, name, full in names
            if not script.uses(name) and (full.endswith(group) or "torch.distributed." in full)
        ]
        for part in unused if len(unused) < len(names) else [node] * len(unused):
            edits.remove(part)
