"""Rewrites a script for Accelerate as one for Paceline, whose `connect` replaces its accelerator.

    Accelerator(...)             ->  paceline.connect(), by the script's own name for it
    prepare(..., eval_loader)    ->  without loaders that are not trained on: each worker has those
    with accumulate(model)       ->  with step(), the loss divided, steps at every k-th batch
    gather_for_metrics(x)        ->  x, if each worker has gone over a whole loader
    is_main_process, ...         ->  is_main; wait_for_everyone, end_training -> removed

prepare, print, device, clip_grad_norm_ and clip_grad_value_ have the same names and meanings; so
have backward, of a loss alone, and autocast, if the accelerator was made for bf16. This module must
not know where a script lies or what asked for the change.

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
_SAME_NAME = {
    "prepare", "backward", "print", "device", "autocast", "clip_grad_norm_", "clip_grad_value_",
}  # fmt: skip
_RENAMED = {
    "is_main_process": "is_main", "is_local_main_process": "is_main",
    "num_processes": "num_workers", "process_index": "worker", "local_process_index": "worker",
    "main_process_first": "once", "local_main_process_first": "once",
}  # fmt: skip
_REMOVED = ("wait_for_everyone", "end_training", "init_trackers", "free_memory")
_REMEDIES = {
    "save_state": "checkpoints are written automatically (--checkpoint-every, --resume)",
    "load_state": "to resume a run: paceline launch --resume RUN",
    "register_for_checkpointing": "write {name}.keep(thing=thing)",
    "skip_first_batches": "--resume continues a run in the middle of an epoch",
    "reduce": "write {name}.sum(x) between epochs",
    "gather": "write {name}.sum(x) between epochs",
    "gather_for_metrics": "write {name}.sum(x) between epochs, or {name}.evaluate(fn, loader)",
    "no_sync": "write if (i + 1) % k == 0: optimizer.step()",
}
_DROPPED_ARGUMENTS = {
    "cpu", "device_placement", "log_with", "project_dir", "project_config", "logging_dir",
    "step_scheduler_with_optimizer", "kwargs_handlers", "rng_types", "dataloader_config",
    "even_batches", "split_batches", "dispatch_batches", "mixed_precision",
    "gradient_accumulation_steps",
}  # fmt: skip
_KEPT_FUNCTIONS = {"set_seed"}
"""Functions of Accelerate that may stay, since they need no accelerator."""
_BATCH_NOTE = (
    "the loader's batch size is that of an update, which the workers share (Accelerate's is that "
    'of one process: prepare(..., batch="per-worker"))'
)


def is_for_accelerate(source: Source) -> bool:
    """Whether a script makes an accelerator."""
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    return any(source.meaning(call.func) == _MADE_BY for call in calls)


def leave_accelerate(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the script as it would be written for Paceline, and notes on it.

    Raises:
        CannotDerive: something in it has no counterpart, or its loop cannot be found.
    """
    script = SourceTree(text)
    refuse_anywhere(script)
    flow = Flow(script)
    training = Stepping(flow)
    refuse_loop(training)
    if training.loop.loader is None:
        raise CannotDerive(
            f"the loop of line {script.line(training.loop.node)} iterates over no DataLoader; "
            "write for batch in loader, or for number in pace.updates(n)"
        )
    accelerator = _find_accelerator(script)
    edits = TreeEdits()
    _prepare(script, flow, training, accelerator, edits)
    _attributes(script, training, accelerator, edits)
    accumulated = accumulate(script, training, accelerator, edits)
    if not accumulated:
        step(training.loop, edits, pace=accelerator.name)
    outer = training.loop.outer
    epochs(script, outer[-1] if outer else None, edits, pace=accelerator.name)
    for call in accelerator.calls:
        edits.replace(call, "paceline.connect()")
    _imports(script, edits)
    before = SourceTree(script.module.visit(edits).code)
    edits = TreeEdits()
    calls = before.calls(f"{accelerator.name}.prepare")
    guard(before, Flow(before), before.block_line(calls[0]), edits, accelerator.name)
    after = before.module.visit(edits).code if edits else before.module.code
    return after, (_BATCH_NOTE, *_precision(script, accelerator))


