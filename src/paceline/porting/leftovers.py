"""What a turn collects in an object that outlives it, and clears at its end.

    policy.rewards.append(r)    in the turn, or in a function that it calls
    del policy.rewards[:]       at its end, which a turn that is called off never comes to

The next turn would begin with the rest of that one, so it clears them first. What is cleared under
a condition is kept from turn to turn on purpose. This module must not know how a tree is edited.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow, parameters
from .tree import Scope

_COLLECTS = ("append", "appendleft", "extend", "insert", "add")
_EMPTY = ("list", "deque", "collections.deque", "dict", "set")
_BLOCKS = cst.If | cst.For | cst.While | cst.Try | cst.IfExp | cst.ExceptHandler
_DEPTH = 8


class TurnRest(NamedTuple):
    """What a turn that is called off may leave.

    Attributes:
        name: what is collected in, as the turn calls it.
        clears: the statement that clears it.
        is_visible: whether the same statement does so at the beginning of a turn.
    """

    name: str
    clears: cst.CSTNode
    is_visible: bool


class _Event(NamedTuple):
    name: str
    home: cst.CSTNode
    clears: cst.CSTNode | None
    is_sure: bool


def leftovers(flow: Flow, loop: AnyLoop) -> Iterator[TurnRest]:
    """Each once, in the order in which a turn clears them."""
    script, scope = flow.script, flow.script.scope(loop)
    first: dict[tuple[str, cst.CSTNode], bool] = {}
    """Whether a turn collects in it before it clears it."""
    for one in _events(flow, loop.body, is_sure=True, depth=0):
        key = one.name, one.home
        is_collected = first.setdefault(key, one.clears is None)
        if one.clears is None or not is_collected or not one.is_sure:
            continue
        first[key] = False
        root = one.name.partition(".")[0]
        is_rebound = isinstance(one.clears, cst.Assign) and one.name == root
        is_here = _home(flow, root, scope) is one.home
        is_visible = is_here and (not is_rebound or script.scope(one.clears) is scope)
        yield TurnRest(one.name, one.clears, is_visible)


def _home(flow: Flow, root: str, scope: Scope) -> cst.CSTNode:
    """Where a name is at home: the class for ``self``."""
    owner = flow.owner(scope) if root == "self" else None
    return flow.home(root, scope) if owner is None else owner


def _events(flow: Flow, node: cst.CSTNode, *, is_sure: bool, depth: int) -> Iterator[_Event]:
    """What is collected and cleared, in the order of a turn, functions that it calls included."""
    script, scope = flow.script, flow.script.scope(node)
    if isinstance(node, cst.FunctionDef):
        scope = node
    for one in script.within(node):
        if one is node or script.scope(one) is not scope:
            continue
        name, clears = _named(flow, one)
        is_here = is_sure and not _is_under(flow, one, node)
        if name:
            home = _home(flow, name.partition(".")[0], scope)
            is_given = name in parameters(scope)
            if depth == 0 or home is not scope or is_given or "." in name:  # else each call's own
                yield _Event(name, home, script.statement(one) if clears else None, is_here)
        function = flow.function_of(one) if isinstance(one, cst.Call) else None
        if function is not None and depth < _DEPTH:
            yield from _events(flow, function, is_sure=is_here, depth=depth + 1)


def _is_under(flow: Flow, one: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether it stands in a block of its own below ``node``."""
    for up in flow.script.up(one):
        if up is node:
            return False
        if isinstance(up, _BLOCKS):
            return True
    return False


def _named(flow: Flow, node: cst.CSTNode) -> tuple[str, bool]:
    """What this collects in, or clears, and whether it clears; an empty name: it does neither."""
    script = flow.script
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name, does = script.code(node.func.value), node.func.attr.value
        if does in _COLLECTS:
            return _dotted(name), False
        return (_dotted(name), True) if does == "clear" and not node.args else ("", False)
    if isinstance(node, cst.Del) and isinstance(node.target, cst.Subscript):
        whole = [one.slice for one in node.target.slice]
        is_all = len(whole) == 1 and isinstance(whole[0], cst.Slice)
        is_all = is_all and script.code(whole[0]).replace(" ", "") == ":"
        return (_dotted(script.code(node.target.value)), True) if is_all else ("", False)
    if isinstance(node, cst.Assign) and len(node.targets) == 1:
        value = node.value
        is_empty = isinstance(value, cst.List | cst.Dict) and not value.elements
        if isinstance(value, cst.Call) and not value.args:
            is_empty = script.meaning(value.func) in _EMPTY
        return (_dotted(script.code(node.targets[0].target)), True) if is_empty else ("", False)
    return "", False


def _dotted(name: str) -> str:
    """A name, or an attribute of one; empty: it is something else."""
    return name if name.replace(".", "").isidentifier() else ""
