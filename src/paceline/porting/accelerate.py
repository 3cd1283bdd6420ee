"""From a script for Accelerate to one for Paceline: what its accelerator does, `connect` gives.

    Accelerator(...)             ->  paceline.connect(), by the script's own name for it
    prepare(..., eval_loader)    ->  without loaders that nobody trains on: each worker has those
    with accumulate(model)       ->  with step(), the loss by its share, steps at every k-th batch
    gather_for_metrics(x)        ->  x, where each worker has gone over a whole loader
    is_main_process, ...         ->  is_main; wait_for_everyone, end_training -> nothing

Of the same name and meaning are prepare, print, device, clip_grad_norm_ and clip_grad_value_; so
are backward, of a loss alone, and autocast, where the accelerator was made for bf16. This module
must not know where a script lies or who asked.

Above 300 lines because all that has a counterpart, and all that has none, is named in one place.
"""

import ast
import re
from collections.abc import Sequence

import libcst as cst

from .accumulation import Accelerator, accumulate
from .dataflow import Flow, parameters
from .loops import Stepping
from .reading import Source
from .refusals import refuse_anywhere, refuse_loop
from .rewrite import epochs, guard, step
from .tree import CannotDerive, SourceTree, TreeEdits, by_name, imported, positional

_MADE_BY = "accelerate.Accelerator"
_SAME = {
    "prepare", "backward", "print", "device", "autocast", "clip_grad_norm_", "clip_grad_value_",
}  # fmt: skip
_RENAMED = {
    "is_main_process": "is_main", "is_local_main_process": "is_main",
    "num_processes": "num_workers", "process_index": "worker", "local_process_index": "worker",
    "main_process_first": "once", "local_main_process_first": "once",
}  # fmt: skip
_GONE = ("wait_for_everyone", "end_training", "init_trackers", "free_memory")
_INSTEAD = {
    "save_state": "checkpoints are written by themselves (--checkpoint-every, --resume)",
    "load_state": "a run goes on by paceline launch --resume RUN",
    "register_for_checkpointing": "write {name}.keep(thing=thing)",
    "skip_first_batches": "a run goes on in the middle of an epoch by itself (--resume)",
    "reduce": "write {name}.sum(x) between epochs",
    "gather": "write {name}.sum(x) between epochs",
    "gather_for_metrics": "write {name}.sum(x) between epochs, or {name}.evaluate(fn, loader)",
    "no_sync": "write if (i + 1) % k == 0: optimizer.step()",
}
_LEFT_OUT = {
    "cpu", "device_placement", "log_with", "project_dir", "project_config", "logging_dir",
    "step_scheduler_with_optimizer", "kwargs_handlers", "rng_types", "dataloader_config",
    "even_batches", "split_batches", "dispatch_batches", "mixed_precision",
    "gradient_accumulation_steps",
}  # fmt: skip
_FROM_ACCELERATE = {"set_seed"}
"""What of that library may stay: it needs no accelerator."""
_BATCH_NOTE = (
    "the loader's batch size is that of an update, which the workers share (Accelerate's is that "
    'of one process: prepare(..., batch="per-worker"))'
)


def is_for_accelerate(source: Source) -> bool:
    """Whether a script makes an accelerator."""
    calls = (one for one in ast.walk(source.tree) if isinstance(one, ast.Call))
    return any(source.meaning(one.func) == _MADE_BY for one in calls)


def leave_accelerate(text: str) -> tuple[str, tuple[str, ...]]:
    """The script as it would be written for Paceline, and what to know of it.

    Raises:
        CannotDerive: something of it has no counterpart, or its loop cannot be found.
    """
    script = SourceTree(text)
    refuse_anywhere(script)
    flow = Flow(script)
    training = Stepping(flow)
    refuse_loop(training)
    if training.loop.loader is None:
        raise CannotDerive(
            f"the loop of line {script.line(training.loop.node)} goes over no DataLoader; write "
            "for batch in loader, or for number in pace.updates(n)"
        )
    own = _find(script)
    edits = TreeEdits()
    _prepare(script, flow, training, own, edits)
    _attributes(script, training, own, edits)
    accumulated = accumulate(script, training, own, edits)
    if not accumulated:
        step(training.loop, edits, who=own.name)
    outer = training.loop.outer
    epochs(script, outer[-1] if outer else None, edits, who=own.name)
    for made in own.made:
        edits.replace(made, "paceline.connect()")
    _imports(script, edits)
    before = SourceTree(script.module.visit(edits).code)
    edits = TreeEdits()
    calls = before.calls(f"{own.name}.prepare")
    guard(before, Flow(before), before.block_line(calls[0]), edits, own.name)
    after = before.module.visit(edits).code if edits else before.module.code
    return after, (_BATCH_NOTE, *_precision(script, own))


