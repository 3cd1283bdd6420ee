"""How many dimensions a value has, as far as the text says it: ``frame["price"].values`` has one.

    column of a table, y of return_X_y      1
    several columns, fit_transform, Linear  2
    view(-1, 1), unsqueeze, an index        computed from the value they are applied to

The rank is None where the text does not say it. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.tree import positional
from .facts import Facts
from .lineage import last_value
from .values import shape

_DEPTH = 12
_KEEP_RANK = {"astype", "float", "double", "to", "cuda", "contiguous", "clone", "copy", "long",
          "values", "to_numpy", "ffill", "fillna", "dropna", "half", "log", "exp"}  # fmt: skip
_CONVERSIONS = re.compile(
    r"^(torch\.(tensor|as_tensor|from_numpy|Tensor|FloatTensor)|numpy\.(array|asarray|log1p|log|float32))$"
)
_TABLES = re.compile(r"^pandas\.read_\w+$")
_SPLITS = re.compile(r"(^|\.)train_test_split$")
_TRANSFORMS = {"fit_transform", "transform", "inverse_transform"}


def rank(facts: Facts, expr: cst.BaseExpression | None, depth: int = 0) -> int | None:
    """Return the number of dimensions of a value, or None where the text does not say it."""
    if expr is None or depth > _DEPTH:
        return None
    sizes = shape(facts.flow, expr)
    if sizes is not None:
        return len(sizes)
    if isinstance(expr, cst.Name):
        return _name_rank(facts, expr, depth + 1)
    if isinstance(expr, cst.Attribute):
        if expr.attr.value == "values" and facts.code(expr.value) != "self":
            return rank(facts, expr.value, depth + 1)
        return _attribute_rank(facts, expr, depth + 1)
    if isinstance(expr, cst.Subscript):
        return _index_rank(facts, expr, depth + 1)
    if isinstance(expr, cst.BinaryOperation):
        left, right = (rank(facts, side, depth + 1) for side in (expr.left, expr.right))
        if isinstance(expr.right, cst.BaseNumber):
            return left
        return max(left, right) if left is not None and right is not None else None
    return _call_rank(facts, expr, depth + 1) if isinstance(expr, cst.Call) else None


def _call_rank(facts: Facts, call: cst.Call, depth: int) -> int | None:
    name, method, arguments = facts.meaning(call), facts.method(call), positional(call)
    if _CONVERSIONS.search(name) and arguments:
        return rank(facts, arguments[0], depth)
    if method in ("view", "reshape") and arguments and not isinstance(arguments[0], cst.Tuple):
        sizes = [facts.code(size) for size in arguments]
        return (
            len(sizes)
            if all(re.fullmatch(r"-?\d+|\w+\.size\(0\)|len\(\w+\)", size) for size in sizes)
            else None
        )
    if method in ("unsqueeze", "squeeze") and arguments:
        inner = rank(facts, facts.owner(call), depth)
        return None if inner is None or method == "squeeze" else inner + 1
    if method in _KEEP_RANK:
        return rank(facts, facts.owner(call), depth)
    if method in _TRANSFORMS and arguments:
        return 2
    return None


def _name_rank(facts: Facts, name: cst.Name, depth: int) -> int | None:
    """Rank a name by its last assignment before it, in its function or in the module."""
    scope = facts.script.scope(name)
    home = facts.flow.home(name.value, scope)
    if home is scope:
        binding = _binding(facts, name)
        if binding is None:
            return None
        value, place = binding
        return (
            rank(facts, value, depth) if place is None else _part_rank(facts, value, place, depth)
        )
    bindings = facts.flow.bindings(name.value, home)
    if len(bindings) != 1:
        return None
    value, place = bindings[0].value, bindings[0].place
    return rank(facts, value, depth) if place is None else _part_rank(facts, value, place, depth)


def _binding(facts: Facts, name: cst.Name) -> tuple[cst.BaseExpression, int | None] | None:
    """Return what was last assigned to a name, and its place if a call returns several values."""
    value = last_value(facts, name)
    order = facts.script.order
    scope = facts.script.scope(name)
    places = [
        binding.place for binding in facts.flow.bindings(name.value, scope)
        if binding.value is value and order[binding.node] < order[name]
    ]  # fmt: skip
    return None if value is None or not places else (value, places[-1])


def _part_rank(facts: Facts, value: cst.BaseExpression, place: int, depth: int) -> int | None:
    """Rank one of several values that a call returns: a part of a split, the y of return_X_y."""
    if not isinstance(value, cst.Call):
        return None
    arguments = positional(value)
    if _SPLITS.search(facts.meaning(value)) and place // 2 < len(arguments):
        return rank(facts, arguments[place // 2], depth)
    if facts.flag(value, "return_X_y") and re.search(
        r"(^|\.)(load|fetch)_\w+$", facts.meaning(value)
    ):
        return 2 - place if place < 2 else None
    return None


def _attribute_rank(facts: Facts, expr: cst.Attribute, depth: int) -> int | None:
    """Rank ``self.values`` by its only assignment in the class, or the data of a toy data set."""
    if facts.code(expr.value) != "self":
        origins = facts.flow.origins(expr.value)
        is_table = expr.attr.value in ("data", "target") and all(
            isinstance(origin, cst.Call)
            and re.search(r"(^|\.)(load|fetch)_\w+$", facts.meaning(origin))
            for origin in origins
        )
        return (2 if expr.attr.value == "data" else 1) if origins and is_table else None
    owner = facts.flow.owner(facts.script.scope(expr))
    bindings = [
        binding for binding in facts.script.bindings
        if binding.name == facts.code(expr)
        and facts.flow.owner(facts.script.scope(binding.node)) is owner
    ]  # fmt: skip
    if len(bindings) != 1 or bindings[0].place is not None:
        return None
    return rank_through_parameters(facts, bindings[0].value, depth)


def rank_through_parameters(facts: Facts, value: cst.BaseExpression, depth: int = 0) -> int | None:
    """Rank a value that may be a parameter, by the argument that every call passes for it."""
    inner = value
    while isinstance(inner, cst.Call):
        if _CONVERSIONS.search(facts.meaning(inner)) and positional(inner):
            inner = positional(inner)[0]
        elif facts.method(inner) in _KEEP_RANK:
            inner = facts.owner(inner)
        else:
            return rank(facts, value, depth)
    scope = facts.script.scope(value)
    if isinstance(inner, cst.Name) and not facts.flow.bindings(inner.value, scope):
        calls = facts.flow.calls_of(scope)
        arguments = [call.given.get(inner.value) for call in calls]
        ranks = {rank(facts, argument, depth + 1) for argument in arguments}
        return ranks.pop() if len(ranks) == 1 else None
    return rank(facts, value, depth)


def _index_rank(facts: Facts, expr: cst.Subscript, depth: int) -> int | None:
    """Rank ``table["a"]``, ``table[["a", "b"]]`` and ``values[i, 0]``."""
    keys = [element.slice for element in expr.slice]
    first = keys[0].value if len(keys) == 1 and isinstance(keys[0], cst.Index) else None
    if _is_table(facts, expr.value):
        if isinstance(first, cst.SimpleString):
            return 1
        return 2 if isinstance(first, cst.List) else None
    inner = rank(facts, expr.value, depth)
    if inner is None:
        return None
    num_dropped = 0
    for key in keys:
        if isinstance(key, cst.Index):
            if not _is_number(facts, key.value):
                return None
            num_dropped += 1
    return inner - num_dropped


def _is_number(facts: Facts, key: cst.BaseExpression) -> bool:
    """Whether an index is a whole number: a literal, or computed from __getitem__'s index."""
    if isinstance(key, cst.Integer) or (
        isinstance(key, cst.UnaryOperation) and isinstance(key.expression, cst.Integer)
    ):
        return True
    scope = facts.script.scope(key)
    if not isinstance(scope, cst.FunctionDef) or scope.name.value != "__getitem__":
        return False
    names = [parameter.name.value for parameter in scope.params.params][1:2]
    words = re.findall(r"[A-Za-z_][\w.]*", facts.code(key))
    return bool(names) and names[0] in words


