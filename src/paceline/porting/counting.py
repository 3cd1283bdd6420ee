"""Counts the updates of a loop that has no loader, and finds what its turns are numbered by.

    for it in range(n)                       ->  for it in pace.updates(n)
    while it < n, while True ... break       ->  for _ in pace.updates(n)
    while True, for it in count()            ->  for _ in pace.updates()
    what a turn's number is used for         ->  it = pace.version, if it says how far training is
    computed with, kept, several steps       ->  it = pace.turn

If the number of a turn only shows how far training has come, for a learning rate or a log
(uses.py), it becomes the version. If it is computed with, or kept, it becomes the turn: the same
number as in one process for everything that goes into an update, so that each worker of an update
learns by itself what one process learns in that turn. It also becomes the turn if two optimizers,
or two steps of one, make several versions in it. This module must not know how a tree is edited.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import libcst as cst

from .dataflow import AnyLoop, Flow
from .tree import Binding, CannotDerive, SourceTree, positional
from .uses import uses

_DEPTH = 4


class TurnCount(NamedTuple):
    """How a loop counts its turns.

    Attributes:
        total: the number of its updates, as an expression at the loop; empty if it is unknown.
        name: what its body calls the number of a turn; None if nothing uses it.
        first: the number of its first turn, as an expression.
        is_changed: whether the name has another value at the loop's end, which has to be kept.
        counter: the name that the loop counts with.
        place: the expression that replaces the number: ``pace.version`` or ``pace.turn``.
        computes: where the number is computed with, or kept; None if it only shows progress.
        end: the ``if`` at the end of a turn that does nothing but break; None if there is none.
        leaves: where the loop is left, if it ends nowhere else.
    """

    total: str
    name: str | None
    first: str
    is_changed: bool = False
    counter: str = ""
    place: str = "pace.version"
    computes: cst.CSTNode | None = None
    end: cst.If | None = None
    leaves: tuple[cst.CSTNode, ...] = ()


def count_of(flow: Flow, loop: AnyLoop, steps: Sequence[cst.Call]) -> TurnCount:
    """Return how many updates a loop makes, and how it counts them.

    Args:
        steps: the calls that make an update.

    Raises:
        CannotDerive: its end cannot be seen, or the number of a turn decides whether it steps.
    """
    if isinstance(loop, cst.For):
        count = _count_of_for(flow, loop)
    else:
        count = _count_of_while(flow, loop, steps[0])
    if count.name is None:
        return count
    _refuse_turns_without_a_step(flow, count.name, loop, steps)
    all_uses = list(uses(flow, count.name, loop.body))
    computes = next((use for use, is_progress in all_uses if not is_progress), None)
    is_turn = len(steps) > 1 or computes is not None
    return count._replace(
        counter=count.name,
        name=count.name if all_uses else None,
        place="pace.turn" if is_turn else "pace.version",
        computes=computes,
    )


def _refuse_turns_without_a_step(
    flow: Flow, name: str, loop: AnyLoop, steps: Sequence[cst.Call]
) -> None:
    """Raise CannotDerive if only some turns step: ``if it % 4 == 0: optimizer.step()``."""
    script, names, inside = flow.script, {name}, set(flow.script.within(loop.body))
    for _ in range(_DEPTH):  # due = (it + 1) % 4 == 0
        names |= {
            binding.name
            for binding in script.bindings
            if binding.node in inside and names & script.inside(binding.value)
        }
    for call in steps:
        ends = [call, *skips(flow, loop, call)]
        tests = [
            block.test for end in ends for block in script.up(end) if isinstance(block, cst.If)
        ]
        if not any(names & script.inside(test) for test in tests):
            return
    line = script.line(steps[0])
    raise CannotDerive(
        f"line {line} steps in some iterations only, but pace.updates(n) counts updates: make one "
        "iteration of them, with a loop over its batches: for number in pace.updates(n): with "
        "pace.step(): for _ in range(k): ... backward(), then optimizer.step()"
    )


def skips(flow: Flow, loop: AnyLoop, step: cst.Call) -> list[cst.Continue]:
    """Return the ``continue`` statements that a turn may reach before its step."""
    script = flow.script
    calls = (call for call in script.within(loop.body) if isinstance(call, cst.Call))
    reached_nodes = {part for node in flow.reached([loop.body]) for part in script.within(node)}
    if step not in reached_nodes:
        return []
    step_call = next(
        call
        for call in calls
        if call is step or any(step in script.within(node) for node in flow.reached([call]))
    )
    return [
        node
        for node in script.within(loop.body)
        if isinstance(node, cst.Continue)
        and script.order[node] < script.order[step_call]
        and _innermost_loop(script, node) is loop
    ]


def _innermost_loop(script: SourceTree, node: cst.CSTNode) -> AnyLoop:
    """Return the innermost loop around a node, which must have one."""
    return next(block for block in script.up(node) if isinstance(block, cst.For | cst.While))


def _count_of_for(flow: Flow, loop: cst.For) -> TurnCount:
    script, call = flow.script, loop.iter
    while isinstance(call, cst.Call) and script.meaning(call.func).rpartition(".")[2] == "tqdm":
        call = positional(call)[0] if positional(call) else call.func
    name = script.meaning(call.func) if isinstance(call, cst.Call) else ""
    if isinstance(call, cst.Call) and name in ("itertools.count", "count"):
        return _count_of_itertools(script, loop, call)
    target = script.code(loop.target)
    if not isinstance(call, cst.Call) or name.rpartition(".")[2] not in ("range", "trange"):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} iterates over "
            f"{' '.join(script.code(loop.iter).split())}, which is neither a DataLoader nor "
            "range(n); use one of them"
        )
    arguments = [script.code(argument) for argument in positional(call)]
    if len(arguments) > 2 or not isinstance(loop.target, cst.Name):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} does not count by 1; write it over range(n), or "
            "over DataLoader(range(first, last, step), batch_size=...)"
        )
    if len(arguments) == 1:
        return TurnCount(arguments[0], target, "0")
    return TurnCount(_minus(arguments[1], arguments[0]), target, arguments[0])


def _count_of_itertools(script: SourceTree, loop: cst.For, call: cst.Call) -> TurnCount:
    """How ``for it in count(1)`` counts."""
    first = [script.code(argument) for argument in positional(call)] or ["0"]
    if len(call.args) > 1 or len(first) > 1 or not isinstance(loop.target, cst.Name):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} does not count by 1; write for number in "
            "pace.updates()"
        )
    return TurnCount("", loop.target.value, first[0], leaves=_exits(script, loop))


def _exits(script: SourceTree, loop: AnyLoop) -> tuple[cst.CSTNode, ...]:
    """Return the ``break`` and ``return`` statements that leave a loop."""
    scope, exits = script.scope(loop), []
    for node in script.within(loop.body):
        if not isinstance(node, cst.Break | cst.Return) or script.scope(node) is not scope:
            continue
        if isinstance(node, cst.Return) or _innermost_loop(script, node) is loop:
            exits.append(node)
    return tuple(exits)


def _minus(last: str, first: str) -> str:
    """Return ``last - first``, simplified if terms cancel: ``n + 1 - 1``."""
    if first == "0":
        return last
    expression, code = cst.parse_expression(last), cst.Module([]).code_for_node
    if (
        isinstance(expression, cst.BinaryOperation) and isinstance(expression.operator, cst.Add)
        and not expression.lpar and code(expression.right) == first.strip()
    ):  # fmt: skip
        return code(expression.left)
    is_sum = re.search(r"[^\w.()\[\]]", first) is not None
    return f"{_term(last)} - ({first})" if is_sum else f"{_term(last)} - {first}"


def _term(text: str) -> str:
    """Return an expression as a term of a sum: in brackets if it binds less tightly."""
    expression = cst.parse_expression(text)
    bitwise = cst.BitAnd | cst.BitOr | cst.BitXor | cst.LeftShift | cst.RightShift
    loose = cst.IfExp | cst.BooleanOperation | cst.Comparison | cst.NamedExpr | cst.Lambda
    operator = getattr(expression, "operator", None)
    is_loose = isinstance(expression, loose) or isinstance(operator, bitwise | cst.Not)
    return f"({text})" if is_loose and not expression.lpar else text


# -- while -----------------------------------------------------------------------------------------


def _count_of_while(flow: Flow, loop: cst.While, step: cst.CSTNode) -> TurnCount:
    """How a ``while`` counts: by its condition, or by the ``if`` in it that breaks."""
    script = flow.script
    endless = CannotDerive(
        f"the end of the loop of line {script.line(loop)} cannot be read from the script; write "
        "for number in pace.updates(n)"
    )
    limit, break_position, end = _limit(script, loop.test), 0, None
    if script.code(loop.test) not in ("True", "1") and not _is_counted(script, loop, limit):
        raise endless
    order = script.order
    for line in () if limit or not isinstance(loop.body, cst.IndentedBlock) else loop.body.body:
        if isinstance(line, cst.If) and any(
            isinstance(row, cst.Break) for row in _statements(line)
        ):
            break_limit = _limit(script, line.test, is_end=True)
            if _is_counted(script, loop, break_limit):
                limit, break_position = break_limit, order[line]
                is_last = loop.body.body[-1] is line and len(line.body.body) == 1
                end = line if is_last and line.orelse is None else None
                break
    if limit is None:
        return TurnCount("", None, "0", leaves=_exits(script, loop))
    name, sign, last, condition = limit
    increment = next(node for node in script.within(loop.body) if _is_increment(script, node, name))
    is_after_step = break_position > order[step]
    extra = {"<": 0, ">=": 0, "<=": 1, ">": 1, "==": 0}[sign]
    if is_after_step and break_position < order[increment]:
        extra += 1
    first = _first(flow, name, loop)
    total = _minus(f"{_term(last)} + {extra}" if extra else last, first)
    if condition and not (condition == f"{last} is not None" and total == last):
        total = f"{total} if {condition} else None"
    return TurnCount(total, name, first, is_changed=first == name, end=end)


_Limit: TypeAlias = tuple[str, str, str, str]


def _is_counted(script: SourceTree, loop: cst.While, limit: _Limit | None) -> bool:
    """Whether each turn increments the limit's name once, and nothing else assigns to it."""
    if limit is None:
        return False
    name, inside = limit[0], set(script.within(loop))
    increments = [node for node in script.within(loop.body) if _is_increment(script, node, name)]
    targets = {binding.name for binding in script.bindings if binding.node in inside}
    is_one = len(increments) == 1 and name not in targets
    return is_one and script.parents[script.block_line(increments[0])] is loop.body