def _find_accelerator(script: SourceTree) -> Accelerator:
    """Return the script's accelerator.

    Raises:
        CannotDerive: there are several, or it is made in a way that has no counterpart.
    """
    calls = [call for call in script.every_call if script.meaning(call.func) == _MADE_BY]
    names = {
        binding.name
        for binding in script.bindings
        if binding.value in calls and binding.place is None
    }
    lines = " and ".join(str(script.line(call)) for call in calls)
    if len(names) != 1:
        raise CannotDerive(f"line {lines}: write accelerator = Accelerator(...), by one name")
    call_arguments = [by_name(call) for call in calls]
    if unknown := sorted(
        {key for arguments in call_arguments for key in arguments} - _DROPPED_ARGUMENTS
    ):
        raise CannotDerive(
            f"line {lines}: Accelerator({unknown[0]}=...) has no counterpart; leave it out, or "
            "start the script with its own launcher"
        )
    for call in script.every_call:
        if script.meaning(call.func).endswith((".notebook_launcher", ".LocalSGD")):
            raise CannotDerive(
                f"line {script.line(call)} starts or joins workers of Accelerate; call the "
                "function itself, and paceline launch --workers N --protocol ... starts them"
            )
    steps = [arguments.get("gradient_accumulation_steps") for arguments in call_arguments]
    if len({"" if node is None else script.code(node) for node in steps}) != 1:
        raise CannotDerive(
            f"lines {lines} accumulate different numbers of batches; write one number"
        )
    is_one = steps[0] is None or script.code(steps[0]) == "1"
    precisions = {
        script.code(arguments["mixed_precision"])
        for arguments in call_arguments
        if "mixed_precision" in arguments
    }
    precisions -= {"None", '"no"', "'no'"}
    return Accelerator(
        names.pop(), calls, None if is_one else steps[0], ", ".join(sorted(precisions))
    )


def _precision(script: SourceTree, accelerator: Accelerator) -> tuple[str, ...]:
    """Return a note if the accelerator asks for a lower precision."""
    if not accelerator.precision:
        return ()
    line, name = script.line(accelerator.calls[0]), accelerator.name
    return (
        f"line {line} asks for mixed_precision={accelerator.precision}, which is not carried over: "
        f"put the forward pass under with {name}.autocast(): and pass --precision",
    )


# -- prepare ---------------------------------------------------------------------------------------


def _prepare(
    script: SourceTree, flow: Flow, training: Stepping, accelerator: Accelerator, edits: TreeEdits
) -> None:
    """Rewrite the call of `prepare`, without the loaders that are not trained on."""
    calls = script.calls(f"{accelerator.name}.prepare")
    lines = ", ".join(str(script.line(call)) for call in calls)
    if len(calls) != 1:
        raise CannotDerive(
            f"lines {lines} prepare in several calls; prepare everything in one"
            if calls
            else f"{accelerator.name}.prepare(...) is never called"
        )
    (call,) = calls
    pairs = [
        (argument, script.code(argument), script.code(target))
        for argument, target in zip(*_pairs(script, call, accelerator), strict=True)
    ]
    assert training.loop.loader is not None
    trained = flow.express(training.loop.loader, script.scope(call))
    optimizers = [argument for argument, _, target in pairs if target in training.optimizers]
    sources, targets, other_loaders = [], [], []
    for argument, source, target in pairs:
        is_loader = training.is_loader(argument)
        if is_loader is None:
            is_loader = re.search(r"loader|_dl$|^dl_", source) is not None
        if is_loader and trained not in (source, target):
            if target not in (source, "_"):
                other_loaders.append(f"{target} = {source}")
            continue
        sources.append(_on_device(training, argument, optimizers, accelerator.name))
        targets.append(target)
    prepare = f"{', '.join(targets)} = {accelerator.name}.prepare({', '.join(sources)})"
    edits.change(script.statement(call), lambda _: _small_statement(prepare))
    if other_loaders:
        edits.insert(script.block_line(call), "; ".join(other_loaders))


def _pairs(
    script: SourceTree, call: cst.Call, accelerator: Accelerator
) -> tuple[list[cst.BaseExpression], list[cst.BaseExpression]]:
    """Return the arguments of `prepare`, and the targets of what it returns."""
    statement, arguments = script.statement(call), positional(call)
    targets = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    returned = (
        [element.value for element in targets.elements] if isinstance(targets, cst.Tuple) else []
    )
    if not len(call.args) == len(arguments) == len(returned):
        raise CannotDerive(
            f"line {script.line(call)}: {accelerator.name}.prepare is not written as "
            "a, b = prepare(a, b)"
        )
    return arguments, returned