def _find(script: SourceTree) -> Accelerator:
    """The accelerator.

    Raises:
        CannotDerive: there are several, or it is made in a way that has no counterpart.
    """
    made = [one for one in script.every_call if script.meaning(one.func) == _MADE_BY]
    names = {one.name for one in script.bindings if one.value in made and one.place is None}
    lines = " and ".join(str(script.line(one)) for one in made)
    if len(names) != 1:
        raise CannotDerive(f"line {lines}: write accelerator = Accelerator(...), by one name")
    given = [by_name(one) for one in made]
    if other := sorted({key for one in given for key in one} - _LEFT_OUT):
        raise CannotDerive(
            f"line {lines}: Accelerator({other[0]}=...) has no counterpart; leave it out, or start "
            "the script by its own launcher"
        )
    for call in script.every_call:
        if script.meaning(call.func).endswith((".notebook_launcher", ".LocalSGD")):
            raise CannotDerive(
                f"line {script.line(call)} starts or joins workers of Accelerate; call the "
                "function itself, and paceline launch --workers N --protocol ... starts them"
            )
    steps = [one.get("gradient_accumulation_steps") for one in given]
    if len({"" if one is None else script.code(one) for one in steps}) != 1:
        raise CannotDerive(
            f"lines {lines} accumulate different numbers of batches; write one number"
        )
    is_one = steps[0] is None or script.code(steps[0]) == "1"
    asked = {script.code(one["mixed_precision"]) for one in given if "mixed_precision" in one}
    asked -= {"None", '"no"', "'no'"}
    return Accelerator(names.pop(), made, None if is_one else steps[0], ", ".join(sorted(asked)))


def _precision(script: SourceTree, own: Accelerator) -> tuple[str, ...]:
    """A note where numbers of less precision are asked for."""
    if not own.precision:
        return ()
    return (
        f"line {script.line(own.made[0])} asks for mixed_precision={own.precision}, which is not "
        f"carried over: put the forward pass under with {own.name}.autocast(): and say --precision",
    )


# -- prepare ---------------------------------------------------------------------------------------


def _prepare(
    script: SourceTree, flow: Flow, training: Stepping, own: Accelerator, edits: TreeEdits
) -> None:
    """One call, without the loaders that nobody trains on."""
    calls = script.calls(f"{own.name}.prepare")
    lines = ", ".join(str(script.line(one)) for one in calls)
    if len(calls) != 1:
        raise CannotDerive(
            f"lines {lines} prepare in several calls; prepare everything in one"
            if calls
            else f"{own.name}.prepare(...) is called nowhere in it"
        )
    (call,) = calls
    given, returned = _pairs(script, call, own)
    assert training.loop.loader is not None
    trained = flow.express(training.loop.loader, script.scope(call))
    optimizers = [
        one
        for one, back in zip(given, returned, strict=True)
        if script.code(back) in training.optimizers
    ]
    kept, other = [], []
    for one, back in zip(given, returned, strict=True):
        name = script.code(one)
        is_other = name != trained and script.code(back) != trained
        is_loader = training.is_loader(one)
        is_loader = is_loader or (
            is_loader is None and re.search(r"loader|_dl$|^dl_", name) is not None
        )
        if is_loader and is_other:
            other += [f"{script.code(back)} = {name}"] * (script.code(back) not in (name, "_"))
            continue
        kept.append((_on_device(training, one, optimizers, own.name), script.code(back)))
    left, right = ", ".join(b for _, b in kept), ", ".join(a for a, _ in kept)
    edits.change(script.statement(call), lambda _: _small(f"{left} = {own.name}.prepare({right})"))
    if other:
        edits.insert(script.block_line(call), "; ".join(other))


