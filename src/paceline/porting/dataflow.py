"""Traces where a script's values come from, and what they are called in other functions.

    origins   a name -> the calls it may come from: by assignments, arguments, ``return``
    express   an expression in one function -> its name in another: by arguments, ``self.x``
    around    a node -> the loops around it, in its function and around each call of that

Everything is read from the tree; what is not clear without running the script is not derived. Above
300 lines, since names, values and calls are traced through one another. This module must not know
what its results are used for.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import libcst as cst

from .tree import Binding, CannotDerive, Scope, SourceTree, by_name, positional

_WITHOUT = ("torch.no_grad", "torch.inference_mode", "autograd.no_grad")
_DEPTH = 8
AnyLoop: TypeAlias = cst.For | cst.While


class FunctionCall(NamedTuple):
    """A call of a function, with the argument that it passes for each parameter."""

    node: cst.Call
    given: dict[str, cst.BaseExpression]


class Flow:
    """The data flow of one script.

    Attributes:
        functions: the script's functions by name.
        classes: its classes by name.
    """

    def __init__(self, script: SourceTree) -> None:
        self.script = script
        self._bindings: dict[tuple[str, Scope], list[Binding]] = {}
        self._globals = {
            (name.name.value, script.scope(node))
            for node in script.nodes
            if isinstance(node, cst.Global)
            for name in node.names
        }
        for binding in script.bindings:
            self._bindings.setdefault((binding.name, self._scope_of(binding)), []).append(binding)
        self._being_traced: set[cst.Call] = set()
        """Calls whose object is being traced, to end recursion."""
        self._targets = {
            (name.value, script.scope(node))
            for node in script.nodes
            if isinstance(node, cst.For)
            for name in script.within(node.target)
            if isinstance(name, cst.Name)
        }
        self.functions = {
            function.name.value: function
            for function in script.nodes
            if isinstance(function, cst.FunctionDef)
        }
        self.classes = {
            definition.name.value: definition
            for definition in script.nodes
            if isinstance(definition, cst.ClassDef)
        }

    def _scope_of(self, binding: Binding) -> Scope:
        scope = self.script.scope(binding.node)
        return self.script.module if (binding.name, scope) in self._globals else scope

    # -- names ----------------------------------------------------------------------------------

    def home(self, name: str, scope: Scope) -> Scope:
        """Return the function or the module that a name used in ``scope`` belongs to."""
        while not isinstance(scope, cst.Module):
            is_here = (name, scope) in self._bindings or (name, scope) in self._targets
            if (name, scope) in self._globals:
                return self.script.module
            if is_here or name in parameters(scope):
                return scope
            scope = self.script.scope(scope)
        return scope

    def bindings(self, name: str, scope: Scope) -> list[Binding]:
        """Return the assignments to a name, or to an attribute by its text, in this scope."""
        return self._bindings.get((name, scope), [])

    def owner(self, scope: Scope) -> cst.ClassDef | None:
        """Return the class whose method this is; None if it is no method."""
        block = self.script.parents.get(scope)
        owner = block and self.script.parents.get(block)
        return owner if isinstance(owner, cst.ClassDef) else None

    def calls_of(self, function: Scope) -> list[FunctionCall]:
        """Return a function's calls by its name, by its class if it is ``__init__``, and spawns."""
        if isinstance(function, cst.Module):
            return []
        owner, name = self.owner(function), function.name.value
        if owner is not None and name == "__init__":
            name = owner.name.value
        names = parameters(function)[owner is not None :]
        calls = []
        for call in self.script.calls(name):
            is_same_function = self._names(call.func, function, name) or self.is_of(call, owner)
            if is_same_function and not self._stands_in(call, function):
                given = dict(zip(names, positional(call), strict=False))
                calls.append(FunctionCall(call, given | by_name(call)))
        for call in self.script.calls("spawn"):
            if positional(call) and self.script.code(positional(call)[0]) == name:
                spawn_args = by_name(call).get("args")
                elements = spawn_args.elements if isinstance(spawn_args, cst.Tuple) else ()
                values = [element.value for element in elements]
                calls.append(FunctionCall(call, dict(zip(names[1:], values, strict=False))))
        return calls

    def _names(self, expr: cst.BaseExpression, definition: cst.CSTNode, name: str) -> bool:
        """Whether an expression is the name of a function or a class; see ``SourceTree.beside``."""
        is_beside = self.script.is_beside(definition)
        if is_beside and not self.script.is_beside(expr):
            return self.script.name_beside(expr) == name
        is_same_file = is_beside or not self.script.is_beside(expr)
        return is_same_file and isinstance(expr, cst.Name) and self.script.code(expr) == name

    def is_of(self, call: cst.Call, owner: cst.ClassDef | None) -> bool:
        """Whether a method is called on an object of this class, as far as that can be seen."""
        if owner is None or not isinstance(call.func, cst.Attribute):
            return False
        if self.script.code(call.func.value) == "self":
            return self.owner(self.script.scope(call)) is owner
        if (self.script.code(call.func.value), self.script.scope(call)) in self._targets:
            return True  # for layer in layers: layer.train(...)
        if call in self._being_traced:
            return False  # its object depends on itself
        self._being_traced.add(call)
        origins = self.origins(call.func.value)
        self._being_traced.discard(call)
        makers = [origin.func for origin in origins if isinstance(origin, cst.Call)]
        return any(self._names(maker, owner, owner.name.value) for maker in makers)

    def _stands_in(self, node: cst.CSTNode, function: cst.CSTNode) -> bool:
        while node is not self.script.module and node is not function:
            node = self.script.parents[node]
        return node is function

    # -- where something comes from -------------------------------------------------------------

    def origins(self, expr: cst.BaseExpression, depth: int = 0) -> list[cst.BaseExpression]:
        """Return the expressions, mostly calls, that may have made the value of an expression."""
        if depth > _DEPTH:
            return []
        if isinstance(expr, cst.IfExp):
            parts = (expr.body, expr.orelse)
            return [origin for part in parts for origin in self.origins(part, depth + 1)]
        if isinstance(expr, cst.Name | cst.Attribute):
            return [
                origin
                for value, place in self._values(expr)
                for origin in self._part(value, place, depth + 1)
            ]
        return self._part(expr, None, depth)

    def _values(
        self, expr: cst.Name | cst.Attribute
    ) -> Iterator[tuple[cst.BaseExpression, int | None]]:
        """Yield what is assigned to a name anywhere, each with its place in an unpacking."""
        code, scope = self.script.code(expr), self.script.scope(expr)
        if isinstance(expr, cst.Name):
            home = self.home(code, scope)
            yield from ((binding.value, binding.place) for binding in self.bindings(code, home))
            if code in parameters(home):
                yield from (
                    (call.given[code], None) for call in self.calls_of(home) if code in call.given
                )
            return
        for binding in self.script.bindings:
            is_same = not code.startswith("self.") or self.owner(
                self.script.scope(binding.node)
            ) is self.owner(scope)
            if binding.name == code and is_same:
                yield binding.value, binding.place

    def _part(
        self, value: cst.BaseExpression, place: int | None, depth: int
    ) -> list[cst.BaseExpression]:
        """Return the origins of a value, or of one of several that a script's function returns."""
        if isinstance(value, cst.Name | cst.Attribute | cst.IfExp):
            return self.origins(value, depth)
        function = self.function_of(value)
        if function is None or depth > _DEPTH:
            return [value] if place is None else []
        origins = []
        for node in self.script.within(function):
            if not isinstance(node, cst.Return) or node.value is None:
                continue
            parts = node.value.elements if isinstance(node.value, cst.Tuple) else ()
            if place is None:
                origins += self.origins(node.value, depth + 1)
            elif place < len(parts):
                origins += self.origins(parts[place].value, depth + 1)
        return origins or [value]

    def function_of(self, value: cst.BaseExpression) -> cst.FunctionDef | None:
        """Return the function of the script that is called here; None if it is none."""
        if not isinstance(value, cst.Call):
            return None
        code = self.script.code(value.func)
        name = "" if self.script.is_beside(value) else self.script.name_beside(value.func)
        function = self.functions.get(name or code.removeprefix("self."))
        if function is None or (not name and isinstance(value.func, cst.Attribute)):
            return function  # a method of self
        return function if self._names(value.func, function, name or code) else None

    def reached(self, nodes: list[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return these nodes, and the script's functions that are called from them."""
        reached = list(nodes)
        for node in reached:
            for part in self.script.within(node):
                function = self.function_of(part) if isinstance(part, cst.Call) else None
                if function is not None and function not in reached:
                    reached.append(function)
        return reached

    # -- from one function to another -----------------------------------------------------------

    def taken_as(self, expr: cst.BaseExpression, goal: Scope) -> str:
        """Return the parameter that a name becomes in a function called once, otherwise `express`.

        Raises:
            CannotDerive: it cannot be seen.
        """
        calls, code = self.calls_of(goal), self.script.code(expr)
        home = self.home(code, self.script.scope(expr))
        bindings = [
            binding
            for binding in self.bindings(code, home)
            if binding.value not in [call.node for call in calls]
        ]
        if len(calls) == len(bindings) == 1 and isinstance(expr, cst.Name):
            for name, value in calls[0].given.items():
                is_same = isinstance(value, cst.Name) and self.script.code(value) == code
                if is_same and self.home(code, self.script.scope(value)) is home:
                    return name
        return self.express(expr, goal)

    def express(
        self, expr: cst.BaseExpression, goal: Scope, depth: int = 0, *, is_bound: bool = False
    ) -> str:
        """Return what an expression is called in ``goal``.

        Args:
            is_bound: whether ``goal`` is to bind another object to it: an attribute is then not
                called by the name of what it was first set to.

        Raises:
            CannotDerive: it cannot be seen.
        """
        if depth > _DEPTH or not isinstance(expr, cst.Name | cst.Attribute):
            raise CannotDerive
        code, scope = self.script.code(expr), self.script.scope(expr)
        root = code.partition(".")[0]
        if root == "self":
            owner = self.owner(scope)
            if owner is None:
                raise CannotDerive
            if self.owner(goal) is owner:
                return code
            with suppress(CannotDerive):
                if not is_bound:
                    return self.express(self._attribute(owner, code), goal, depth + 1)
            return code.replace("self", self.instance(owner, goal), 1)
        home = self.home(root, scope)
        if home is self.home(root, goal) and self._is_visible(root, home, goal):
            return code
        if alias := self._kept_as(code, home, goal):
            return alias
        if not isinstance(expr, cst.Name):
            raise CannotDerive
        if code in parameters(home):
            calls = self.calls_with_gradients(home) or self.calls_of(home)
            arguments = [call.given.get(code) for call in calls]
            names = {
                self.express(argument, goal, depth + 1, is_bound=is_bound)
                for argument in arguments
                if argument is not None
            }
            if len(names) != 1 or None in arguments:
                raise CannotDerive
            return names.pop()
        values = self.bindings(code, home)
        if len(values) != 1 or values[0].place is not None:
            raise CannotDerive
        return self.express(values[0].value, goal, depth + 1, is_bound=is_bound)

    def _is_visible(self, name: str, home: Scope, goal: Scope) -> bool:
        """Whether what a name stands for is seen in a function: not across files."""
        if home is not self.script.module:
            return True
        files = {self.script.is_beside(binding.node) for binding in self.bindings(name, home)}
        return not files or files == {self.script.is_beside(goal)}

    def _kept_as(self, name: str, home: Scope, goal: Scope) -> str:
        """Return ``self.x`` where ``__init__`` keeps its argument as that, in a method; or ""."""
        is_argument = isinstance(home, cst.FunctionDef) and name in parameters(home)
        if not is_argument or self.owner(home) is None or self.owner(goal) is not self.owner(home):
            return ""
        kept = [
            target
            for value, target in self.script.assigned
            if target.startswith("self.") and self.script.scope(value) is home
            and self.script.code(value) == name
        ]  # fmt: skip
        return kept[0] if kept else ""

    def instance(self, owner: cst.ClassDef, goal: Scope) -> str:
        """Return what the only object of a class is called in a function.

        Raises:
            CannotDerive: there are several, or it has no name there.
        """
        made = [
            binding
            for binding in self.script.bindings
            if isinstance(binding.value, cst.Call)
            and self._names(binding.value.func, owner, owner.name.value)
        ]
        if len(made) != 1 or self.home(made[0].name, goal) is not self._scope_of(made[0]):
            raise CannotDerive
        return made[0].name

    def _attribute(self, owner: cst.ClassDef, code: str) -> cst.BaseExpression:
        """Return what ``self.x`` is first set to in ``__init__``."""
        for value, target in self.script.assigned:
            scope = self.script.scope(value)
            name = scope.name.value if isinstance(scope, cst.FunctionDef) else ""
            if (target, name) == (code, "__init__") and self.owner(scope) is owner:
                return value
        raise CannotDerive

    # -- the surroundings of a node -------------------------------------------------------------

    def around(self, node: cst.CSTNode, depth: int = 0) -> list[list[AnyLoop]]:
        """Return the loops around a node, innermost first, for each way on which it is reached."""
        here = [ancestor for ancestor in self.script.up(node) if isinstance(ancestor, AnyLoop)]
        calls = self.calls_of(self.script.scope(node)) if depth < _DEPTH else []
        if not calls:
            return [here]
        return [[*here, *rest] for call in calls for rest in self.around(call.node, depth + 1)]

    def around_steps(self, node: cst.CSTNode, depth: int = 0) -> list[list[AnyLoop]]:
        """Return what `around` does, without the ways on which no gradient is computed."""
        if self._is_without_gradients(node):
            return []
        here = [ancestor for ancestor in self.script.up(node) if isinstance(ancestor, AnyLoop)]
        calls = self.calls_of(self.script.scope(node)) if depth < _DEPTH else []
        if not calls:
            return [here]
        return [
            [*here, *rest] for call in calls for rest in self.around_steps(call.node, depth + 1)
        ]

    def calls_with_gradients(self, function: Scope) -> list[FunctionCall]:
        """Return the calls of a function, without those that can only validate."""
        return [
            call for call in self.calls_of(function) if not self._is_without_gradients(call.node)
        ]

    def _is_without_gradients(self, node: cst.CSTNode) -> bool:
        """Whether a node is under ``torch.no_grad()`` or ``inference_mode()`` in its function."""
        for ancestor in self.script.up(node):
            held: list[cst.BaseExpression] = []
            if isinstance(ancestor, cst.With):
                held = [item.item for item in ancestor.items]
            elif isinstance(ancestor, cst.FunctionDef):
                held = [decorator.decorator for decorator in ancestor.decorators]
            functions = (part.func if isinstance(part, cst.Call) else part for part in held)
            if any(self.script.meaning(part).endswith(_WITHOUT) for part in functions):
                return True
        return False

    def is_repeated(self, scope: Scope) -> bool:
        """Whether a function is called in a loop, or by a function that is."""
        return any(way for call in self.calls_of(scope) for way in self.around(call.node))

    def is_conditional(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether a flag controls a node, here or around all calls of its function."""
        if any(
            isinstance(ancestor, cst.If) and self._is_flag(ancestor.test)
            for ancestor in self.script.up(node)
        ):
            return True
        calls = self.calls_of(self.script.scope(node)) if depth <= _DEPTH else []
        return bool(calls) and all(self.is_conditional(call.node, depth + 1) for call in calls)

    def _is_flag(self, test: cst.BaseExpression) -> bool:
        """Whether the user who starts the script decides this, not the machine's accelerators."""
        parts, texts = self.script.inside(test), [self.script.code(test)]
        texts += [self.script.code(value) for value, name in self.script.assigned if name in parts]
        return not any("__name__" in text or "device_count" in text for text in texts)


def parameters(scope: Scope) -> list[str]:
    """Return the names of a function's parameters; empty for a module."""
    if isinstance(scope, cst.Module):
        return []
    params = scope.params
    listed_params = (*params.posonly_params, *params.params, *params.kwonly_params)
    return [parameter.name.value for parameter in listed_params]