def _small_statement(text: str) -> cst.BaseSmallStatement:
    """Parse a simple statement, without its line."""
    line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
    return line.body[0]


def _on_device(
    training: Stepping,
    expression: cst.BaseExpression,
    optimizers: Sequence[cst.BaseExpression],
    name: str,
) -> str:
    """Return an argument's text, with models moved to the device unless the script does that."""
    script, code = training.script, training.script.code(expression)
    known = (*training.optimizers.values(), *optimizers)  # by their names in the loop, and others
    trained = {text for optimizer in known for text in training.models(optimizer)}
    if code not in trained:
        return code
    moves = [f"{script.code(call.func)}" for call in script.calls("to", "cuda")]
    is_made_there = any(
        ".to(" in script.code(value) for value, bound in script.assigned if bound == code
    )
    is_moved = is_made_there or any(text.startswith(f"{code}.") for text in moves)
    return code if is_moved else f"{code}.to({name}.device)"


# -- what an accelerator does ----------------------------------------------------------------------


def _attributes(
    script: SourceTree, training: Stepping, accelerator: Accelerator, edits: TreeEdits
) -> None:
    """Rewrite every attribute of the accelerator that the script uses."""
    _check_names(script, training.flow, accelerator)
    inside = set(script.within(training.loop.node))
    for node in script.nodes:
        if not isinstance(node, cst.Attribute) or script.code(node.value) != accelerator.name:
            continue
        attribute, parent = node.attr.value, script.parents[node]
        is_call = isinstance(parent, cst.Call) and parent.func is node
        if attribute in _SAME_NAME or attribute in ("accumulate", "sync_gradients"):
            continue
        if attribute in _RENAMED:
            edits.replace(node.attr, _RENAMED[attribute])
        elif attribute in _REMOVED and is_call and isinstance(script.statement(node), cst.Expr):
            edits.remove(script.statement(node))
        elif is_call and attribute in ("unwrap_model", "get_state_dict"):
            suffix = ".state_dict()" if attribute == "get_state_dict" else ""
            edits.replace(parent, f"{_unwrapped_model(script, parent)}{suffix}")  # type: ignore[arg-type]  # is_call: a call
        elif is_call and attribute == "save":
            edits.replace(node, "torch.save")
        elif is_call and attribute == "log":
            edits.change(parent, lambda new: new.with_changes(args=_first_only(new.args)))
        elif is_call and attribute.startswith("gather") and _is_whole(training, node, inside):
            edits.change(parent, lambda new: new.args[0].value)
        elif attribute == "use_distributed":
            edits.replace(node, "False")
        elif attribute == "gradient_accumulation_steps":
            edits.replace(node, accelerator.steps_code(script))
        elif attribute in ("mixed_precision", "distributed_type") and _compared(parent) is not None:
            right = script.code(parent.comparisons[0].comparator)  # type: ignore[attr-defined]  # _compared: a comparison
            is_no = attribute == "mixed_precision" and right.strip("'\"") == "no"
            edits.replace(parent, str(is_no is _compared(parent)))
        elif attribute == "mixed_precision":
            edits.replace(node, '"no"')
        else:
            remedy = _REMEDIES.get(attribute, "leave it out").format(name="pace")
            used = f"{accelerator.name}.{attribute}"
            raise CannotDerive(f"line {script.line(node)}: {used} has no counterpart; {remedy}")


def _unwrapped_model(script: SourceTree, call: cst.Call) -> str:
    """Return the argument of ``unwrap_model`` or ``get_state_dict``."""
    arguments = [
        *positional(call),
        *(argument for key, argument in by_name(call).items() if key == "model"),
    ]
    if not arguments:
        raise CannotDerive(f"line {script.line(call)}: name the model in {script.code(call)}")
    return script.code(arguments[0])


