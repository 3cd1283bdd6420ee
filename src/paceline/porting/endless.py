"""A loop that counts its turns and takes a batch of an endless loader in each of them.

    it = iter(loader)                            for batch in pace.updates(n, loader):
    for i in range(n):                               i = pace.version
        try: batch = next(it)             ->         with pace.step():
        except StopIteration: ...                        ...
        ...

The passes over the loader must begin where they did before, so that its sampler draws the same
numbers. So nothing may draw random numbers between the iterator and the loop, or in a turn before
its batch. Loops that take several batches in a turn are refused with lines that do the same. This
module must not know how a tree is edited.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from .counting import TurnCount, count_of
from .dataflow import Flow
from .iterators import Taken, method_that_takes
from .loops import Loop
from .tree import CannotDerive, SourceTree, positional

_QUIET = {
    "train", "eval", "time", "perf_counter", "monotonic", "zero_grad", "print", "len", "format",
    "item", "float", "int", "synchronize", "dict", "list", "now",
}  # fmt: skip
"""Functions that draw no random numbers."""


class Endless(NamedTuple):
    """How such a loop becomes one over `pace.updates`.

    Attributes:
        counted: how it counts its turns.
        loader: what the loop's function calls the loader.
        target: what it calls a batch.
        gone: lines that are not needed any more.
        batch: the call that takes a batch, if its line stays and the call is replaced by the
            batch's name; None if its line is removed.
        source: the call that makes the iterator, if it is replaced by its loader; else None.
    """

    counted: TurnCount
    loader: str
    target: str
    gone: list[cst.CSTNode]
    batch: cst.Call | None = None
    source: cst.Call | None = None


def endless(flow: Flow, loop: Loop, steps: Sequence[cst.Call]) -> Endless | None:
    """Return how a loop becomes one over `pace.updates`; None if it stays as it is.

    Raises:
        CannotDerive: it can neither be changed nor stay.
    """
    taken = loop.taken
    if taken is None:
        return None
    try:
        return _to_updates(flow, loop, taken, steps) if taken.is_endless else None
    except CannotDerive as why:
        if taken.is_plain:
            return None
        reason = f" ({why.why})" if why.why else ""
        raise CannotDerive(
            f"line {flow.script.line(taken.call)} takes a batch of an endless loader, and the loop "
            f"cannot be changed without changing results{reason}; write for batch in "
            "pace.updates(n, loader)"
        ) from None


def _to_updates(flow: Flow, loop: Loop, taken: Taken, steps: Sequence[cst.Call]) -> Endless:
    script, node = flow.script, loop.node
    if loop.outer:
        raise CannotDerive("it is taken in a loop inside another one")
    rows = list(node.body.body)
    _check_quiet(script, rows[: rows.index(taken.line)])
    count = count_of(flow, node, steps)
    if count.place != "pace.version" and count.name is not None:
        raise CannotDerive(f"the loop computes with {count.name}, the number of an iteration")
    target, batch, removed = _target(script, taken)
    if taken.owner is not None:
        method = method_that_takes(flow, taken.call)
        assert method is not None
        _check_between(script, script.statement(taken.iterations[0]), node)
        loader = f"{script.code(taken.owner)}.{method.loader.attr.value}"
        return Endless(count, loader, target, [*removed, method.first, method.node], batch)
    first = min(taken.iterations, key=script.order.__getitem__)
    line = script.statement(first)
    _check_between(script, line, node, is_lazy=not taken.is_plain)
    _check_only(flow, taken)
    loader_node = positional(first)[0]
    if isinstance(loader_node, cst.Name | cst.Attribute):
        return Endless(count, script.code(loader_node), target, [*removed, line], batch)
    assert isinstance(line, cst.Assign)
    name = script.code(line.targets[0].target)
    return Endless(count, name, target, removed, batch, first)


def _target(script: SourceTree, taken: Taken) -> tuple[str, cst.Call | None, list[cst.CSTNode]]:
    """Return a batch's name, the call that the name replaces if any, and the lines to remove."""
    line = taken.line
    if isinstance(line, cst.Try):
        line = line.body.body[0]
    statement = script.statement(taken.call)
    is_whole = isinstance(statement, cst.Assign) and statement.value is taken.call
    if is_whole and isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        removed = taken.line if isinstance(taken.line, cst.Try) else statement
        return script.code(statement.targets[0].target), None, [removed]
    free_names = [name for name in ("batch", "next_batch") if not script.uses(name)]
    if isinstance(taken.line, cst.Try) or not free_names:
        raise CannotDerive("there is no name for a batch")
    return free_names[0], taken.call, []


def _check_between(
    script: SourceTree, line: cst.CSTNode, loop: cst.CSTNode, *, is_lazy: bool = False
) -> None:
    """Raise CannotDerive unless a line is before the loop, and nothing in between draws.

    Args:
        is_lazy: whether the line makes a generator, which begins only with its first batch.
    """
    row = script.block_line(line)
    block = script.parents[row]
    if script.parents[loop] is not block or not isinstance(block, cst.Module | cst.IndentedBlock):
        raise CannotDerive(f"line {script.line(line)} is elsewhere")
    rows = list(block.body)
    first, last = rows.index(row), rows.index(loop)  # type: ignore[arg-type]  # both are lines of this block
    if first > last:
        raise CannotDerive
    if not is_lazy:
        _check_quiet(script, rows[first + 1 : last])


