"""What no lines can carry: named with its line, and what to write instead.

It is looked for before anything is rewritten, so that a script is refused before its first step and
not in it. This module must not know how a script is rewritten.
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

_OWN_WORKERS = re.compile(
    r"(^|\.)(FullyShardedDataParallel|fully_shard|parallelize_module|PipelineParallel|Pipe|"
    r"ScheduleGPipe)$"
)
_GENERATORS = re.compile(r"(default_rng|RandomState|random\.Random|torch\.Generator)$")
_CYCLE = "itertools.cycle"
_MOST_CALLS = 8
"""From where a script begins to a loop, at most."""
_PLACE = re.compile(r"""['"](cuda|xpu|mps):?(\d*)['"]""")


def refuse_anywhere(script: SourceTree) -> None:
    """What cannot be carried wherever it stands.

    Raises:
        CannotDerive: there is such a thing.
    """
    for call in script.every_call:
        name, line = script.meaning(call.func), script.line(call)
        words = {key: script.code(value) for key, value in by_name(call).items()}
        last = name.rpartition(".")[2]
        if last == "SparseAdam" or (last.startswith("Embedding") and words.get("sparse") == "True"):
            raise CannotDerive(
                f"line {line}: sparse gradients cannot be averaged; write sparse=False and a dense "
                "optimizer"
            )
        if _OWN_WORKERS.search(name) and not name.startswith("multiprocessing."):
            raise CannotDerive(
                f"line {line}: {last} spreads one model over several devices, and here each worker "
                "has a whole one; leave it out, or start the script by its own launcher"
            )
        if words.get("device_map", "None") not in ("None", '"cpu"', "'cpu'"):
            raise CannotDerive(
                f"line {line}: device_map spreads one model over several devices, and here each "
                "worker has a whole one; leave it out"
            )
        if re.search(r"(^|\.)(multiprocessing|mp)\.Process$", name):
            raise CannotDerive(
                f"line {line} starts workers of its own, which no protocol could reach; call its "
                "target once, and paceline launch --workers N starts them"
            )
    _refuse_places(script)


def _refuse_places(script: SourceTree) -> None:
    """Raise CannotDerive where parts of a model lie on devices that are named one by one."""
    moved = [
        (call, script.code(positional(call)[0])) for call in script.calls("to") if positional(call)
    ]
    found = {text: call for call, text in moved if (one := _PLACE.fullmatch(text)) and one[2]}
    if len(found) > 1:
        lines = " and ".join(str(script.line(one)) for one in found.values())
        raise CannotDerive(
            f"lines {lines} put parts of a model on several devices, and here each worker has a "
            "whole model on pace.device; put it there as a whole"
        )


def refuse_loop(training: Stepping) -> None:
    """What cannot be carried inside the loop that trains, or in what it goes over.

    Raises:
        CannotDerive: there is such a thing.
    """
    loop, flow = training.loop, training.flow
    if loop.counts_updates:
        _refuse_again(flow, loop)
    if loop.loader is None:
        _refuse_draws(flow, loop)
    if loop.numbers is not None:
        assert isinstance(loop.node, cst.For)
        refuse_indexed(flow, loop.node, loop.outer, [call for call, _ in training.steps])
        _refuse_carried(training)
        _refuse_own_order(flow, loop)


