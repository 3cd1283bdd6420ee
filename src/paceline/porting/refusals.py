"""Refuses scripts that cannot be ported: names the line, and what to write instead.

A script is checked before anything is rewritten, so that it is refused before its first step and
not during it. This module must not know how a script is rewritten.
"""

import re
from itertools import combinations

import libcst as cst

from .dataflow import AnyLoop, Flow
from .endless import refuse_accumulated
from .indexed import refuse_indexed
from .loops import Loop, Stepping
from .together import carried
from .tree import CannotDerive, SourceTree, by_name, positional

_SPREADS_MODEL = re.compile(
    r"(^|\.)(FullyShardedDataParallel|fully_shard|parallelize_module|PipelineParallel|Pipe|"
    r"ScheduleGPipe)$"
)
_PROCESS = re.compile(r"(^|\.)(multiprocessing|mp)\.Process$")
_GENERATORS = re.compile(r"(default_rng|RandomState|random\.Random|torch\.Generator)$")
_CYCLE = "itertools.cycle"
_MOST_CALLS = 8
"""The longest chain of calls followed from the beginning of a script to a loop."""
_NUMBERED_DEVICE = re.compile(r"""['"](cuda|xpu|mps):?(\d*)['"]""")


def refuse_anywhere(script: SourceTree) -> None:
    """Refuse what cannot be ported, wherever in the script it is.

    Raises:
        CannotDerive: the script has it.
    """
    for call in script.every_call:
        name, line = script.meaning(call.func), script.line(call)
        keywords = {key: script.code(value) for key, value in by_name(call).items()}
        short_name = name.rpartition(".")[2]
        if short_name == "SparseAdam" or (
            short_name.startswith("Embedding") and keywords.get("sparse") == "True"
        ):
            raise CannotDerive(
                f"line {line}: sparse gradients cannot be averaged; write sparse=False and a dense "
                "optimizer"
            )
        if _SPREADS_MODEL.search(name) and "multiprocessing." not in name:
            raise CannotDerive(
                f"line {line}: {short_name} spreads one model over several devices, but here each "
                "worker has a whole model; leave it out, or start the script with its own launcher"
            )
        if keywords.get("device_map", "None") not in ("None", '"cpu"', "'cpu'"):
            raise CannotDerive(
                f"line {line}: device_map spreads one model over several devices, but here each "
                "worker has a whole model; leave it out"
            )
        if _PROCESS.search(name) and _may_train(script, keywords.get("target", "")):
            raise CannotDerive(
                f"line {line} starts its own workers, which paceline's protocols cannot reach; "
                "call the target once, and paceline launch --workers N starts the workers"
            )
    _refuse_several_devices(script)


