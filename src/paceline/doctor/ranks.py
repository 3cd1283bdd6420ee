"""How many dimensions a value has, where the text says it: ``frame["price"].values`` has one.

    column of a table, y of return_X_y      1
    several columns, fit_transform, Linear  2
    view(-1, 1), unsqueeze, an index        what they make of it

What the text does not say is None. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.tree import positional
from .facts import Facts
from .lineage import last_value
from .values import shape

_DEPTH = 12
_KEEPS = {"astype", "float", "double", "to", "cuda", "contiguous", "clone", "copy", "long",
          "values", "to_numpy", "ffill", "fillna", "dropna", "half", "log", "exp"}  # fmt: skip
_WRAPS = re.compile(
    r"^(torch\.(tensor|as_tensor|from_numpy|Tensor|FloatTensor)|numpy\.(array|asarray|log1p|log|float32))$"
)
_TABLES = re.compile(r"^pandas\.read_\w+$")
_SPLITS = re.compile(r"(^|\.)train_test_split$")
_FITS = {"fit_transform", "transform", "inverse_transform"}


def rank(facts: Facts, expr: cst.BaseExpression | None, depth: int = 0) -> int | None:
    """The number of dimensions of a value; None: not said."""
    if expr is None or depth > _DEPTH:
        return None
    sizes = shape(facts.flow, expr)
    if sizes is not None:
        return len(sizes)
    if isinstance(expr, cst.Name):
        return _named(facts, expr, depth + 1)
    if isinstance(expr, cst.Attribute):
        if expr.attr.value == "values" and facts.code(expr.value) != "self":
            return rank(facts, expr.value, depth + 1)
        return _attribute(facts, expr, depth + 1)
    if isinstance(expr, cst.Subscript):
        return _indexed(facts, expr, depth + 1)
    if isinstance(expr, cst.BinaryOperation):
        left, right = (rank(facts, one, depth + 1) for one in (expr.left, expr.right))
        if isinstance(expr.right, cst.BaseNumber):
            return left
        return max(left, right) if left is not None and right is not None else None
    return _called(facts, expr, depth + 1) if isinstance(expr, cst.Call) else None


def _called(facts: Facts, call: cst.Call, depth: int) -> int | None:
    name, method, given = facts.meaning(call), facts.method(call), positional(call)
    if _WRAPS.search(name) and given:
        return rank(facts, given[0], depth)
    if method in ("view", "reshape") and given and not isinstance(given[0], cst.Tuple):
        sizes = [facts.code(one) for one in given]
        return (
            len(sizes)
            if all(re.fullmatch(r"-?\d+|\w+\.size\(0\)|len\(\w+\)", one) for one in sizes)
            else None
        )
    if method in ("unsqueeze", "squeeze") and given:
        below = rank(facts, facts.owner(call), depth)
        return None if below is None or method == "squeeze" else below + 1
    if method in _KEEPS:
        return rank(facts, facts.owner(call), depth)
    if method in _FITS and given:
        return 2
    return None


def _named(facts: Facts, name: cst.Name, depth: int) -> int | None:
    """By the last assignment before it, in its function or in the module."""
    scope = facts.script.scope(name)
    home = facts.flow.home(name.value, scope)
    if home is scope:
        node = _binding(facts, name)
        if node is None:
            return None
        value, place = node
        return rank(facts, value, depth) if place is None else _part(facts, value, place, depth)
    bound = facts.flow.bindings(name.value, home)
    if len(bound) != 1:
        return None
    value, place = bound[0].value, bound[0].place
    return rank(facts, value, depth) if place is None else _part(facts, value, place, depth)


def _binding(facts: Facts, name: cst.Name) -> tuple[cst.BaseExpression, int | None] | None:
    value = last_value(facts, name)
    order = facts.script.order
    scope = facts.script.scope(name)
    bound = [
        one for one in facts.flow.bindings(name.value, scope)
        if one.value is value and order[one.node] < order[name]
    ]  # fmt: skip
    return None if value is None or not bound else (value, bound[-1].place)


def _part(facts: Facts, value: cst.BaseExpression, place: int, depth: int) -> int | None:
    """One of several that a call gives: parts of a split, the y of return_X_y."""
    if not isinstance(value, cst.Call):
        return None
    given = positional(value)
    if _SPLITS.search(facts.meaning(value)) and place // 2 < len(given):
        return rank(facts, given[place // 2], depth)
    if facts.flag(value, "return_X_y") and re.search(
        r"(^|\.)(load|fetch)_\w+$", facts.meaning(value)
    ):
        return 2 - place if place < 2 else None
    return None


def _attribute(facts: Facts, expr: cst.Attribute, depth: int) -> int | None:
    """``self.values`` by its only assignment in the class; a parameter by every call."""
    if facts.code(expr.value) != "self":
        made = facts.flow.origins(expr.value)
        is_table = expr.attr.value in ("data", "target") and all(
            isinstance(one, cst.Call) and re.search(r"(^|\.)(load|fetch)_\w+$", facts.meaning(one))
            for one in made
        )
        return (2 if expr.attr.value == "data" else 1) if made and is_table else None
    owner = facts.flow.owner(facts.script.scope(expr))
    bound = [
        one for one in facts.script.bindings
        if one.name == facts.code(expr) and facts.flow.owner(facts.script.scope(one.node)) is owner
    ]  # fmt: skip
    if len(bound) != 1 or bound[0].place is not None:
        return None
    return given_rank(facts, bound[0].value, depth)


def given_rank(facts: Facts, value: cst.BaseExpression, depth: int = 0) -> int | None:
    """Of a value in which parameters stand for what every call gives them."""
    inner = value
    while isinstance(inner, cst.Call):
        if _WRAPS.search(facts.meaning(inner)) and positional(inner):
            inner = positional(inner)[0]
        elif facts.method(inner) in _KEEPS:
            inner = facts.owner(inner)
        else:
            return rank(facts, value, depth)
    scope = facts.script.scope(value)
    if isinstance(inner, cst.Name) and not facts.flow.bindings(inner.value, scope):
        calls = facts.flow.calls_of(scope)
        given = [one.given.get(inner.value) for one in calls]
        ranks = {rank(facts, one, depth + 1) for one in given}
        return ranks.pop() if len(ranks) == 1 else None
    return rank(facts, value, depth)


def _indexed(facts: Facts, expr: cst.Subscript, depth: int) -> int | None:
    """Of ``table["a"]``, ``table[["a", "b"]]`` and ``values[i, 0]``."""
    keys = [one.slice for one in expr.slice]
    first = keys[0].value if len(keys) == 1 and isinstance(keys[0], cst.Index) else None
    if _is_table(facts, expr.value):
        if isinstance(first, cst.SimpleString):
            return 1
        return 2 if isinstance(first, cst.List) else None
    below = rank(facts, expr.value, depth)
    if below is None:
        return None
    drops = 0
    for key in keys:
        if isinstance(key, cst.Index):
            if not _is_number(facts, key.value):
                return None
            drops += 1
    return below - drops


def _is_number(facts: Facts, key: cst.BaseExpression) -> bool:
    """Whether an index is a whole number: a literal, or one with the index of __getitem__."""
    if isinstance(key, cst.Integer) or (
        isinstance(key, cst.UnaryOperation) and isinstance(key.expression, cst.Integer)
    ):
        return True
    scope = facts.script.scope(key)
    if not isinstance(scope, cst.FunctionDef) or scope.name.value != "__getitem__":
        return False
    names = [one.name.value for one in scope.params.params][1:2]
    words = re.findall(r"[A-Za-z_][\w.]*", facts.code(key))
    return bool(names) and names[0] in words


def _is_table(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether this is a table of pandas."""
    while isinstance(expr, cst.Call) and facts.method(expr) in _KEEPS:
        expr = facts.owner(expr)
    made = [expr] if isinstance(expr, cst.Call) else facts.flow.origins(expr)
    for one in made:
        inner = one
        while isinstance(inner, cst.Call) and facts.method(inner) in (
            *_KEEPS,
            "drop_duplicates",
            "reset_index",
            "sample",
            "sort_values",
        ):
            if _TABLES.search(facts.meaning(inner)):
                break
            inner = facts.owner(inner)
        if isinstance(inner, cst.Name):
            return _is_table(facts, inner)
        if not isinstance(inner, cst.Call) or not _TABLES.search(facts.meaning(inner)):
            return False
    return bool(made)


