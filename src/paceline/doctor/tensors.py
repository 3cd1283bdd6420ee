"""Which expressions of a loop that trains are tensors that may lie on a device.

    output = model(x)          a tensor: what a model or a loss gives
    (output - y).mean()        a tensor: arithmetic and methods of one
    loss.item(), x.shape       none

Taint is rooted at models, losses and copies to a device; what an unknown function makes of a tensor
is unknown, so nothing is said of it. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.dataflow import parameters
from ..porting.tree import positional
from .facts import Facts
from .values import literal

_DEPTH = 40
_HOST = {"item", "tolist", "cpu", "numpy", "size", "dim", "numel", "backward", "is_cuda",
         "stride", "get_device", "data_ptr", "type", "element_size", "nelement", "ndimension",
         "is_contiguous", "step", "state_dict", "register_hook", "zero_grad"}  # fmt: skip
"""Methods of a tensor that give no tensor of its device."""
_PARTS = {"data", "grad", "T", "mT", "logits", "loss", "last_hidden_state"}
_FUNCTIONS = re.compile(
    r"^torch\.(?!optim|utils|cuda|save|load|device|no_grad|numel|is_)|functional\."
)


class Tensors:
    """Answers whether an expression is a tensor of a device."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._known: dict[cst.CSTNode, bool] = {}

    def is_tensor(self, expr: cst.BaseExpression, depth: int = 0) -> bool:
        if depth > _DEPTH:
            return False
        if expr not in self._known:
            self._known[expr] = False  # what leads to itself says nothing
            self._known[expr] = self._judge(expr, depth + 1)
        return self._known[expr]

    def _judge(self, expr: cst.BaseExpression, depth: int) -> bool:
        if isinstance(expr, cst.Name):
            return self._named(expr, depth)
        if isinstance(expr, cst.Attribute):
            is_part = expr.attr.value in _PARTS and self.is_tensor(expr.value, depth)
            return is_part or self._bound(self.facts.code(expr), expr, depth)
        if isinstance(expr, cst.BinaryOperation):
            return self.is_tensor(expr.left, depth) or self.is_tensor(expr.right, depth)
        if isinstance(expr, cst.UnaryOperation):
            return not isinstance(expr.operator, cst.Not) and self.is_tensor(expr.expression, depth)
        if isinstance(expr, cst.Comparison):
            is_numeric = all(
                isinstance(one.operator, cst.Equal | cst.NotEqual | cst.LessThan | cst.GreaterThan
                           | cst.LessThanEqual | cst.GreaterThanEqual)
                for one in expr.comparisons
            )  # fmt: skip
            return is_numeric and self.is_tensor(expr.left, depth)
        if isinstance(expr, cst.Subscript):
            return self.is_tensor(expr.value, depth)
        return isinstance(expr, cst.Call) and self._called(expr, depth)

    def _called(self, call: cst.Call, depth: int) -> bool:
        facts = self.facts
        if isinstance(call.func, cst.Name | cst.Attribute) and facts.is_model(call.func):
            return True
        if facts.loss_kind(call):
            return True
        name = facts.method(call)
        if name in ("to", "cuda"):
            given = positional(call)
            is_host = bool(given) and (literal(given[0]) or "").startswith("cpu")
            return not is_host and not facts.is_model(facts.owner(call)) and (
                name == "cuda" or self._is_device(given[0] if given else None)
                or self.is_tensor(facts.owner(call), depth)
            )  # fmt: skip
        if _FUNCTIONS.search(facts.script.meaning(call.func)):
            return any(self.is_tensor(one, depth) for one in positional(call))
        if name and name not in _HOST:
            return self.is_tensor(facts.owner(call), depth)
        function = facts.flow.function_of(call)
        if function is None or facts.script.code(call.func).startswith("self."):
            return False
        returned = [
            one.value for one in facts.script.within(function)
            if isinstance(one, cst.Return) and one.value is not None
        ]  # fmt: skip
        return bool(returned) and all(
            self.is_tensor(one, depth) or self._are_collected(one, depth) for one in returned
        )

    def _are_collected(self, returned: cst.BaseExpression, depth: int) -> bool:
        """Whether this is a list of tensors: made empty, and appended to."""
        if not isinstance(returned, cst.Name):
            return False
        facts, scope = self.facts, self.facts.script.scope(returned)
        bound = facts.flow.bindings(returned.value, scope)
        is_empty = [isinstance(one.value, cst.List) and not one.value.elements for one in bound]
        added = [
            positional(one)[0] for one in facts.methods("append")
            if facts.code(facts.owner(one)) == returned.value and positional(one)
            and facts.script.scope(one) is scope
        ]  # fmt: skip
        return (
            is_empty == [True] and bool(added) and all(self.is_tensor(one, depth) for one in added)
        )

    def _is_device(self, expr: cst.BaseExpression | None) -> bool:
        """Whether this names a device, not a type, and not the CPU alone."""
        if expr is None:
            return False
        said = literal(expr) if not isinstance(expr, cst.Name) else None
        if said is not None:
            return said.startswith(("cuda", "mps", "xpu"))
        text = self.facts.code(expr)
        return re.search(r"device|gpu|rank", text) is not None

    def _named(self, name: cst.Name, depth: int) -> bool:
        """By the assignment that comes last before it; in a loop by the last one of all."""
        return self._bound(name.value, name, depth)

    def _bound(self, code: str, use: cst.BaseExpression, depth: int) -> bool:
        facts, script = self.facts, self.facts.script
        scope = script.scope(use)
        home = facts.flow.home(code.partition(".")[0], scope) if "." not in code else scope
        order = script.order
        bound = sorted(facts.flow.bindings(code, home), key=lambda one: order[one.node])
        before = [one for one in bound if order[one.node] < order[use]]
        own = script.statement(use)
        before = [one for one in before if one.node is not own] or []
        if before:
            return self.is_tensor(before[-1].value, depth)
        if bound:
            return self.is_tensor(bound[-1].value, depth)
        if code in parameters(home):
            given = [one.given.get(code) for one in facts.flow.calls_of(home)]
            sure = [one for one in given if one is not None]
            return bool(sure) and all(self.is_tensor(one, depth) for one in sure)
        return False


def tensors_of(facts: Facts) -> Tensors:
    """The one of a script: what it has judged is kept."""
    return facts.once(Tensors, lambda: Tensors(facts))
