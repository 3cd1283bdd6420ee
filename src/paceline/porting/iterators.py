"""Finds the loader of a loop that does not go over the loader itself.

    it = iter(loader)
    while True:
        try: batch = next(it)                           the line that takes; the step follows it
        except StopIteration: it = iter(loader); batch = next(it)

    it = cycle(loader)       batch = next(it)           an endless generator of the script
    b = Batches(data)        batch = b.next()           a class of the script that does both

    b = Batches(loader)      for batch in b:            one with __iter__: prepare takes b.loader

If the number of turns can be read, they become `pace.updates` (endless.py). Otherwise the first
form stays as it is: the iterator of a prepared loader gives what this worker is granted, and its
end is the end of a pass. This module must not know how a tree is edited.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow, parameters
from .tree import CannotDerive, positional

_PASSES_ON = ("enumerate", "iter", "tqdm")


class Taken(NamedTuple):
    """How a loop takes its batches by hand.

    Attributes:
        loader: what ``iter`` is called with.
        line: the line of the loop's body in which the last batch of a turn is taken.
        iterations: the calls of ``iter``, or of the generator, or of the class.
        call: the first call of a turn that takes a batch.
        owner: the object whose method takes it; None if ``next`` does.
        is_endless: whether a new pass begins when one ends.
    """

    loader: cst.BaseExpression
    line: cst.CSTNode
    iterations: list[cst.Call]
    call: cst.Call
    owner: cst.BaseExpression | None = None
    is_endless: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether batches are taken by ``next`` from the loader's own iterator."""
        return self.owner is None and all(
            isinstance(call.func, cst.Name) and call.func.value == "iter"
            for call in self.iterations
        )


def taken_by_hand(flow: Flow, loop: AnyLoop) -> Taken | None:
    """Return how a loop takes a batch from its one iterator in each turn.

    None if it has no such iterator, or takes batches in a place that no step can follow.
    """
    script = flow.script
    inside = list(script.within(loop.body))
    calls = [node for node in inside if isinstance(node, cst.Call) and _is_next(flow, node)]
    method_calls = [
        node for node in inside if isinstance(node, cst.Call) and method_that_takes(flow, node)
    ]
    sources = {script.code(positional(call)[0]) for call in calls}
    if len(method_calls) == 1 and not calls:
        return _by_method(flow, loop, method_calls[0])
    if len(sources) != 1 or method_calls:
        return None
    line = _line_of(flow, loop, calls)
    origins = flow.origins(positional(calls[0])[0])
    pairs = [
        (origin, _goes_over(flow, origin)) for origin in origins if isinstance(origin, cst.Call)
    ]
    loaders = {script.code(loader) for _, loader in pairs if loader is not None}
    if (
        line is None
        or len(pairs) != len(origins)
        or len(loaders) != 1
        or any(loader is None for _, loader in pairs)
    ):
        return None
    iterations, loader = [call for call, _ in pairs], pairs[0][1]
    assert loader is not None
    is_own = any(script.meaning(call.func) != "iter" for call in iterations)
    if is_own and len(iterations) > 1:
        return None
    is_endless = is_own or _begins_anew(flow, line)
    return Taken(loader, line, iterations, calls[0], None, is_endless)


def _line_of(flow: Flow, loop: AnyLoop, calls: list[cst.Call]) -> cst.CSTNode | None:
    """Return the only line of the loop's body that holds the calls; None if it is conditional."""
    script = flow.script
    lines = {script.block_line(script.statement(call)) for call in calls}
    rows = list(loop.body.body) if isinstance(loop.body, cst.IndentedBlock) else []
    taking_rows = [row for row in rows if any(node in lines for node in (row, *script.within(row)))]
    if len(taking_rows) != 1 or not isinstance(taking_rows[0], cst.Try | cst.SimpleStatementLine):
        return None  # several in a turn, or under a condition
    return taking_rows[0]