def _is_table(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value is a table that pandas has read."""
    while isinstance(expr, cst.Call) and facts.method(expr) in _KEEP_RANK:
        expr = facts.owner(expr)
    origins = [expr] if isinstance(expr, cst.Call) else facts.flow.origins(expr)
    for origin in origins:
        inner = origin
        while isinstance(inner, cst.Call) and facts.method(inner) in (
            *_KEEP_RANK,
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
    return bool(origins)


def sample_rank(facts: Facts, loader: cst.Call, place: int) -> int | None:
    """Return the rank of one part of a loader's batch, the batch dimension included.

    Args:
        place: which part of the batch, from 0: the inputs, the targets.
    """
    data = facts.data_of(loader)
    origins = facts.flow.origins(data) if data else ()
    ranks = {_data_rank(facts, origin, place) for origin in origins}
    return ranks.pop() if len(ranks) == 1 else None


def _data_rank(facts: Facts, dataset: cst.BaseExpression, place: int) -> int | None:
    """Rank one part of a data set: a tensor of a TensorDataset, or what __getitem__ returns."""
    if not isinstance(dataset, cst.Call):
        return None
    name, arguments = facts.meaning(dataset), positional(dataset)
    if name.endswith("TensorDataset") and place < len(arguments):
        return rank(facts, arguments[place])
    if re.search(r"(^|\.)(random_split|Subset)$", name) and arguments:
        ranks = {_data_rank(facts, origin, place) for origin in facts.flow.origins(arguments[0])}
        return ranks.pop() if len(ranks) == 1 else None
    class_node = facts.flow.classes.get(name)
    for node in facts.script.within(class_node) if class_node is not None else ():
        if isinstance(node, cst.FunctionDef) and node.name.value == "__getitem__":
            returned = [
                inner.value for inner in facts.script.within(node) if isinstance(inner, cst.Return)
            ]
            parts = returned[0] if len(returned) == 1 else None
            if not isinstance(parts, cst.Tuple) or place >= len(parts.elements):
                return None
            sample = rank(facts, parts.elements[place].value)
            return None if sample is None else sample + 1
    return None
