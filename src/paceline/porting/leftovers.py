"""Finds what a turn collects in an object that outlives it, and clears at its end.

    policy.rewards.append(r)    in the turn, or in a function that it calls
    del policy.rewards[:]       at its end, which a turn that is called off never reaches

The next turn would begin with the rest of that one, so it has to clear it first. What is cleared
only under a condition is kept from turn to turn on purpose. This module must not know how a tree is
edited.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow, parameters
from .tree import CannotDerive, Scope

_COLLECTS = ("append", "appendleft", "extend", "insert", "add")
_EMPTY = ("list", "deque", "collections.deque", "dict", "set")
_BLOCKS = cst.If | cst.For | cst.While | cst.Try | cst.IfExp | cst.ExceptHandler
_DEPTH = 8


class TurnRest(NamedTuple):
    """A collection that a turn which is called off may leave filled.

    Attributes:
        name: what the turn calls it.
        clears: the statement that clears it.
        is_visible: whether the same statement would clear it at the beginning of a turn.
        text: that statement as the turn would write it.
    """

    name: str
    clears: cst.CSTNode
    is_visible: bool
    text: str


class _Event(NamedTuple):
    name: str
    home: cst.CSTNode
    clears: cst.CSTNode | None
    is_sure: bool


def leftovers(flow: Flow, loop: AnyLoop) -> Iterator[TurnRest]:
    """Yield each leftover once, in the order in which a turn clears them."""
    script, scope = flow.script, flow.script.scope(loop)
    first: dict[tuple[str, cst.CSTNode], bool] = {}
    """Whether a turn fills a collection before it clears it, by its name and home."""
    for event in _events(flow, loop.body, is_sure=True, depth=0):
        key = event.name, event.home
        is_collected = first.setdefault(key, event.clears is None)
        if event.clears is None or not is_collected or not event.is_sure:
            continue
        first[key] = False
        root = event.name.partition(".")[0]
        is_rebound = isinstance(event.clears, cst.Assign) and event.name == root
        is_here = _home(flow, root, scope) is event.home
        is_visible = is_here and (not is_rebound or script.scope(event.clears) is scope)
        name, text = event.name, script.code(event.clears).strip().rstrip(";").strip()
        if root == "self" and isinstance(event.home, cst.ClassDef) and not is_here:
            with suppress(CannotDerive):  # self.data there is model.data here
                instance = flow.instance(event.home, scope)
                name, is_visible = name.replace("self", instance, 1), True
                text = re.sub(r"\bself\.", f"{instance}.", text)
        yield TurnRest(name, event.clears, is_visible, text)


def _home(flow: Flow, root: str, scope: Scope) -> cst.CSTNode:
    """Return the scope that a name belongs to; for ``self`` the class."""
    owner = flow.owner(scope) if root == "self" else None
    return flow.home(root, scope) if owner is None else owner


def _events(flow: Flow, node: cst.CSTNode, *, is_sure: bool, depth: int) -> Iterator[_Event]:
    """Yield what a turn collects and clears, in its order, including functions that it calls."""
    script, scope = flow.script, flow.script.scope(node)
    if isinstance(node, cst.FunctionDef):
        scope = node
    for part in script.within(node):
        if part is node or script.scope(part) is not scope:
            continue
        name, clears = _collected_or_cleared(flow, part)
        is_here = is_sure and not _is_under(flow, part, node)
        if name:
            home = _home(flow, name.partition(".")[0], scope)
            is_given = name in parameters(scope)
            is_local = depth > 0 and home is scope and not is_given and "." not in name
            if not is_local:  # local names are another object in each call
                yield _Event(name, home, script.statement(part) if clears else None, is_here)
        function = _function_of(flow, part) if isinstance(part, cst.Call) else None
        if function is not None and depth < _DEPTH:
            yield from _events(flow, function, is_sure=is_here, depth=depth + 1)


def _function_of(flow: Flow, call: cst.Call) -> cst.FunctionDef | None:
    """Return the function of the script that is called, or the method of an object of its class."""
    function = flow.function_of(call)
    if function is None and isinstance(call.func, cst.Attribute):
        method = flow.functions.get(call.func.attr.value)
        owner = None if method is None else flow.owner(method)
        function = method if owner is not None and flow.is_of(call, owner) else None
    return function


def _is_under(flow: Flow, inner: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether a node is in a block of its own inside ``node``."""
    for ancestor in flow.script.up(inner):
        if ancestor is node:
            return False
        if isinstance(ancestor, _BLOCKS):
            return True
    return False


def _collected_or_cleared(flow: Flow, node: cst.CSTNode) -> tuple[str, bool]:
    """Return the collection that a node fills or clears, and whether it clears; "" for neither."""
    script = flow.script
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name, method = script.code(node.func.value), node.func.attr.value
        if method in _COLLECTS:
            return _dotted(name), False
        return (_dotted(name), True) if method == "clear" and not node.args else ("", False)
    if isinstance(node, cst.Del) and isinstance(node.target, cst.Subscript):
        whole = [element.slice for element in node.target.slice]
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
    """Return a name or an attribute of one as it is; empty if it is something else."""
    return name if name.replace(".", "").isidentifier() else ""
