"""Features are scaled with statistics of all data, and split afterwards.

The test data have influenced the scale: the test is not on unseen data.

Fix: fit on the training part, and transform() the other.
Source: scikit-learn, Common pitfalls and recommended practices, "Data leakage during pre-processing".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import Binding, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_LEARNS = re.compile(
    r"(^|\.)(StandardScaler|MinMaxScaler|RobustScaler|MaxAbsScaler|PowerTransformer|"
    r"QuantileTransformer|PCA|SelectKBest|SimpleImputer|KNNImputer)$"
)
_SPLITS = re.compile(r"(^|\.)train_test_split$")


def check(facts: Facts) -> Iterator[Found]:
    for binding in facts.script.bindings:
        call = _fitted(facts, binding)
        if call is None:
            continue
        split = _split(facts, binding)
        if split is not None:
            yield Found(
                call,
                f"{facts.code(call)} sees the rows that line {facts.script.line(split)} splits off",
            )


def _fitted(facts: Facts, binding: Binding) -> cst.Call | None:
    """Return a binding's ``scaler.fit_transform(x)`` of all the data, or None."""
    value = binding.value
    while isinstance(value, cst.Call) and facts.method(value) in ("astype", "reshape", "squeeze"):
        value = facts.owner(value)
    if binding.place is not None or not isinstance(value, cst.Call):
        return None
    if facts.method(value) != "fit_transform" or not positional(value):
        return None
    owner = facts.owner(value)
    origins = [owner] if isinstance(owner, cst.Call) else facts.flow.origins(owner)
    learns = bool(origins) and all(
        isinstance(origin, cst.Call) and _LEARNS.search(facts.meaning(origin)) for origin in origins
    )
    data = facts.code(positional(value)[0])
    return value if learns and not re.search(r"train|\[[^\]]*:[^\]]*\]$", data) else None


def _split(facts: Facts, binding: Binding) -> cst.CSTNode | None:
    """Return where scaled data are split into rows for training and others, or None."""
    order, scope = facts.script.order, facts.script.scope(binding.node)
    name = whole = binding.name  # of df[columns] the whole is df
    if isinstance(binding.node, cst.Assign) and isinstance(
        target := binding.node.targets[0].target, cst.Subscript
    ):
        whole = facts.code(target.value)
    reassigned = [
        order[other.node] for other in facts.script.bindings
        if other.name == name and order[other.node] > order[binding.node]
    ]  # fmt: skip
    end = min(reassigned, default=len(order))
    slices: set[str] = set()
    for node in facts.script.within(scope):
        if not order[binding.node] < order[node] < end:
            continue
        if isinstance(node, cst.Call) and _SPLITS.search(facts.meaning(node)):
            arguments = [facts.code(_bare(facts, argument)) for argument in positional(node)]
            if name in arguments or whole in arguments:
                return node
        if isinstance(node, cst.Subscript) and facts.code(node.value) == name:
            bounds = re.sub(r"\s", "", facts.code(node)[len(name) :])
            is_slice = re.fullmatch(r"\[(:[\w.]+|[\w.]+:)\]", bounds) is not None
            line = facts.script.statement(node)
            assigned = facts.code(line.targets[0].target) if isinstance(line, cst.Assign) else ""
            if is_slice and re.search(r"train|test|val", assigned):
                slices.add(bounds)
                if len(slices) == 2:
                    first, second = sorted(slices)
                    return node if first.strip("[]:") == second.strip("[]:") else None
    return None


def _bare(facts: Facts, expr: cst.BaseExpression) -> cst.BaseExpression:
    """Return ``x`` of ``x.astype("float32")`` or ``x.values``."""
    while isinstance(expr, cst.Call) and facts.method(expr) in ("astype", "to_numpy"):
        expr = facts.owner(expr)
    if isinstance(expr, cst.Attribute) and expr.attr.value == "values":
        return expr.value
    return expr


_SCALE = """
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
scaler = StandardScaler()
{}
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        _SCALE.format("X = scaler.fit_transform(X)\nX_train, X_test = train_test_split(X, test_size=0.2)"),
        _SCALE.format("values = scaler.fit_transform(values).astype('float32')\ntrain, test = values[:cut], values[cut:]"),
        _SCALE.format("df[cols] = scaler.fit_transform(df[cols])\nX_train, X_test = train_test_split(df[cols].astype('float32'))"),
        _SCALE.format("df[cols] = scaler.fit_transform(df[cols])\ntrain, test = train_test_split(df)"),
    ),
    healthy=(
        _SCALE.format("df[cols] = scaler.fit_transform(df[cols])\nX_train, X_test = train_test_split(other[cols])"),
        _SCALE.format("X_train, X_test = train_test_split(X)\nX_train = scaler.fit_transform(X_train)\nX_test = scaler.transform(X_test)"),
        _SCALE.format("scaler.fit(values[:cut])\nvalues = scaler.transform(values)\ntrain, test = values[:cut], values[cut:]"),
        _SCALE.format("shown = scaler.fit_transform(X)\nX_train, X_test = train_test_split(X)"),
        _SCALE.format("train_values = scaler.fit_transform(train_values)\ntrain, val = train_test_split(train_values)"),
    ),
)  # fmt: skip
