"""What a script's names stand for, and what the same thing is called elsewhere in its text.

    origins   a name -> the calls it may come from: by assignments, arguments, ``return``
    express   an expression in one function -> its name in another: by arguments, ``self.x``
    around    a node -> the loops around it, in its function and around each call of that

Everything is read from the tree; what is not clear without running the script is not derived. This
module must not know what is done with what it finds.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import libcst as cst

from .tree import Binding, CannotDerive, Scope, SourceTree, by_name, positional

_DEPTH = 8
AnyLoop: TypeAlias = cst.For | cst.While


class FunctionCall(NamedTuple):
    """A call of a function, with what it gives to each parameter."""

    node: cst.Call
    given: dict[str, cst.BaseExpression]


class Flow:
    """What flows where in one script."""

    def __init__(self, script: SourceTree) -> None:
        self.script = script
        self._bindings: dict[tuple[str, Scope], list[Binding]] = {}
        self._globals = {
            (one.name.value, script.scope(node))
            for node in script.nodes
            if isinstance(node, cst.Global)
            for one in node.names
        }
        for one in script.bindings:
            self._bindings.setdefault((one.name, self._scope_of(one)), []).append(one)
        self._asked: set[cst.Call] = set()
        """Calls whose owner is being looked for."""
        self._targets = {
            (name.value, script.scope(node))
            for node in script.nodes
            if isinstance(node, cst.For)
            for name in script.within(node.target)
            if isinstance(name, cst.Name)
        }
        self.functions = {
            one.name.value: one for one in script.nodes if isinstance(one, cst.FunctionDef)
        }
        self.classes = {
            one.name.value: one for one in script.nodes if isinstance(one, cst.ClassDef)
        }

    def _scope_of(self, binding: Binding) -> Scope:
        scope = self.script.scope(binding.node)
        return self.script.module if (binding.name, scope) in self._globals else scope

    # -- names ----------------------------------------------------------------------------------

    def home(self, name: str, scope: Scope) -> Scope:
        """The function, or the module, that a name of ``scope`` belongs to."""
        while not isinstance(scope, cst.Module):
            is_here = (name, scope) in self._bindings or (name, scope) in self._targets
            if (name, scope) in self._globals:
                return self.script.module
            if is_here or name in parameters(scope):
                return scope
            scope = self.script.scope(scope)
        return scope

    def bindings(self, name: str, scope: Scope) -> list[Binding]:
        """The assignments to a name, or to an attribute by its text, in this scope."""
        return self._bindings.get((name, scope), [])

    def owner(self, scope: Scope) -> cst.ClassDef | None:
        """The class whose method this is."""
        block = self.script.parents.get(scope)
        owner = block and self.script.parents.get(block)
        return owner if isinstance(owner, cst.ClassDef) else None

    def calls_of(self, function: Scope) -> list[FunctionCall]:
        """Calls of a function by its name, of a class where it is ``__init__``, and spawns."""
        if isinstance(function, cst.Module):
            return []
        owner, name = self.owner(function), function.name.value
        if owner is not None and name == "__init__":
            name = owner.name.value
        names = parameters(function)[owner is not None :]
        found = []
        for one in self.script.calls(name):
            is_own = isinstance(one.func, cst.Name) or self._is_of(one, owner)
            if is_own and not self._stands_in(one, function):
                given = dict(zip(names, positional(one), strict=False))
                found.append(FunctionCall(one, given | by_name(one)))
        for one in self.script.calls("spawn"):
            if positional(one) and self.script.code(positional(one)[0]) == name:
                more = by_name(one).get("args")
                handed = more.elements if isinstance(more, cst.Tuple) else ()
                values = [each.value for each in handed]
                found.append(FunctionCall(one, dict(zip(names[1:], values, strict=False))))
        return found

    def _is_of(self, call: cst.Call, owner: cst.ClassDef | None) -> bool:
        """Whether a method is called of an object of this class, as far as that can be seen."""
        if owner is None or not isinstance(call.func, cst.Attribute):
            return False
        if self.script.code(call.func.value) == "self":
            return self.owner(self.script.scope(call)) is owner
        if (self.script.code(call.func.value), self.script.scope(call)) in self._targets:
            return True  # for layer in layers: layer.train(...)
        if call in self._asked:
            return False  # what leads to itself says nothing
        self._asked.add(call)
        made = self.origins(call.func.value)
        self._asked.discard(call)
        names = [self.script.meaning(one.func) for one in made if isinstance(one, cst.Call)]
        return owner.name.value in names

    def _stands_in(self, node: cst.CSTNode, function: cst.CSTNode) -> bool:
        while node is not self.script.module and node is not function:
            node = self.script.parents[node]
        return node is function

    # -- where something comes from -------------------------------------------------------------

    def origins(self, expr: cst.BaseExpression, depth: int = 0) -> list[cst.BaseExpression]:
        """What an expression may be, as the expressions that make it: mostly calls."""
        if depth > _DEPTH:
            return []
        if isinstance(expr, cst.IfExp):
            parts = (expr.body, expr.orelse)
            return [one for part in parts for one in self.origins(part, depth + 1)]
        if isinstance(expr, cst.Name | cst.Attribute):
            return [
                one
                for value, place in self._values(expr)
                for one in self._part(value, place, depth + 1)
            ]
        return self._part(expr, None, depth)

    def _values(
        self, expr: cst.Name | cst.Attribute
    ) -> Iterator[tuple[cst.BaseExpression, int | None]]:
        """What a name is given, anywhere."""
        code, scope = self.script.code(expr), self.script.scope(expr)
        if isinstance(expr, cst.Name):
            home = self.home(code, scope)
            yield from ((one.value, one.place) for one in self.bindings(code, home))
            if code in parameters(home):
                yield from (
                    (one.given[code], None) for one in self.calls_of(home) if code in one.given
                )
            return
        for one in self.script.bindings:
            is_same = not code.startswith("self.") or self.owner(
                self.script.scope(one.node)
            ) is self.owner(scope)
            if one.name == code and is_same:
                yield one.value, one.place

    def _part(
        self, value: cst.BaseExpression, place: int | None, depth: int
    ) -> list[cst.BaseExpression]:
        """A value, or one of several that a function of the script's own returns."""
        if isinstance(value, cst.Name | cst.Attribute | cst.IfExp):
            return self.origins(value, depth)
        function = self.function_of(value)
        if function is None or depth > _DEPTH:
            return [value] if place is None else []
        found = []
        for one in self.script.within(function):
            if not isinstance(one, cst.Return) or one.value is None:
                continue
            parts = one.value.elements if isinstance(one.value, cst.Tuple) else ()
            if place is None:
                found += self.origins(one.value, depth + 1)
            elif place < len(parts):
                found += self.origins(parts[place].value, depth + 1)
        return found or [value]

    def function_of(self, value: cst.BaseExpression) -> cst.FunctionDef | None:
        """The function of the script's own that is called here."""
        if not isinstance(value, cst.Call):
            return None
        name = self.script.code(value.func)
        return self.functions.get(name.removeprefix("self."))

    def reached(self, nodes: list[cst.CSTNode]) -> list[cst.CSTNode]:
        """These, and the functions of the script's own that are called from them."""
        found = list(nodes)
        for node in found:
            for one in self.script.within(node):
                function = self.function_of(one) if isinstance(one, cst.Call) else None
                if function is not None and function not in found:
                    found.append(function)
        return found

    # -- from one function to another -----------------------------------------------------------

    def taken_as(self, expr: cst.BaseExpression, goal: Scope) -> str:
        """What a function that is called once calls a name that it is given; else `express`.

        Raises:
            CannotDerive: nobody can say.
        """
        calls, code = self.calls_of(goal), self.script.code(expr)
        home = self.home(code, self.script.scope(expr))
        made = [
            one for one in self.bindings(code, home) if one.value not in [c.node for c in calls]
        ]
        if len(calls) == len(made) == 1 and isinstance(expr, cst.Name):
            for name, value in calls[0].given.items():
                is_same = isinstance(value, cst.Name) and self.script.code(value) == code
                if is_same and self.home(code, self.script.scope(value)) is home:
                    return name
        return self.express(expr, goal)

    def express(self, expr: cst.BaseExpression, goal: Scope, depth: int = 0) -> str:
        """What an expression is called in ``goal``.

        Raises:
            CannotDerive: nobody can say.
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
            return self.express(self._attribute(owner, code), goal, depth + 1)
        home = self.home(root, scope)
        if home is self.home(root, goal):
            return code
        if not isinstance(expr, cst.Name):
            raise CannotDerive
        if code in parameters(home):
            calls = self.calls_of(home)
            given = [one.given.get(code) for one in calls]
            names = {self.express(one, goal, depth + 1) for one in given if one is not None}
            if len(names) != 1 or None in given:
                raise CannotDerive
            return names.pop()
        values = self.bindings(code, home)
        if len(values) != 1 or values[0].place is not None:
            raise CannotDerive
        return self.express(values[0].value, goal, depth + 1)

    def _attribute(self, owner: cst.ClassDef, code: str) -> cst.BaseExpression:
        """What ``self.x`` is first set to in ``__init__``."""
        for value, target in self.script.assigned:
            scope = self.script.scope(value)
            name = scope.name.value if isinstance(scope, cst.FunctionDef) else ""
            if (target, name) == (code, "__init__") and self.owner(scope) is owner:
                return value
        raise CannotDerive

    # -- where something stands -----------------------------------------------------------------

    def around(self, node: cst.CSTNode, depth: int = 0) -> list[list[AnyLoop]]:
        """The loops around a node, innermost first, by each way on which it is reached."""
        here = [one for one in self.script.up(node) if isinstance(one, AnyLoop)]
        calls = self.calls_of(self.script.scope(node)) if depth < _DEPTH else []
        if not calls:
            return [here]
        return [[*here, *rest] for one in calls for rest in self.around(one.node, depth + 1)]

    def is_repeated(self, scope: Scope) -> bool:
        """Whether a function is called in a loop, or by one that is."""
        return any(way for one in self.calls_of(scope) for way in self.around(one.node))

    def is_conditional(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether a flag decides about a node, here or around all calls of its function."""
        if any(isinstance(one, cst.If) and self._is_flag(one.test) for one in self.script.up(node)):
            return True
        calls = self.calls_of(self.script.scope(node)) if depth <= _DEPTH else []
        return bool(calls) and all(self.is_conditional(call.node, depth + 1) for call in calls)

    def _is_flag(self, test: cst.BaseExpression) -> bool:
        """Whether this is up to who starts the script, and not to the machine's accelerators."""
        parts, told = self.script.inside(test), [self.script.code(test)]
        told += [self.script.code(value) for value, name in self.script.assigned if name in parts]
        return not any("__name__" in text or "device_count" in text for text in told)


def parameters(scope: Scope) -> list[str]:
    """The names of a function's parameters; a module has none."""
    if isinstance(scope, cst.Module):
        return []
    every = scope.params
    listed = (*every.posonly_params, *every.params, *every.kwonly_params)
    return [one.name.value for one in listed]