def _may_train(script: SourceTree, name: str) -> bool:
    """Whether a function, or one of the script that it names, computes gradients, or is unknown.

    A process that plays a game or reads files for the worker that started it is that worker's own.
    """
    functions = {
        node.name.value: node for node in script.nodes if isinstance(node, cst.FunctionDef)
    }
    pending, seen = [name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in functions:
            return True
        named = {
            part.value if isinstance(part, cst.Name) else part.attr.value
            for part in script.within(functions[name])
            if isinstance(part, cst.Name | cst.Attribute)
        }
        if named & {"backward", "grad"}:
            return True
        pending += named & functions.keys()
    return False


def _refuse_several_devices(script: SourceTree) -> None:
    """Raise CannotDerive if parts of a model are put on several numbered devices."""
    moves = [
        (call, script.code(positional(call)[0])) for call in script.calls("to") if positional(call)
    ]
    places = {
        text: call
        for call, text in moves
        if (match := _NUMBERED_DEVICE.fullmatch(text)) and match[2]
    }
    if len(places) > 1:
        lines = " and ".join(str(script.line(call)) for call in places.values())
        raise CannotDerive(
            f"lines {lines} put parts of a model on several devices, but here each worker has a "
            "whole model on pace.device; move the whole model there"
        )


def refuse_loop(training: Stepping) -> None:
    """Refuse what cannot be ported in the training loop, or in what it iterates over.

    Raises:
        CannotDerive: the loop has it.
    """
    loop, flow = training.loop, training.flow
    if loop.counts_updates:
        _refuse_repeated_loop(flow, loop)
    if loop.loader is None:
        _refuse_draws(flow, loop)
    if loop.numbers is not None:
        assert isinstance(loop.node, cst.For)
        refuse_indexed(flow, loop.node, loop.outer, [call for call, _ in training.steps])
        _refuse_carried(training)
        _refuse_own_order(flow, loop)


def _refuse_repeated_loop(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive if a loop that counts its iterations runs more than once."""
    script, repeated = flow.script, list[cst.CSTNode]()
    node: cst.CSTNode = loop.node
    for _ in range(_MOST_CALLS):
        sites = [call.node for call in flow.calls_of(script.scope(node))]
        if any(isinstance(ancestor, AnyLoop) for ancestor in script.up(node)):
            repeated = [node]
        elif not all(_are_alternatives(script, *pair) for pair in combinations(sites, 2)):
            repeated = list(sites)
        if repeated or len(sites) != 1:
            break
        node = sites[0]
    if not repeated:
        return
    lines = ", ".join(dict.fromkeys(str(script.line(node)) for node in repeated))
    raise CannotDerive(
        f"the loop of line {script.line(loop.node)} counts its iterations, and runs more than once "
        f"(line {lines}); pace.updates(n) counts updates from the beginning of the run, so the "
        "second time would make none: write for epoch in pace.epochs(k) around it, and iterate "
        "over a DataLoader, or over numbers = pace.prepare(model, optimizer, range(n))[-1]"
    )


def _are_alternatives(script: SourceTree, first: cst.CSTNode, second: cst.CSTNode) -> bool:
    """Whether two nodes are in different branches of an ``if``."""
    ancestors = [*script.up(second)]
    for ancestor in script.up(first):
        if isinstance(ancestor, cst.If) and ancestor in ancestors:
            in_body = [node in set(script.within(ancestor.body)) for node in (first, second)]
            return in_body[0] != in_body[1]
    return False


def _refuse_carried(training: Stepping) -> None:
    """Raise CannotDerive if an iteration needs what the one before has made."""
    for state in carried(training):
        line = training.flow.script.line
        raise CannotDerive(
            f"line {line(state)} carries {state.value} from one iteration of the loop of line "
            f"{line(training.loop.node)} to the next, which another worker runs; make samples of "
            "the parallel sequences (the columns of a text) and a DataLoader of these, with "
            "prepare(..., sticky=True)"
        )


def _refuse_own_order(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive if an epoch's order is drawn by a generator that differs by worker."""
    script = flow.script
    inside = {part for node in flow.reached([loop.outer[-1]]) for part in script.within(node)}
    for call in script.every_call:
        if not _GENERATORS.search(script.meaning(call.func)) or call.args:
            continue
        names = {name for value, name in script.assigned if value is call}
        if call in inside or any(use in inside for name in names for use in script.uses(name)):
            raise CannotDerive(
                f"line {script.line(call)} creates a generator without a seed, so each worker "
                f"would have its own order in the loop of line {script.line(loop.node)}; seed it, "
                "or draw from the global generators of torch, random or numpy.random"
            )


def _refuse_draws(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive if a loop without a loader draws what all workers would draw alike."""
    script = flow.script
    reached = flow.reached([loop.node.body])
    for node in (part for inner in reached for part in script.within(inner)):
        if isinstance(node, cst.Call) and not _is_new_generator(flow, node):
            refuse_accumulated(flow, node, loop)
            _refuse_next(script, node, script.line(loop.node))
        if isinstance(node, cst.AugAssign):
            _refuse_counted_place(script, node, reached)
        if isinstance(node, cst.Name):
            origins = flow.origins(node) if flow.bindings(node.value, script.module) else []
            for origin in origins:
                name = script.meaning(origin.func) if isinstance(origin, cst.Call) else ""
                if _GENERATORS.search(name):
                    raise CannotDerive(
                        f"line {script.line(origin)} creates a generator that is not seeded again "
                        "for each draw, so all workers would draw the same numbers (line "
                        f"{script.line(node)}); draw from the global generators of torch, random "
                        "or numpy.random"
                    )


def _refuse_counted_place(
    script: SourceTree, grown: cst.AugAssign, reached: list[cst.CSTNode]
) -> None:
    """Raise CannotDerive if a counter says which part of the data comes next."""
    name = script.code(grown.target)
    for node in (part for inner in reached for part in script.within(inner)):
        if isinstance(node, cst.Subscript) and any(
            name in script.inside(element) for element in node.slice
        ):
            raise CannotDerive(
                f"line {script.line(node)} takes its batch by {name}, which each worker would "
                f"count for itself (line {script.line(grown)}), so all would train on the same "
                "batches; make a DataLoader, or take a batch by number: for number in "
                "pace.updates(n)"
            )


def _is_new_generator(flow: Flow, call: cst.Call) -> bool:
    """Whether this is ``next(draws())``: a draw from a new generator of the script's own."""
    arguments = positional(call)
    function = flow.function_of(arguments[0]) if len(arguments) == 1 else None
    if function is None or flow.script.meaning(call.func) != "next":
        return False
    assert isinstance(arguments[0], cst.Call)
    origins = [origin for arg in arguments[0].args for origin in flow.origins(arg.value)]
    if any(isinstance(origin, cst.Call) and flow.function_of(origin) is None for origin in origins):
        return False  # such as an iterator, which would be at another place in each worker
    nodes = list(flow.script.within(function))
    yields = any(isinstance(node, cst.Yield) for node in nodes)
    return yields and not any(isinstance(node, cst.Global | cst.Nonlocal) for node in nodes)


def _refuse_next(script: SourceTree, call: cst.Call, loop_line: int) -> None:
    """Raise CannotDerive if a call takes a batch from an iterator of the worker's own."""
    is_method = isinstance(call.func, cst.Attribute) and "next" in call.func.attr.value
    if not is_method and script.meaning(call.func) != "next":
        return
    arguments = [script.code(argument) for argument in positional(call)]
    values = [value for value, name in script.assigned if name in arguments]
    if any(
        isinstance(value, cst.Call) and script.meaning(value.func) == _CYCLE for value in values
    ):
        raise CannotDerive(
            f"line {script.line(call)} takes batches from itertools.cycle, which keeps those of "
            "its first pass and repeats them, so each worker would repeat its own; write for batch "
            "in pace.updates(n, loader), which begins a new pass each time"
        )
    raise CannotDerive(
        f"line {script.line(call)} takes batches from an iterator that each worker would have for "
        f"itself; write the loop of line {loop_line} over the loader: for batch in loader inside "
        "for epoch in range(n), or with paceline for batch in pace.updates(n, loader)"
    )
