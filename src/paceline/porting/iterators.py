"""A loop that takes its batches by hand: ``batch = next(it)``, where ``it`` is ``iter(loader)``.

    it = iter(loader)
    while True:
        try: batch = next(it)                           the line that takes; what follows is a step
        except StopIteration: it = iter(loader); batch = next(it)

It stays as it is: the iterator of a prepared loader gives what this worker is granted, and its end
is the end of a pass. This module must not know how a tree is edited.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow
from .tree import CannotDerive, positional


class Taken(NamedTuple):
    """Where a loop has its batches from.

    Attributes:
        loader: what ``iter`` is called with.
        line: of the loop's body, in which the last batch of a turn is taken.
        iterations: the calls of ``iter``.
    """

    loader: cst.BaseExpression
    line: cst.CSTNode
    iterations: list[cst.Call]


def taken_by_hand(flow: Flow, loop: AnyLoop) -> Taken | None:
    """The one iterator that a loop takes a batch from in each turn; None: there is none, or it is
    asked where the step cannot follow it.
    """
    script = flow.script
    inside = script.within(loop.body)
    calls = [one for one in inside if isinstance(one, cst.Call) and _is_next(flow, one)]
    lines = {script.block_line(script.statement(one)) for one in calls}
    if len({script.code(positional(one)[0]) for one in calls}) != 1:
        return None
    rows = list(loop.body.body) if isinstance(loop.body, cst.IndentedBlock) else []
    held = [row for row in rows if any(one in lines for one in (row, *script.within(row)))]
    if len(held) != 1 or not isinstance(held[0], cst.Try | cst.SimpleStatementLine):
        return None  # several a turn, or under a condition
    made = flow.origins(positional(calls[0])[0])
    iterations = [
        one
        for one in made
        if isinstance(one, cst.Call) and script.meaning(one.func) == "iter" and positional(one)
    ]
    loaders = {script.code(positional(one)[0]) for one in iterations}
    if len(iterations) != len(made) or len(loaders) != 1:
        return None
    return Taken(positional(iterations[0])[0], held[0], iterations)


def _is_next(flow: Flow, call: cst.Call) -> bool:
    given = positional(call)
    is_name = bool(given) and isinstance(given[0], cst.Name | cst.Attribute)
    return is_name and flow.script.meaning(call.func) == "next"


def row_that_takes(rows: Sequence[cst.BaseStatement]) -> int:
    """The last row of a loop's body in which a batch is taken.

    Raises:
        CannotDerive: there is none, or nothing is done with it.
    """
    code = cst.Module([]).code_for_node
    taking = [number for number, row in enumerate(rows) if re.search(r"\bnext\(", code(row))]
    if not taking or taking[-1] == len(rows) - 1:
        raise CannotDerive
    return taking[-1]