def _refuse_other_meaning(
    script: SourceTree, call: cst.Call, verb: str, accelerator: Accelerator
) -> None:
    """Raise CannotDerive if Paceline's method would do something else than Accelerate's."""
    is_backward, line = verb == "backward", script.line(call)
    if len(call.args) != is_backward or any(
        argument.keyword or argument.star for argument in call.args
    ):
        allowed = "the loss" if is_backward else "nothing"
        raise CannotDerive(
            f"line {line}: {script.code(call)} is given more than {allowed}, which is all that "
            f"pace.{verb} takes"
        )
    if not is_backward and accelerator.precision.strip("'\"") != "bf16":
        name, asks = accelerator.name, "does nothing, without precision"
        if accelerator.precision:
            asks = f"asks for {accelerator.precision}"
        raise CannotDerive(
            f"line {line}: {name}.autocast() {asks}, but Paceline's {name}.autocast() computes in "
            "bf16: leave it out, or write torch.autocast with the dtype that you want"
        )


def _compared(node: cst.CSTNode) -> bool | None:
    """Whether a node compares by ``==``; False for ``!=``, None for anything else."""
    if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
        return None
    sign = node.comparisons[0].operator
    return {cst.Equal: True, cst.NotEqual: False}.get(type(sign))


def _first_only(args: list[cst.Arg]) -> list[cst.Arg]:
    return [args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _check_names(script: SourceTree, flow: Flow, accelerator: Accelerator) -> None:
    """Raise CannotDerive if the accelerator has another name in a function, or a call differs."""
    for verb in ("backward", "autocast"):
        for call in script.calls(f"{accelerator.name}.{verb}"):
            _refuse_other_meaning(script, call, verb, accelerator)
    for call in script.every_call:
        for index, argument in enumerate(call.args):
            function = flow.function_of(call)
            if script.code(argument.value) != accelerator.name or function is None:
                continue
            names = parameters(function)
            parameter = (
                argument.keyword.value if argument.keyword else names[index : index + 1] or ""
            )
            if parameter not in (accelerator.name, [accelerator.name]):
                raise CannotDerive(
                    f"line {script.line(call)} passes {accelerator.name} under another name; call "
                    f"it {accelerator.name} there, too"
                )


def _is_whole(training: Stepping, node: cst.CSTNode, inside: set[cst.CSTNode]) -> bool:
    """Whether a node is in a loop over a loader that is not divided among workers."""
    if node in inside:
        return False
    loops = [loop for way in training.flow.around(node) for loop in way]
    iterated = [training.iterated(loop) for loop in loops if isinstance(loop, cst.For)]
    return any(
        expression is not None and training.is_loader(expression) is not False
        for expression in iterated
    )


# -- imports ---------------------------------------------------------------------------------------


def _remove_annotations(script: SourceTree, name: str, edits: TreeEdits) -> None:
    """Remove annotations by the accelerator's class."""
    for use in script.uses(name):
        parent = script.parents[use]
        if isinstance(parent, cst.Annotation):
            edits.remove(parent)
        elif not (isinstance(parent, cst.Call) and parent.func is use):
            raise CannotDerive(f"line {script.line(use)} uses the class {name}; leave it out")


def _imports(script: SourceTree, edits: TreeEdits) -> None:
    """Import Paceline instead of Accelerate; functions that need no accelerator stay."""
    is_there = False
    for node in script.imports:
        names = imported(node)
        is_top = script.parents[script.parents[node]] is script.module
        if not is_top or not any(
            full == "accelerate" or full.startswith("accelerate.") for _, _, full in names
        ):
            continue
        removed = []
        for alias, name, full in names:
            last = full.rpartition(".")[2]
            if full == _MADE_BY:
                _remove_annotations(script, name, edits)
            if full == _MADE_BY or not script.uses(name) or last == "DistributedType":
                removed.append(alias)
            elif last not in _KEPT_FUNCTIONS and full != "accelerate":
                raise CannotDerive(
                    f"line {script.line(node)}: {last} needs an accelerator; leave it out"
                    + (", and write logging.getLogger(__name__)" if last == "get_logger" else "")
                )
        if len(removed) == len(names) and not is_there:
            is_there = True
            edits.change(node, lambda _: _small_statement("import paceline"))
        elif len(removed) == len(names):
            edits.remove(node)
        else:
            for alias in removed:
                edits.remove(alias)
            if not is_there:
                is_there = True
                edits.insert(script.block_line(node), "import paceline")
