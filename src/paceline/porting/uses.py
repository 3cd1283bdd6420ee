"""What a turn's number is used for: to say how far training is, or to compute with.

    if it % 100 == 0, print(it), lr = schedule(it)     it says how far training is
    batches[it], total += it                           it is computed with, or kept

A parameter that it becomes is followed into the function. This module must not know how a loop
counts.
"""

import re
from collections.abc import Iterator

import libcst as cst

from .dataflow import Flow, parameters

_SAYS = re.compile(r"print|log|lr|schedul|warmup|save|checkpoint")
_TELLS = re.compile(r"write|set_\w+|scalar|\.update$|info|append|evaluate|format|metric|report")
_RATE = re.compile(r"lr\b|learning_rate|rate|warmup|progress|frac")
_DEPTH = 4


def uses(
    flow: Flow, name: str, node: cst.CSTNode, seen: set[cst.CSTNode] | None = None
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """Where a name is used, and whether that says how far training is."""
    script, seen = flow.script, set() if seen is None else seen
    seen.add(node)
    for one in script.within(node):
        is_name = isinstance(one, cst.Name | cst.Attribute) and script.code(one) == name
        above = script.parents[one] if is_name else None
        if is_name and not (isinstance(above, cst.AugAssign) and above.target is one):
            yield from _judged(flow, one, seen)


def _judged(
    flow: Flow, use: cst.CSTNode, seen: set[cst.CSTNode]
) -> Iterator[tuple[cst.CSTNode, bool]]:
    """A use, or those of the parameter that it becomes: in a condition, a log, a rate it tells."""
    script, below = flow.script, use
    for node in script.up(use):
        if isinstance(node, cst.FormattedString | cst.DictElement | cst.Comparison):
            yield use, True
            return
        if isinstance(node, cst.If | cst.While | cst.IfExp | cst.Assert):
            yield use, below is node.test
            return
        if isinstance(node, cst.Assign | cst.AugAssign):
            target = node.targets[0].target if isinstance(node, cst.Assign) else node.target
            yield use, _RATE.search(script.code(target)) is not None
            return
        if isinstance(node, cst.Call) and isinstance(below, cst.Arg):
            function = flow.function_of(node)
            called = script.code(node.func).lower()
            if _SAYS.search(called) or (function is None and _TELLS.search(called)):
                yield use, True
                return
            taken = None if function is None else _taken_as(node, below, function)
            if function is not None and taken is not None and len(seen) < _DEPTH:
                yield from [(use, True), *uses(flow, taken, function.body, seen)]
                return
        below = node
    yield use, False


def _taken_as(call: cst.Call, given: cst.Arg, function: cst.FunctionDef) -> str | None:
    """The parameter that an argument becomes."""
    if given.keyword is not None:
        return given.keyword.value
    place = list(call.args).index(given)
    names = parameters(function)
    return names[place] if place < len(names) and not given.star else None