def _goes_over(flow: Flow, call: cst.Call) -> cst.BaseExpression | None:
    """Return the loader of ``iter(loader)``, or of a script's own ``cycle(loader)``."""
    if not positional(call):
        return None
    if flow.script.meaning(call.func) == "iter" or _is_cycle(flow, call):
        return positional(call)[0]
    return None


def _is_cycle(flow: Flow, call: cst.Call) -> bool:
    """Whether this calls ``def cycle(loader): while True: for batch in loader: yield batch``."""
    function = flow.function_of(call)
    if function is None or len(call.args) != 1 or len(parameters(function)) != 1:
        return False
    rows = _without_docstring(function)
    forever = rows[0] if len(rows) == 1 else None
    if not isinstance(forever, cst.While) or flow.script.code(forever.test) not in ("True", "1"):
        return False
    text = "; ".join(" ".join(flow.script.code(row).split()) for row in forever.body.body)
    name = re.escape(parameters(function)[0])
    return re.fullmatch(rf"for (\w+) in {name}: yield \1|yield from {name}", text) is not None


def _without_docstring(function: cst.FunctionDef) -> list[cst.CSTNode]:
    """Return the rows of a function's body after its docstring."""
    rows: list[cst.CSTNode] = list(function.body.body)
    if rows and isinstance(rows[0], cst.SimpleStatementLine) and len(rows[0].body) == 1:
        first = rows[0].body[0]
        if isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
            return rows[1:]
    return rows


def _begins_anew(flow: Flow, line: cst.CSTNode) -> bool:
    """Whether a line takes a batch and begins a new pass at the end of one.

    ``try: batch = next(it)``, then ``except StopIteration: it = iter(loader); batch = next(it)``.
    """
    if not isinstance(line, cst.Try) or len(line.handlers) != 1 or line.orelse or line.finalbody:
        return False
    script, handler = flow.script, line.handlers[0]
    if handler.type is None or script.code(handler.type) != "StopIteration":
        return False
    first = [script.code(statement).strip() for statement in line.body.body]
    restart = [script.code(statement).strip() for statement in handler.body.body]
    is_alike = len(first) == 1 and len(restart) == 2 and first[0] == restart[1]
    return is_alike and re.fullmatch(r"[\w.]+ = iter\([\w.]+\)", restart[0]) is not None


# -- a class that does it --------------------------------------------------------------------------


class Method(NamedTuple):
    """A method that returns the next batch of an endless loader.

    Attributes:
        node: the method.
        loader: the loader, as the class calls it.
        first: the line that makes the first iterator.
    """

    node: cst.FunctionDef
    loader: cst.Attribute
    first: cst.CSTNode


def method_that_takes(flow: Flow, call: cst.Call) -> Method | None:
    """Return the method of the script's own class that is called here, if it takes a batch."""
    script = flow.script
    if not isinstance(call.func, cst.Attribute) or call.args:
        return None
    makers = [origin for origin in flow.origins(call.func.value) if isinstance(origin, cst.Call)]
    names = [script.meaning(call.func) for call in makers]
    owner = flow.classes.get(names[0]) if len(names) == 1 else None
    if owner is None:
        return None
    name = call.func.attr.value
    methods = [statement for statement in owner.body.body if isinstance(statement, cst.FunctionDef)]
    node = next((method for method in methods if method.name.value == name), None)
    rows = [] if node is None else _without_docstring(node)
    if node is None or len(rows) != 2 or not _begins_anew(flow, rows[0]):
        return None
    target = script.code(rows[0].body.body[0]).partition("=")[0].strip()  # type: ignore[attr-defined]  # _begins_anew: a loop with a body
    if script.code(rows[1]).strip() != f"return {target}":
        return None
    takes = [
        part for part in script.within(node) if isinstance(part, cst.Call) and _is_next(flow, part)
    ]
    iterator = script.code(positional(takes[0])[0])
    inside, of_class = set(script.within(node)), set(script.within(owner))
    firsts = [
        binding
        for binding in script.bindings
        if binding.name == iterator and binding.node in of_class and binding.node not in inside
    ]
    value = firsts[0].value if len(firsts) == 1 else None
    if not isinstance(value, cst.Call) or script.meaning(value.func) != "iter":
        return None
    loader = positional(value)[0] if positional(value) else None
    if not isinstance(loader, cst.Attribute) or script.code(loader.value) != "self":
        return None
    return Method(node, loader, firsts[0].node)