def _pairs(
    script: SourceTree, call: cst.Call, own: Accelerator
) -> tuple[list[cst.BaseExpression], list[cst.BaseExpression]]:
    """What `prepare` is given, and what gets it back."""
    statement, given = script.statement(call), positional(call)
    targets = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    returned = [one.value for one in targets.elements] if isinstance(targets, cst.Tuple) else []
    if not len(call.args) == len(given) == len(returned):
        raise CannotDerive(
            f"line {script.line(call)}: {own.name}.prepare is not written as a, b = prepare(a, b)"
        )
    return given, returned


def _small(text: str) -> cst.BaseSmallStatement:
    """A statement by itself, without its line."""
    line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
    return line.body[0]


def _on_device(
    training: Stepping,
    one: cst.BaseExpression,
    optimizers: Sequence[cst.BaseExpression],
    name: str,
) -> str:
    """A model is put where this worker computes, unless the script does that."""
    script, code = training.script, training.script.code(one)
    known = (*training.optimizers.values(), *optimizers)  # by the names of the loop, and by others
    trained = {text for each in known for text in training.models(each)}
    if code not in trained:
        return code
    moved = [f"{script.code(call.func)}" for call in script.calls("to", "cuda")]
    made = any(".to(" in script.code(value) for value, bound in script.assigned if bound == code)
    is_moved = made or any(text.startswith(f"{code}.") for text in moved)
    return code if is_moved else f"{code}.to({name}.device)"


# -- what an accelerator does ----------------------------------------------------------------------


def _attributes(script: SourceTree, training: Stepping, own: Accelerator, edits: TreeEdits) -> None:
    """Everything that the script asks of its accelerator."""
    _check_names(script, training.flow, own)
    inside = set(script.within(training.loop.node))
    for node in script.nodes:
        if not isinstance(node, cst.Attribute) or script.code(node.value) != own.name:
            continue
        asked, around = node.attr.value, script.parents[node]
        is_call = isinstance(around, cst.Call) and around.func is node
        if asked in _SAME or asked in ("accumulate", "sync_gradients"):
            continue
        if asked in _RENAMED:
            edits.replace(node.attr, _RENAMED[asked])
        elif asked in _GONE and is_call and isinstance(script.statement(node), cst.Expr):
            edits.remove(script.statement(node))
        elif is_call and asked in ("unwrap_model", "get_state_dict"):
            end = ".state_dict()" if asked == "get_state_dict" else ""
            edits.replace(around, f"{_model(script, around)}{end}")  # type: ignore[arg-type]  # is_call: a call
        elif is_call and asked == "save":
            edits.replace(node, "torch.save")
        elif is_call and asked == "log":
            edits.change(around, lambda new: new.with_changes(args=_first(new.args)))
        elif is_call and asked.startswith("gather") and _is_whole(training, node, inside):
            edits.change(around, lambda new: new.args[0].value)
        elif asked == "use_distributed":
            edits.replace(node, "False")
        elif asked == "gradient_accumulation_steps":
            edits.replace(node, "1" if own.steps is None else script.code(own.steps))
        elif asked in ("mixed_precision", "distributed_type") and _compared(around) is not None:
            right = script.code(around.comparisons[0].comparator)  # type: ignore[attr-defined]  # _compared: a comparison
            is_no = asked == "mixed_precision" and right.strip("'\"") == "no"
            edits.replace(around, str(is_no is _compared(around)))
        elif asked == "mixed_precision":
            edits.replace(node, '"no"')
        else:
            instead = _INSTEAD.get(asked, "leave it out").format(name="pace")
            raise CannotDerive(
                f"line {script.line(node)}: {own.name}.{asked} has no counterpart; {instead}"
            )


def _model(script: SourceTree, call: cst.Call) -> str:
    """What ``unwrap_model`` or ``get_state_dict`` is given."""
    given = [*positional(call), *(one for key, one in by_name(call).items() if key == "model")]
    if not given:
        raise CannotDerive(f"line {script.line(call)}: name the model in {script.code(call)}")
    return script.code(given[0])