def _check_quiet(script: SourceTree, rows: Sequence[cst.CSTNode]) -> None:
    """Raise CannotDerive if something may draw random numbers."""
    for call in _calls(script, rows):
        name = script.code(call.func).rpartition(".")[2]
        if name not in _QUIET:
            raise CannotDerive(f"line {script.line(call)} may draw random numbers before it")


def _calls(script: SourceTree, rows: Sequence[cst.CSTNode]) -> Iterator[cst.Call]:
    return (node for row in rows for node in script.within(row) if isinstance(node, cst.Call))


def _check_only(flow: Flow, taken: Taken) -> None:
    """Raise CannotDerive if the iterator is used elsewhere, too."""
    script, name = flow.script, script_name(flow, taken)
    inside = set(script.within(taken.line))
    makers = {script.statement(call) for call in taken.iterations}
    for node in script.nodes:
        is_iterator = isinstance(node, cst.Name | cst.Attribute) and script.code(node) == name
        if is_iterator and node not in inside and script.statement(node) not in makers:
            raise CannotDerive(f"line {script.line(node)} also uses {name}")


def script_name(flow: Flow, taken: Taken) -> str:
    """Return what the iterator is called."""
    return flow.script.code(positional(taken.call)[0])


# -- several batches in a turn ---------------------------------------------------------------------

_ACCUMULATED = """\
line {line} takes the batches of one step by {call} in the loop of line {inner}: {count} in a row \
may be the end of one pass and the beginning of the next, but an update belongs to one pass. Write \
a loop that steps on each batch, of which {count} make an update; the last update of a pass has \
the batches that are left:

    {made}..., {loader} = pace.prepare(..., {loader}, accumulate={count})
    for batch in pace.updates({turns}, {loader}):
        with pace.step():
            loss = ...  # of this batch alone
            {backward}
            pace.clip_grad_norm_(...)  # if it clips: what {count} batches come to
            optimizer.step()
            optimizer.zero_grad()

pace.version is the number of updates so far, the same for the {count} batches of one"""
_OF_A_MEAN = "loss.backward()  # not divided by {count}: the update is of the mean"
_OF_A_SUM = "({count} * loss).backward()  # the update is of the mean, and the loop adds up"


def refuse_accumulated(flow: Flow, call: cst.Call, loop: Loop) -> None:
    """Raise CannotDerive if an inner loop takes several batches for one step.

    it = cycle(loader)
    for i in range(n):
        for _ in range(k): (loss_of(next(it)) / k).backward()
        optimizer.step()
    """
    script, arguments = flow.script, positional(call)
    if script.meaning(call.func) != "next" or not arguments or not isinstance(loop.node, cst.For):
        return
    inner = _counting_loop(script, call, loop)
    makers = [origin for origin in flow.origins(arguments[0]) if isinstance(origin, cst.Call)]
    loaders = {
        script.code(maker_arguments[0])
        for maker in makers
        if len(maker_arguments := positional(maker)) == 1
    }
    if inner is None or len(loaders) != 1:
        return
    code, count = loaders.pop(), _count(script, inner.iter)
    loader = code if code.isidentifier() else "loader"
    backward = _OF_A_MEAN if _divides(script, inner, count) else _OF_A_SUM
    raise CannotDerive(
        _ACCUMULATED.format(
            line=script.line(call),
            inner=script.line(inner),
            call=" ".join(script.code(call).split()),
            count=count,
            turns=_count(script, loop.node.iter) or "n",
            loader=loader,
            made="" if loader == code else f"loader = {' '.join(code.split())}\n    ",
            backward=backward.format(count=count),
        )
    )


def _divides(script: SourceTree, loop: cst.For, count: str) -> bool:
    """Whether something in a loop is divided by ``count``."""
    return any(
        isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, cst.Divide)
        and script.code(node.right).strip("() ") == count
        for node in script.within(loop.body)
    ) or any(
        isinstance(node, cst.AugAssign)
        and isinstance(node.operator, cst.DivideAssign)
        and script.code(node.value).strip("() ") == count
        for node in script.within(loop.body)
    )


def _counting_loop(script: SourceTree, call: cst.Call, loop: Loop) -> cst.For | None:
    """Return the loop over ``range(k)`` inside ``loop`` that a call is in, or None."""
    counting, node = None, script.parents[call]
    while node is not loop.node:
        if isinstance(node, cst.For) and _count(script, node.iter):
            counting = node
        node = script.parents[node]
        if node is script.module:
            return None
    return counting


def _count(script: SourceTree, over: cst.BaseExpression) -> str:
    """Return the k of ``range(k)``, which a progress bar may wrap; empty for anything else."""
    while isinstance(over, cst.Call) and positional(over):
        arguments = positional(over)
        if script.meaning(over.func) == "range":
            return script.code(arguments[0]) if len(arguments) == 1 else ""
        over = arguments[0]
    return ""
