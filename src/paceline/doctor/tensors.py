"""Decide which expressions of a training loop are tensors that may be on a device.

    output = model(x)          a tensor: the result of a model or a loss
    (output - y).mean()        a tensor: arithmetic on a tensor, and its methods
    loss.item(), x.shape       no tensor

Taint starts at models, losses and copies to a device. The result of an unknown function is unknown,
and so not called a tensor. This module must not know rules.
"""

import re

import libcst as cst

from ..porting.dataflow import parameters
from ..porting.tree import positional
from .facts import Facts
from .values import literal

_DEPTH = 40
_HOST_METHODS = {"item", "tolist", "cpu", "numpy", "size", "dim", "numel", "backward", "is_cuda",
         "stride", "get_device", "data_ptr", "type", "element_size", "nelement", "ndimension",
         "is_contiguous", "step", "state_dict", "register_hook", "zero_grad"}  # fmt: skip
"""Methods of a tensor whose result is no tensor on its device."""
_TENSOR_ATTRIBUTES = {"data", "grad", "T", "mT", "logits", "loss", "last_hidden_state"}
_FUNCTIONS = re.compile(
    r"^torch\.(?!optim|utils|cuda|save|load|device|no_grad|numel|is_)|functional\."
)


class Tensors:
    """The expressions of one script that are tensors on a device; answers are cached."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._known: dict[cst.CSTNode, bool] = {}

    def is_tensor(self, expr: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether a value is a tensor that may be on a device."""
        if depth > _DEPTH:
            return False
        if expr not in self._known:
            self._known[expr] = False  # the answer if the value depends on itself
            self._known[expr] = self._judge(expr, depth + 1)
        return self._known[expr]

    def _judge(self, expr: cst.BaseExpression, depth: int) -> bool:
        if isinstance(expr, cst.Name):
            return self._is_tensor_name(expr, depth)
        if isinstance(expr, cst.Attribute):
            is_part = expr.attr.value in _TENSOR_ATTRIBUTES and self.is_tensor(expr.value, depth)
            return is_part or self._is_bound_to_tensor(self.facts.code(expr), expr, depth)
        if isinstance(expr, cst.BinaryOperation):
            return self.is_tensor(expr.left, depth) or self.is_tensor(expr.right, depth)
        if isinstance(expr, cst.UnaryOperation):
            return not isinstance(expr.operator, cst.Not) and self.is_tensor(expr.expression, depth)
        if isinstance(expr, cst.Comparison):
            is_numeric = all(
                isinstance(part.operator, cst.Equal | cst.NotEqual | cst.LessThan | cst.GreaterThan
                           | cst.LessThanEqual | cst.GreaterThanEqual)
                for part in expr.comparisons
            )  # fmt: skip
            return is_numeric and self.is_tensor(expr.left, depth)
        if isinstance(expr, cst.Subscript):
            return self.is_tensor(expr.value, depth)
        return isinstance(expr, cst.Call) and self._is_tensor_call(expr, depth)

    def _is_tensor_call(self, call: cst.Call, depth: int) -> bool:
        facts = self.facts
        if isinstance(call.func, cst.Name | cst.Attribute) and facts.is_model(call.func):
            return True
        if facts.loss_kind(call):
            return True
        name = facts.method(call)
        if name in ("to", "cuda"):
            arguments = positional(call)
            is_host = bool(arguments) and (literal(arguments[0]) or "").startswith("cpu")
            return not is_host and not facts.is_model(facts.owner(call)) and (
                name == "cuda" or self._is_device(arguments[0] if arguments else None)
                or self.is_tensor(facts.owner(call), depth)
            )  # fmt: skip
        if _FUNCTIONS.search(facts.script.meaning(call.func)):
            return any(self.is_tensor(argument, depth) for argument in positional(call))
        if name and name not in _HOST_METHODS:
            return self.is_tensor(facts.owner(call), depth)
        function = facts.flow.function_of(call)
        if function is None or facts.script.code(call.func).startswith("self."):
            return False
        returned = [
            node.value for node in facts.script.within(function)
            if isinstance(node, cst.Return) and node.value is not None
        ]  # fmt: skip
        return bool(returned) and all(
            self.is_tensor(value, depth) or self._is_list_of_tensors(value, depth)
            for value in returned
        )

    def _is_list_of_tensors(self, returned: cst.BaseExpression, depth: int) -> bool:
        """Whether a value is a list that starts empty and is appended tensors."""
        if not isinstance(returned, cst.Name):
            return False
        facts, scope = self.facts, self.facts.script.scope(returned)
        values = [binding.value for binding in facts.flow.bindings(returned.value, scope)]
        is_empty = [isinstance(value, cst.List) and not value.elements for value in values]
        items = [
            positional(call)[0] for call in facts.methods("append")
            if facts.code(facts.owner(call)) == returned.value and positional(call)
            and facts.script.scope(call) is scope
        ]  # fmt: skip
        return (
            is_empty == [True]
            and bool(items)
            and all(self.is_tensor(item, depth) for item in items)
        )

    def _is_device(self, expr: cst.BaseExpression | None) -> bool:
        """Whether an argument of ``to()`` is a device other than the CPU, and no dtype."""
        if expr is None:
            return False
        name = literal(expr) if not isinstance(expr, cst.Name) else None
        if name is not None:
            return name.startswith(("cuda", "mps", "xpu"))
        code = self.facts.code(expr)
        return re.search(r"device|gpu|rank", code) is not None

    def _is_tensor_name(self, name: cst.Name, depth: int) -> bool:
        """Whether the last assignment before a name is a tensor; else the last one of all."""
        return self._is_bound_to_tensor(name.value, name, depth)

    def _is_bound_to_tensor(self, code: str, use: cst.BaseExpression, depth: int) -> bool:
        facts, script = self.facts, self.facts.script
        scope = script.scope(use)
        home = facts.flow.home(code.partition(".")[0], scope) if "." not in code else scope
        order = script.order
        bindings = sorted(facts.flow.bindings(code, home), key=lambda binding: order[binding.node])
        statement = script.statement(use)
        before = [
            binding for binding in bindings
            if order[binding.node] < order[use] and binding.node is not statement
        ]  # fmt: skip
        if before:
            return self.is_tensor(before[-1].value, depth)
        if bindings:  # assigned later in a loop: the value of the turn before
            return self.is_tensor(bindings[-1].value, depth)
        if code in parameters(home):
            arguments = [call.given.get(code) for call in facts.flow.calls_of(home)]
            known = [argument for argument in arguments if argument is not None]
            return bool(known) and all(self.is_tensor(argument, depth) for argument in known)
        return False


def tensors_of(facts: Facts) -> Tensors:
    """Return the script's only ``Tensors``, so that its answers are kept."""
    return facts.once(Tensors, lambda: Tensors(facts))