def _refuse_again(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive where a loop that counts its turns is gone through more than once."""
    script, again = flow.script, list[cst.CSTNode]()
    node: cst.CSTNode = loop.node
    for _ in range(_MOST_CALLS):
        sites = [one.node for one in flow.calls_of(script.scope(node))]
        if any(isinstance(one, AnyLoop) for one in script.up(node)):
            again = [node]
        elif not all(_is_one_or_other(script, *pair) for pair in combinations(sites, 2)):
            again = list(sites)
        if again or len(sites) != 1:
            break
        node = sites[0]
    if not again:
        return
    lines = ", ".join(dict.fromkeys(str(script.line(one)) for one in again))
    raise CannotDerive(
        f"the loop of line {script.line(loop.node)} counts its turns, and is gone through more "
        f"than once (line {lines}); pace.updates(n) counts updates from the beginning of the run, "
        "so that a second time would give nothing: write for epoch in pace.epochs(k) around it, "
        "and go over a DataLoader, or over numbers = pace.prepare(model, optimizer, range(n))[-1]"
    )


def _is_one_or_other(script: SourceTree, first: cst.CSTNode, second: cst.CSTNode) -> bool:
    """Whether an ``if`` takes one of them, and else the other."""
    above = [*script.up(second)]
    for one in script.up(first):
        if isinstance(one, cst.If) and one in above:
            held = [node in set(script.within(one.body)) for node in (first, second)]
            return held[0] != held[1]
    return False


def _refuse_carried(training: Stepping) -> None:
    """Raise CannotDerive where a turn needs what the one before has made."""
    for state in carried(training):
        line = training.flow.script.line
        raise CannotDerive(
            f"line {line(state)} carries {state.value} from one turn of the loop of line "
            f"{line(training.loop.node)} to the next, which another worker has; make samples of "
            "what goes on side by side (the columns of a text) and a DataLoader of those, with "
            "prepare(..., sticky=True)"
        )


def _refuse_own_order(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive where an epoch's order is drawn by what differs from worker to worker."""
    script = flow.script
    inside = {one for each in flow.reached([loop.outer[-1]]) for one in script.within(each)}
    for call in script.every_call:
        if not _GENERATORS.search(script.meaning(call.func)) or call.args:
            continue
        names = {name for value, name in script.assigned if value is call}
        if call in inside or any(one in inside for name in names for one in script.uses(name)):
            raise CannotDerive(
                f"line {script.line(call)} makes a generator without a seed, so that each worker "
                f"would go through an order of its own in the loop of line "
                f"{script.line(loop.node)}; give it one, or draw from torch, random or "
                "numpy.random themselves"
            )


def _refuse_draws(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive where a loop without a loader draws what all workers would draw alike."""
    script = flow.script
    reached = flow.reached([loop.node.body])
    for node in (one for inner in reached for one in script.within(inner)):
        if isinstance(node, cst.Call) and not _is_fresh(flow, node):
            refuse_accumulated(flow, node, loop)
            _refuse_next(script, node, script.line(loop.node))
        if isinstance(node, cst.AugAssign):
            _refuse_place(script, node, reached)
        if isinstance(node, cst.Name):
            made = flow.origins(node) if flow.bindings(node.value, script.module) else []
            for one in made:
                name = script.meaning(one.func) if isinstance(one, cst.Call) else ""
                if _GENERATORS.search(name):
                    raise CannotDerive(
                        f"line {script.line(one)} makes a generator of its own, which nobody seeds "
                        f"anew for each draw, so that all workers would draw the same (line "
                        f"{script.line(node)}); draw from torch, random or numpy.random themselves"
                    )


def _refuse_place(script: SourceTree, grown: cst.AugAssign, reached: list[cst.CSTNode]) -> None:
    """Raise CannotDerive where what is counted up says which part of the data comes next."""
    name = script.code(grown.target)
    for node in (one for inner in reached for one in script.within(inner)):
        if isinstance(node, cst.Subscript) and any(
            name in script.inside(one) for one in node.slice
        ):
            raise CannotDerive(
                f"line {script.line(node)} takes its batch by {name}, which each worker would "
                f"count for itself (line {script.line(grown)}), so that all would learn the same; "
                "make a DataLoader of it, or take it by number: for number in pace.updates(n)"
            )


def _is_fresh(flow: Flow, call: cst.Call) -> bool:
    """``next(draws())``: a generator of the script's own that begins anew is a draw like any."""
    given = positional(call)
    function = flow.function_of(given[0]) if len(given) == 1 else None
    if function is None or flow.script.meaning(call.func) != "next":
        return False
    assert isinstance(given[0], cst.Call)
    handed = [one for arg in given[0].args for one in flow.origins(arg.value)]
    if any(isinstance(one, cst.Call) and flow.function_of(one) is None for one in handed):
        return False  # an iterator for one, which would stand elsewhere in each worker
    held = list(flow.script.within(function))
    yields = any(isinstance(one, cst.Yield) for one in held)
    return yields and not any(isinstance(one, cst.Global | cst.Nonlocal) for one in held)


def _refuse_next(script: SourceTree, call: cst.Call, loop_line: int) -> None:
    is_method = isinstance(call.func, cst.Attribute) and "next" in call.func.attr.value
    if not is_method and script.meaning(call.func) != "next":
        return
    given = [script.code(one) for one in positional(call)]
    made = [value for value, name in script.assigned if name in given]
    if any(isinstance(one, cst.Call) and script.meaning(one.func) == _CYCLE for one in made):
        raise CannotDerive(
            f"line {script.line(call)} takes batches from itertools.cycle, which keeps those of "
            "its first pass and gives the same again, in each worker those that it was given; "
            "write for batch in pace.updates(n, loader), which begins a new pass each time"
        )
    raise CannotDerive(
        f"line {script.line(call)} takes batches from an iterator that each worker would have for "
        f"itself; write the loop of line {loop_line} over the loader: for batch in loader inside "
        "of for epoch in range(n), or with paceline for batch in pace.updates(n, loader)"
    )