def sample_rank(facts: Facts, loader: cst.Call, place: int) -> int | None:
    """Of one part of a batch: a tensor of a TensorDataset, or what __getitem__ gives and one."""
    data = facts.data_of(loader)
    ranks = {_of_data(facts, one, place) for one in (facts.flow.origins(data) if data else ())}
    return ranks.pop() if len(ranks) == 1 else None


def _of_data(facts: Facts, made: cst.BaseExpression, place: int) -> int | None:
    if not isinstance(made, cst.Call):
        return None
    name, given = facts.meaning(made), positional(made)
    if name.endswith("TensorDataset") and place < len(given):
        return rank(facts, given[place])
    if re.search(r"(^|\.)(random_split|Subset)$", name) and given:
        ranks = {_of_data(facts, one, place) for one in facts.flow.origins(given[0])}
        return ranks.pop() if len(ranks) == 1 else None
    node = facts.flow.classes.get(name)
    for one in facts.script.within(node) if node is not None else ():
        if isinstance(one, cst.FunctionDef) and one.name.value == "__getitem__":
            returned = [
                each.value for each in facts.script.within(one) if isinstance(each, cst.Return)
            ]
            parts = returned[0] if len(returned) == 1 else None
            if not isinstance(parts, cst.Tuple) or place >= len(parts.elements):
                return None
            below = rank(facts, parts.elements[place].value)
            return None if below is None else below + 1
    return None
