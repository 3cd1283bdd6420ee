"""A loop that takes its batches from no loader: from so many turns to so many updates.

    for it in range(n)                       ->  for it in pace.updates(n)
    while it < n, while True ... break       ->  for _ in pace.updates(n)
    while True, for it in count()            ->  for _ in pace.updates()
    what a turn's number is used for         ->  it = pace.version, if it says how far training is
    computed with, kept, several steps       ->  it = pace.turn

The number of a turn says how far training is, for a learning rate or a log (uses.py): then it is
the version. Where it is computed with, or kept, it is the turn, the same number as in one process
for all that goes into an update: the workers of an update then learn what one process does in that
turn, each by itself. Where two optimizers or two steps of one make a turn several versions it is
the turn, too. This module must not know how a tree is edited.
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
    """How a loop counts.

    Attributes:
        total: how many updates it makes, as an expression at its place; empty: nobody knows.
        name: what its body calls the number of a turn; None: nothing asks.
        first: the number of its first turn, as an expression.
        is_changed: whether that name is another at the loop's end, so that it is to be kept.
        counter: what the loop counts with.
        place: what says there where training is.
        computes: where the number is computed with, or kept; None: it says how far training is.
        end: what breaks at the end of the last turn, where that is all that it does.
        leaves: where it is left, of a loop that ends there alone.
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
    """How many updates a loop makes.

    Args:
        steps: the calls that make one.

    Raises:
        CannotDerive: it has an end that cannot be seen, or its number chooses which turns step.
    """
    found = _of_for(flow, loop) if isinstance(loop, cst.For) else _of_while(flow, loop, steps[0])
    if found.name is None:
        return found
    _refuse_turns_without_a_step(flow, found.name, loop, steps)
    found_uses = list(uses(flow, found.name, loop.body))
    computes = next((one for one, tells in found_uses if not tells), None)
    is_turn = len(steps) > 1 or computes is not None
    return found._replace(
        counter=found.name,
        name=found.name if found_uses else None,
        place="pace.turn" if is_turn else "pace.version",
        computes=computes,
    )


def _refuse_turns_without_a_step(
    flow: Flow, name: str, loop: AnyLoop, steps: Sequence[cst.Call]
) -> None:
    """``if (it + 1) % 4 == 0: optimizer.step()``, or ``if (it + 1) % 4: continue`` before it."""
    script, names, inside = flow.script, {name}, set(flow.script.within(loop.body))
    for _ in range(_DEPTH):  # due = (it + 1) % 4 == 0
        names |= {
            one.name
            for one in script.bindings
            if one.node in inside and names & script.inside(one.value)
        }
    for call in steps:
        ends = [call, *skips(flow, loop, call)]
        tests = [up.test for one in ends for up in script.up(one) if isinstance(up, cst.If)]
        if not any(names & script.inside(test) for test in tests):
            return
    line = script.line(steps[0])
    raise CannotDerive(
        f"line {line} steps in some turns only, and pace.updates(n) counts updates: make a turn of "
        "them, with a loop over its batches: for number in pace.updates(n): with pace.step(): for "
        "_ in range(k): ... backward(), then optimizer.step()"
    )


def skips(flow: Flow, loop: AnyLoop, step: cst.Call) -> list[cst.Continue]:
    """What goes on to the next turn before a turn comes to its step."""
    script = flow.script
    calls = (one for one in script.within(loop.body) if isinstance(one, cst.Call))
    way = {one for node in flow.reached([loop.body]) for one in script.within(node)}
    if step not in way:
        return []
    comes = next(
        one
        for one in calls
        if one is step or any(step in script.within(each) for each in flow.reached([one]))
    )
    return [
        one
        for one in script.within(loop.body)
        if isinstance(one, cst.Continue)
        and script.order[one] < script.order[comes]
        and next(up for up in script.up(one) if isinstance(up, cst.For | cst.While)) is loop
    ]


def _of_for(flow: Flow, loop: cst.For) -> TurnCount:
    script, call = flow.script, loop.iter
    while isinstance(call, cst.Call) and script.meaning(call.func).rpartition(".")[2] == "tqdm":
        call = positional(call)[0] if positional(call) else call.func
    name = script.meaning(call.func) if isinstance(call, cst.Call) else ""
    if isinstance(call, cst.Call) and name in ("itertools.count", "count"):
        return _of_count(script, loop, call)
    target = script.code(loop.target)
    if not isinstance(call, cst.Call) or name.rpartition(".")[2] not in ("range", "trange"):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} goes over {script.code(loop.iter)}, which is "
            "neither a DataLoader nor range(n); make it one of them"
        )
    given = [script.code(one) for one in positional(call)]
    if len(given) > 2 or not isinstance(loop.target, cst.Name):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} counts in steps of its own; write it over "
            "range(n), or over DataLoader(range(first, last, step), batch_size=...)"
        )
    if len(given) == 1:
        return TurnCount(given[0], target, "0")
    return TurnCount(_minus(given[1], given[0]), target, given[0])


def _of_count(script: SourceTree, loop: cst.For, call: cst.Call) -> TurnCount:
    """``for it in count(1)``"""
    first = [script.code(one) for one in positional(call)] or ["0"]
    if len(call.args) > 1 or len(first) > 1 or not isinstance(loop.target, cst.Name):
        raise CannotDerive(
            f"the loop of line {script.line(loop)} counts in steps of its own; write for number in "
            "pace.updates()"
        )
    return TurnCount("", loop.target.value, first[0], leaves=_leaves(script, loop))