def _limit(script: SourceTree, test: cst.BaseExpression, *, is_end: bool = False) -> _Limit | None:
    """Return (``it``, ``<``, ``n``, ``""``) of a condition; None if it is no limit.

    The last part is what else must hold for there to be an end: ``n is not None and it >= n``.
    """
    if is_end and isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        right_limit = _limit(script, test.right, is_end=True)
        if right_limit is None or right_limit[0] in script.inside(test.left):
            return None
        if right_limit[2] not in script.inside(test.left):
            return None
        return None if right_limit[3] else (*right_limit[:3], script.code(test.left))
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return None
    comparison = test.comparisons[0]
    sign = script.code(comparison.operator).strip()
    if sign not in ((">", ">=", "==") if is_end else ("<", "<=")):
        return None
    if not isinstance(test.left, cst.Name | cst.Attribute):
        return None
    return script.code(test.left), sign, script.code(comparison.comparator), ""


def _statements(line: cst.If) -> list[cst.CSTNode]:
    """Return the simple statements directly in the body of an ``if``."""
    rows = line.body.body if isinstance(line.body, cst.IndentedBlock) else [line.body]
    simple = cst.SimpleStatementLine | cst.SimpleStatementSuite
    return [statement for row in rows if isinstance(row, simple) for statement in row.body]


def _is_increment(script: SourceTree, node: cst.CSTNode, name: str) -> bool:
    """Whether a node is ``it += 1``."""
    return isinstance(node, cst.AugAssign) and script.code(node).replace(" ", "") == f"{name}+=1"


def _first(flow: Flow, name: str, loop: cst.While) -> str:
    """Return the number of the first turn: a literal if it is always the same, else the name."""
    scope = flow.script.scope(loop)
    bound: list[Binding] = flow.bindings(name, flow.home(name.partition(".")[0], scope))
    values = {flow.script.code(binding.value) for binding in bound}
    if len(values) == 1 and all(value.isdigit() for value in values):
        return values.pop()
    return name
