"""A loop that takes its batches by hand, one a turn: where it has them from.

    it = iter(loader)
    while True:
        try: batch = next(it)                           the line that takes; what follows is a step
        except StopIteration: it = iter(loader); batch = next(it)

    it = cycle(loader)       batch = next(it)           a generator of the script's own, without end
    b = Batches(data)        batch = b.next()           a class of the script's own that does both

Where the number of turns can be read they are `pace.updates` (endless.py). Else the first form
stays as it is: the iterator of a prepared loader gives what this worker is granted, and its end is
the end of a pass. This module must not know how a tree is edited.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow, parameters
from .tree import CannotDerive, positional


class Taken(NamedTuple):
    """Where a loop has its batches from.

    Attributes:
        loader: what ``iter`` is called with.
        line: of the loop's body, in which the last batch of a turn is taken.
        iterations: the calls of ``iter``, or of the generator, or of the class.
        call: what takes a batch, the first one of a turn.
        owner: the object that takes it by a method; None: ``next`` does.
        is_endless: whether a new pass begins where one ends.
    """

    loader: cst.BaseExpression
    line: cst.CSTNode
    iterations: list[cst.Call]
    call: cst.Call
    owner: cst.BaseExpression | None = None
    is_endless: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is ``next`` of the loader's own iterator."""
        return self.owner is None and all(
            isinstance(one.func, cst.Name) and one.func.value == "iter" for one in self.iterations
        )


def taken_by_hand(flow: Flow, loop: AnyLoop) -> Taken | None:
    """The one iterator that a loop takes a batch from in each turn; None: there is none, or it is
    asked where the step cannot follow it.
    """
    script = flow.script
    inside = list(script.within(loop.body))
    calls = [one for one in inside if isinstance(one, cst.Call) and _is_next(flow, one)]
    found = [one for one in inside if isinstance(one, cst.Call) and method_that_takes(flow, one)]
    sources = {script.code(positional(one)[0]) for one in calls}
    if len(found) == 1 and not calls:
        return _by_method(flow, loop, found[0])
    if len(sources) != 1 or found:
        return None
    line = _line_of(flow, loop, calls)
    made = flow.origins(positional(calls[0])[0])
    pairs = [(one, _goes_over(flow, one)) for one in made if isinstance(one, cst.Call)]
    loaders = {script.code(loader) for _, loader in pairs if loader is not None}
    if (
        line is None
        or len(pairs) != len(made)
        or len(loaders) != 1
        or any(loader is None for _, loader in pairs)
    ):
        return None
    iterations, loader = [one for one, _ in pairs], pairs[0][1]
    assert loader is not None
    is_own = any(script.meaning(one.func) != "iter" for one in iterations)
    if is_own and len(iterations) > 1:
        return None
    is_endless = is_own or _begins_anew(flow, line)
    return Taken(loader, line, iterations, calls[0], None, is_endless)


def _line_of(flow: Flow, loop: AnyLoop, calls: list[cst.Call]) -> cst.CSTNode | None:
    """The only line of the loop's body in which they stand, and in any case."""
    script = flow.script
    lines = {script.block_line(script.statement(one)) for one in calls}
    rows = list(loop.body.body) if isinstance(loop.body, cst.IndentedBlock) else []
    held = [row for row in rows if any(one in lines for one in (row, *script.within(row)))]
    if len(held) != 1 or not isinstance(held[0], cst.Try | cst.SimpleStatementLine):
        return None  # several a turn, or under a condition
    return held[0]


def _goes_over(flow: Flow, call: cst.Call) -> cst.BaseExpression | None:
    """The loader of ``iter(loader)``, and of ``cycle(loader)`` where that is the script's own."""
    if not positional(call):
        return None
    if flow.script.meaning(call.func) == "iter" or _is_cycle(flow, call):
        return positional(call)[0]
    return None


def _is_cycle(flow: Flow, call: cst.Call) -> bool:
    """``def cycle(loader): while True: for batch in loader: yield batch``"""
    function = flow.function_of(call)
    if function is None or len(call.args) != 1 or len(parameters(function)) != 1:
        return False
    rows = _without_docstring(function)
    forever = rows[0] if len(rows) == 1 else None
    if not isinstance(forever, cst.While) or flow.script.code(forever.test) not in ("True", "1"):
        return False
    text = "; ".join(" ".join(flow.script.code(one).split()) for one in forever.body.body)
    name = re.escape(parameters(function)[0])
    return re.fullmatch(rf"for (\w+) in {name}: yield \1|yield from {name}", text) is not None


