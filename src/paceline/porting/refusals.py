"""What no lines can carry: named with its line, and what to write instead.

It is looked for before anything is rewritten, so that a script is refused before its first step and
not in it. This module must not know how a script is rewritten.
"""

import re

import libcst as cst

from .dataflow import Flow
from .loops import Loop, Stepping
from .tree import CannotDerive, SourceTree, by_name, positional

_OWN_WORKERS = re.compile(
    r"(^|\.)(FullyShardedDataParallel|fully_shard|parallelize_module|PipelineParallel|Pipe|"
    r"ScheduleGPipe)$"
)
_GENERATORS = re.compile(r"(default_rng|RandomState|random\.Random|torch\.Generator)$")
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
        if _OWN_WORKERS.search(name):
            raise CannotDerive(
                f"line {line}: {last} spreads one model over several devices, and here each worker "
                "has a whole one; leave it out, or start the script by its own launcher"
            )
        if "device_map" in words:
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
    if training.loop.loader is None:
        _refuse_draws(training.flow, training.loop)


def _refuse_draws(flow: Flow, loop: Loop) -> None:
    """Raise CannotDerive where a loop without a loader draws what all workers would draw alike."""
    script = flow.script
    reached = flow.reached([loop.node.body])
    for node in (one for inner in reached for one in script.within(inner)):
        if isinstance(node, cst.Call):
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


def _refuse_next(script: SourceTree, call: cst.Call, loop_line: int) -> None:
    is_method = isinstance(call.func, cst.Attribute) and "next" in call.func.attr.value
    if not is_method and script.meaning(call.func) != "next":
        return
    raise CannotDerive(
        f"line {script.line(call)} takes batches from an iterator that each worker would have for "
        f"itself; write the loop of line {loop_line} over the loader: for batch in loader inside "
        "of for epoch in range(n), or with paceline for batch in pace.updates(n, loader)"
    )
