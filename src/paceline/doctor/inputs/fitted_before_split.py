"""Features are scaled by what is known of all data, and split afterwards.

The data that are kept for testing have set the scale: the test is not of data never seen.

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
    """``scaler.fit_transform(x)`` of all that is given, past ``astype`` and its like."""
    value = binding.value
    while isinstance(value, cst.Call) and facts.method(value) in ("astype", "reshape", "squeeze"):
        value = facts.owner(value)
    if binding.place is not None or not isinstance(value, cst.Call):
        return None
    if facts.method(value) != "fit_transform" or not positional(value):
        return None
    made = (
        [facts.owner(value)]
        if isinstance(facts.owner(value), cst.Call)
        else facts.flow.origins(facts.owner(value))
    )
    is_ours = bool(made) and all(
        isinstance(one, cst.Call) and _LEARNS.search(facts.meaning(one)) for one in made
    )
    given = facts.code(positional(value)[0])
    return value if is_ours and not re.search(r"train|\[[^\]]*:[^\]]*\]$", given) else None


def _split(facts: Facts, binding: Binding) -> cst.CSTNode | None:
    """Where what was scaled is split into rows for training and others."""
    order, scope = facts.script.order, facts.script.scope(binding.node)
    name = whole = binding.name  # of df[columns] the whole is df
    if isinstance(binding.node, cst.Assign) and isinstance(
        target := binding.node.targets[0].target, cst.Subscript
    ):
        whole = facts.code(target.value)
    again = [
        order[one.node] for one in facts.script.bindings
        if one.name == name and order[one.node] > order[binding.node]
    ]  # fmt: skip
    end = min(again, default=len(order))
    parts: set[str] = set()
    for node in facts.script.within(scope):
        if not order[binding.node] < order[node] < end:
            continue
        if isinstance(node, cst.Call) and _SPLITS.search(facts.meaning(node)):
            given = [facts.code(_bare(facts, one)) for one in positional(node)]
            if name in given or whole in given:
                return node
        if isinstance(node, cst.Subscript) and facts.code(node.value) == name:
            text = re.sub(r"\s", "", facts.code(node)[len(name) :])
            cut = re.fullmatch(r"\[(:[\w.]+|[\w.]+:)\]", text)
            held = facts.script.statement(node)
            named = facts.code(held.targets[0].target) if isinstance(held, cst.Assign) else ""
            if cut and re.search(r"train|test|val", named):
                parts.add(text)
                if len(parts) == 2:
                    first, second = sorted(parts)
                    return node if first.strip("[]:") == second.strip("[]:") else None
    return None


def _bare(facts: Facts, expr: cst.BaseExpression) -> cst.BaseExpression:
    """``x`` of ``x.astype("float32")`` and ``x.values``."""
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