def _refuse_otherwise(script: SourceTree, call: cst.Call, verb: str, own: Accelerator) -> None:
    """Raise CannotDerive where a call would do something else than Accelerate's."""
    is_backward, line = verb == "backward", script.line(call)
    if len(call.args) != is_backward or any(one.keyword or one.star for one in call.args):
        wanted = "the loss" if is_backward else "nothing"
        raise CannotDerive(
            f"line {line}: {script.code(call)} is given more than {wanted}, and pace.{verb} takes "
            "no more"
        )
    if not is_backward and own.precision.strip("'\"") != "bf16":
        asks = f"asks for {own.precision}" if own.precision else "does nothing, without precision"
        raise CannotDerive(
            f"line {line}: {own.name}.autocast() {asks}, and {own.name}.autocast() of Paceline "
            "computes in bf16: leave it out, or write torch.autocast with what you mean"
        )


def _compared(around: cst.CSTNode) -> bool | None:
    """Whether something is compared with ``==``; False: ``!=``; None: not so."""
    if not isinstance(around, cst.Comparison) or len(around.comparisons) != 1:
        return None
    sign = around.comparisons[0].operator
    return {cst.Equal: True, cst.NotEqual: False}.get(type(sign))


def _first(args: list[cst.Arg]) -> list[cst.Arg]:
    return [args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _check_names(script: SourceTree, flow: Flow, own: Accelerator) -> None:
    """Raise CannotDerive where it has another name in a function, or one means something else."""
    for verb in ("backward", "autocast"):
        for call in script.calls(f"{own.name}.{verb}"):
            _refuse_otherwise(script, call, verb, own)
    for call in script.every_call:
        for place, one in enumerate(call.args):
            function = flow.function_of(call)
            if script.code(one.value) != own.name or function is None:
                continue
            names = parameters(function)
            taken = one.keyword.value if one.keyword else names[place : place + 1] or ""
            if taken not in (own.name, [own.name]):
                raise CannotDerive(
                    f"line {script.line(call)} hands {own.name} on by another name; call it "
                    f"{own.name} there, too"
                )


def _is_whole(training: Stepping, node: cst.CSTNode, inside: set[cst.CSTNode]) -> bool:
    """Whether a node stands in a loop over a loader that is not shared out."""
    if node in inside:
        return False
    loops = [one for way in training.flow.around(node) for one in way]
    over = [training.iterated(one) for one in loops if isinstance(one, cst.For)]
    return any(one is not None and training.is_loader(one) is not False for one in over)


# -- imports ---------------------------------------------------------------------------------------


def _types(script: SourceTree, name: str, edits: TreeEdits) -> None:
    """Nothing is annotated as an accelerator any more."""
    for one in script.uses(name):
        around = script.parents[one]
        if isinstance(around, cst.Annotation):
            edits.remove(around)
        elif not (isinstance(around, cst.Call) and around.func is one):
            raise CannotDerive(f"line {script.line(one)} uses the class {name}; leave that out")


def _imports(script: SourceTree, edits: TreeEdits) -> None:
    """Paceline in the place of Accelerate; what of that stays needs no accelerator."""
    is_there = False
    for node in script.imports:
        names = imported(node)
        is_top = script.parents[script.parents[node]] is script.module
        if not is_top or not any(
            full == "accelerate" or full.startswith("accelerate.") for _, _, full in names
        ):
            continue
        gone = []
        for one, name, full in names:
            last = full.rpartition(".")[2]
            if full == _MADE_BY:
                _types(script, name, edits)
            if full == _MADE_BY or not script.uses(name) or last == "DistributedType":
                gone.append(one)
            elif last not in _FROM_ACCELERATE and full != "accelerate":
                raise CannotDerive(
                    f"line {script.line(node)}: {last} needs an accelerator; leave it out"
                    + (", and write logging.getLogger(__name__)" if last == "get_logger" else "")
                )
        if len(gone) == len(names) and not is_there:
            is_there = True
            edits.change(node, lambda _: _small("import paceline"))
        elif len(gone) == len(names):
            edits.remove(node)
        else:
            for one in gone:
                edits.remove(one)
            if not is_there:
                is_there = True
                edits.insert(script.block_line(node), "import paceline")