def _without_docstring(function: cst.FunctionDef) -> list[cst.CSTNode]:
    """The rows of its body."""
    rows: list[cst.CSTNode] = list(function.body.body)
    if rows and isinstance(rows[0], cst.SimpleStatementLine) and len(rows[0].body) == 1:
        first = rows[0].body[0]
        if isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
            return rows[1:]
    return rows


def _begins_anew(flow: Flow, line: cst.CSTNode) -> bool:
    """``try: batch = next(it)``, and at its end another iterator, and ``batch = next(it)``"""
    if not isinstance(line, cst.Try) or len(line.handlers) != 1 or line.orelse or line.finalbody:
        return False
    script, handler = flow.script, line.handlers[0]
    if handler.type is None or script.code(handler.type) != "StopIteration":
        return False
    first = [script.code(one).strip() for one in line.body.body]
    then = [script.code(one).strip() for one in handler.body.body]
    is_alike = len(first) == 1 and len(then) == 2 and first[0] == then[1]
    return is_alike and re.fullmatch(r"[\w.]+ = iter\([\w.]+\)", then[0]) is not None


# -- a class that does it --------------------------------------------------------------------------


class Method(NamedTuple):
    """A method that gives the next batch of a loader without end.

    Attributes:
        node: the method.
        loader: the loader, as the class calls it.
        first: the line that makes the first iterator.
    """

    node: cst.FunctionDef
    loader: cst.Attribute
    first: cst.CSTNode


def method_that_takes(flow: Flow, call: cst.Call) -> Method | None:
    """The method of a class of the script's own that is called here, where it takes a batch."""
    script = flow.script
    if not isinstance(call.func, cst.Attribute) or call.args:
        return None
    made = [one for one in flow.origins(call.func.value) if isinstance(one, cst.Call)]
    names = [script.meaning(one.func) for one in made]
    owner = flow.classes.get(names[0]) if len(names) == 1 else None
    if owner is None:
        return None
    name = call.func.attr.value
    methods = [one for one in owner.body.body if isinstance(one, cst.FunctionDef)]
    node = next((one for one in methods if one.name.value == name), None)
    rows = [] if node is None else _without_docstring(node)
    if node is None or len(rows) != 2 or not _begins_anew(flow, rows[0]):
        return None
    given = script.code(rows[0].body.body[0]).partition("=")[0].strip()  # type: ignore[attr-defined]  # _begins_anew: a loop with a body
    if script.code(rows[1]).strip() != f"return {given}":
        return None
    takes = [
        one for one in script.within(node) if isinstance(one, cst.Call) and _is_next(flow, one)
    ]
    iterator = script.code(positional(takes[0])[0])
    inside, held = set(script.within(node)), set(script.within(owner))
    firsts = [
        one
        for one in script.bindings
        if one.name == iterator and one.node in held and one.node not in inside
    ]
    value = firsts[0].value if len(firsts) == 1 else None
    if not isinstance(value, cst.Call) or script.meaning(value.func) != "iter":
        return None
    loader = positional(value)[0] if positional(value) else None
    if not isinstance(loader, cst.Attribute) or script.code(loader.value) != "self":
        return None
    return Method(node, loader, firsts[0].node)


def _by_method(flow: Flow, loop: AnyLoop, call: cst.Call) -> Taken | None:
    """A loop that takes its batches so, from an object that is there for nothing else."""
    method, line = method_that_takes(flow, call), _line_of(flow, loop, [call])
    assert method is not None
    assert isinstance(call.func, cst.Attribute)
    script, owner = flow.script, call.func.value
    made = [one for one in flow.origins(owner) if isinstance(one, cst.Call)]
    is_only = len(script.calls(script.meaning(made[0].func))) == 1
    is_used = isinstance(owner, cst.Name) and len(script.uses(owner.value)) == 2
    if line is None or not is_only or not is_used:
        return None
    return Taken(method.loader, line, made, call, owner, True)


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