def _by_method(flow: Flow, loop: AnyLoop, call: cst.Call) -> Taken | None:
    """Return how a loop takes batches by a method of an object that serves nothing else."""
    method, line = method_that_takes(flow, call), _line_of(flow, loop, [call])
    assert method is not None
    assert isinstance(call.func, cst.Attribute)
    script, owner = flow.script, call.func.value
    makers = [origin for origin in flow.origins(owner) if isinstance(origin, cst.Call)]
    is_only = len(script.calls(script.meaning(makers[0].func))) == 1
    is_used = isinstance(owner, cst.Name) and len(script.uses(owner.value)) == 2
    if line is None or not is_only or not is_used:
        return None
    return Taken(method.loader, line, makers, call, owner, True)


def _is_next(flow: Flow, call: cst.Call) -> bool:
    arguments = positional(call)
    is_name = bool(arguments) and isinstance(arguments[0], cst.Name | cst.Attribute)
    return is_name and flow.script.meaning(call.func) == "next"


def row_that_takes(rows: Sequence[cst.BaseStatement]) -> int:
    """Return the index of the last row of a loop's body in which a batch is taken.

    Raises:
        CannotDerive: there is no such row, or none follows it.
    """
    code = cst.Module([]).code_for_node
    taking = [index for index, row in enumerate(rows) if re.search(r"\bnext\(", code(row))]
    if not taking or taking[-1] == len(rows) - 1:
        raise CannotDerive
    return taking[-1]


def inner_loader(flow: Flow, loader: cst.BaseExpression) -> str:
    """Return the attribute that holds the loader: ``dl``; empty if ``loader`` is one itself.

    Raises:
        CannotDerive: only a branch makes such an object, or it iterates over something else.
    """
    script = flow.script
    for origin in flow.origins(loader):
        definition = None
        if isinstance(origin, cst.Call):
            definition = flow.classes.get(script.code(origin.func))
        if definition is None or _has_base(definition):
            continue
        name, line = definition.name.value, script.line(origin)
        attribute = _iterated(flow, definition)
        if attribute and not any(isinstance(above, cst.If) for above in script.up(origin)):
            return attribute
        raise CannotDerive(
            f"line {line}: prepare() takes a DataLoader, and not the {name} over which the loop "
            f"iterates; write the loop over the DataLoader, and what {name} does with a batch "
            "into the loop or into collate_fn"
        )
    return ""


def _has_base(definition: cst.ClassDef) -> bool:
    """Whether a class is derived from another, whose ``__iter__`` it may have."""
    return any(
        not (isinstance(base.value, cst.Name) and base.value.value == "object")
        for base in definition.bases
    )


def _iterated(flow: Flow, definition: cst.ClassDef) -> str:
    """Return the attribute that ``__iter__`` goes over; empty if it goes over no attribute."""
    script = flow.script
    for node in script.within(definition):
        if not isinstance(node, cst.For):
            continue
        scope = script.scope(node)
        iterated = node.iter
        while isinstance(iterated, cst.Call) and script.meaning(iterated.func) in _PASSES_ON:
            iterated = iterated.args[0].value
        is_iter = isinstance(scope, cst.FunctionDef) and scope.name.value == "__iter__"
        is_own = isinstance(iterated, cst.Attribute) and script.code(iterated.value) == "self"
        if is_iter and is_own:
            assert isinstance(iterated, cst.Attribute)
            return iterated.attr.value
    return ""