def _leaves(script: SourceTree, loop: AnyLoop) -> tuple[cst.CSTNode, ...]:
    """What leaves a loop."""
    scope, found = script.scope(loop), []
    for one in script.within(loop.body):
        if not isinstance(one, cst.Break | cst.Return) or script.scope(one) is not scope:
            continue
        around = next(up for up in script.up(one) if isinstance(up, cst.For | cst.While))
        if isinstance(one, cst.Return) or around is loop:
            found.append(one)
    return tuple(found)


def _minus(last: str, first: str) -> str:
    """``last - first``, without what cancels: ``n + 1 - 1``."""
    if first == "0":
        return last
    whole, code = cst.parse_expression(last), cst.Module([]).code_for_node
    if (
        isinstance(whole, cst.BinaryOperation) and isinstance(whole.operator, cst.Add)
        and not whole.lpar and code(whole.right) == first.strip()
    ):  # fmt: skip
        return code(whole.left)
    is_sum = re.search(r"[^\w.()\[\]]", first) is not None
    return f"{_term(last)} - ({first})" if is_sum else f"{_term(last)} - {first}"


def _term(text: str) -> str:
    """An expression as one of a sum: in brackets where it binds less."""
    whole = cst.parse_expression(text)
    bits = cst.BitAnd | cst.BitOr | cst.BitXor | cst.LeftShift | cst.RightShift
    loose = cst.IfExp | cst.BooleanOperation | cst.Comparison | cst.NamedExpr | cst.Lambda
    is_loose = isinstance(whole, loose) or isinstance(
        getattr(whole, "operator", None), bits | cst.Not
    )
    return f"({text})" if is_loose and not whole.lpar else text


# -- while -----------------------------------------------------------------------------------------


def _of_while(flow: Flow, loop: cst.While, step: cst.CSTNode) -> TurnCount:
    """By its condition, or by the ``if`` in it that breaks."""
    script = flow.script
    endless = CannotDerive(
        f"the loop of line {script.line(loop)} has no end that can be read from it; write for "
        "number in pace.updates(n)"
    )
    limit, place, end = _limit(script, loop.test), 0, None
    if script.code(loop.test) not in ("True", "1") and not _is_counted(script, loop, limit):
        raise endless
    order = script.order
    for line in () if limit or not isinstance(loop.body, cst.IndentedBlock) else loop.body.body:
        if isinstance(line, cst.If) and any(isinstance(one, cst.Break) for one in _own(line)):
            found = _limit(script, line.test, is_end=True)
            if _is_counted(script, loop, found):
                limit, place = found, order[line]
                is_last = loop.body.body[-1] is line and len(line.body.body) == 1
                end = line if is_last and line.orelse is None else None
                break
    if limit is None:
        return TurnCount("", None, "0", leaves=_leaves(script, loop))
    name, sign, last, asked = limit
    grows = next(one for one in script.within(loop.body) if _counts(script, one, name))
    is_after_step = place > order[step]
    extra = {"<": 0, ">=": 0, "<=": 1, ">": 1, "==": 0}[sign]
    if is_after_step and place < order[grows]:
        extra += 1
    first = _first(flow, name, loop)
    total = _minus(f"{_term(last)} + {extra}" if extra else last, first)
    if asked and not (asked == f"{last} is not None" and total == last):
        total = f"{total} if {asked} else None"
    return TurnCount(total, name, first, is_changed=first == name, end=end)


_Limit: TypeAlias = tuple[str, str, str, str]


def _is_counted(script: SourceTree, loop: cst.While, limit: _Limit | None) -> bool:
    """Whether each turn counts that name up, once, and nothing else gives it a value."""
    if limit is None:
        return False
    name, inside = limit[0], set(script.within(loop))
    grows = [one for one in script.within(loop.body) if _counts(script, one, name)]
    others = [one for one in script.bindings if one.name == name and one.node in inside]
    is_one = len(grows) == 1 and not others
    return is_one and script.parents[script.block_line(grows[0])] is loop.body


def _limit(script: SourceTree, test: cst.BaseExpression, *, is_end: bool = False) -> _Limit | None:
    """(``it``, ``<``, ``n``, ``""``) of a condition; the last is what else is asked, as in
    ``n is not None and it >= n``: where that is not so, there is no end.
    """
    if is_end and isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        found = _limit(script, test.right, is_end=True)
        if found is None or found[0] in script.inside(test.left):
            return None
        if found[2] not in script.inside(test.left):
            return None
        return None if found[3] else (*found[:3], script.code(test.left))
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return None
    one = test.comparisons[0]
    sign = script.code(one.operator).strip()
    if sign not in ((">", ">=", "==") if is_end else ("<", "<=")):
        return None
    if not isinstance(test.left, cst.Name | cst.Attribute):
        return None
    return script.code(test.left), sign, script.code(one.comparator), ""


def _own(line: cst.If) -> list[cst.CSTNode]:
    """What stands in an ``if`` by itself, in no block below."""
    rows = line.body.body if isinstance(line.body, cst.IndentedBlock) else [line.body]
    simple = cst.SimpleStatementLine | cst.SimpleStatementSuite
    return [one for row in rows if isinstance(row, simple) for one in row.body]


def _counts(script: SourceTree, node: cst.CSTNode, name: str) -> bool:
    """``it += 1``"""
    return isinstance(node, cst.AugAssign) and script.code(node).replace(" ", "") == f"{name}+=1"


def _first(flow: Flow, name: str, loop: cst.While) -> str:
    """The number of the first turn: a literal where it is one in any case."""
    scope = flow.script.scope(loop)
    bound: list[Binding] = flow.bindings(name, flow.home(name.partition(".")[0], scope))
    values = {flow.script.code(one.value) for one in bound}
    if len(values) == 1 and all(one.isdigit() for one in values):
        return values.pop()
    return name
