"""Where a script's training loop is, and what its names are called elsewhere in the text.

    step call -> the loop around it, in this function or in its caller's -> loader, optimizer
    an expression in one function -> the same thing in another: by arguments, ``self.x``, aliases

Everything is read from the tree; what is not clear without running the script is not derived. This
module must not know what is done with what it finds.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from .syntax import Scope, Source

_DEPTH = 8
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class CannotDerive(Exception):
    """The script is written in a way that is not followed."""


class Loop(NamedTuple):
    """The loop over batches, with its expressions as its own function has them."""

    node: ast.For
    loader: ast.expr
    optimizer: ast.expr
    optimizer_scope: Scope


class Call(NamedTuple):
    """A call of a function, with what it gives to each parameter."""

    node: ast.Call
    given: dict[str, ast.expr]


class Flow:
    """What flows where in one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._functions = [one for one in ast.walk(source.tree) if isinstance(one, Function)]
        self._zeroed = {
            source.code(one.func.value)
            for one in source.calls("zero_grad")
            if isinstance(one.func, ast.Attribute)
        }

    # -- the loop -------------------------------------------------------------------------------

    def loop(self) -> Loop:
        """The one loop whose body makes a step.

        Raises:
            CannotDerive: there is none over a loader, or there are several.
        """
        found = {loop.node: loop for loop in self._loops()}
        if len(found) != 1:
            raise CannotDerive
        return next(iter(found.values()))

    def _loops(self) -> Iterator[Loop]:
        for call in self.source.calls("step"):
            optimizer = self._stepped(call)
            if optimizer is None:
                continue
            for node in self._around(call):
                loader = self._iterated(node)
                if loader is not None:
                    yield Loop(node, loader, optimizer, self.source.scope(call))

    def _stepped(self, call: ast.Call) -> ast.expr | None:
        """The optimizer of ``optimizer.step()`` or ``scaler.step(optimizer)``; else None."""
        if not isinstance(call.func, ast.Attribute):
            return None
        for one in (call.func.value, *call.args[:1]):
            if self.source.code(one) in self._zeroed and isinstance(one, ast.Name | ast.Attribute):
                return one
        return None

    def _around(self, node: ast.AST, depth: int = 0) -> Iterator[ast.For]:
        """The innermost loop around a node, in its function or around each call of that."""
        scope, parent = self.source.scope(node), self.source.parent(node)
        while parent is not scope:
            if isinstance(parent, ast.For):
                yield parent
                return
            if isinstance(parent, ast.While):
                raise CannotDerive
            parent = self.source.parent(parent)
        if isinstance(scope, Function) and depth < _DEPTH:
            for call in self.calls_of(scope):
                yield from self._around(call.node, depth + 1)

    def _iterated(self, loop: ast.For) -> ast.expr | None:
        """The loader of ``for batch in tqdm(loader)``; None where it is no name."""
        found, scope = loop.iter, self.source.scope(loop)
        for _ in range(_DEPTH):
            if isinstance(found, ast.Call):
                is_several = self.source.meaning(found.func) in ("zip", "range")
                if is_several or not found.args:
                    return None
                found = found.args[0]
                continue
            value = self._local(found, scope) if isinstance(found, ast.Name) else None
            if not isinstance(value, ast.Call) or self.makes_loader(value) or not value.args:
                break
            found = value.args[0]  # bar = tqdm(loader)
        return found if isinstance(found, ast.Name | ast.Attribute) else None

    def makes_loader(self, value: ast.expr | None) -> bool:
        """Whether this is ``DataLoader(...)``, or a call of a function that makes one."""
        if not isinstance(value, ast.Call):
            return False
        name = self.source.meaning(value.func).rpartition(".")[2]
        if name == "DataLoader":
            return True
        makers = [self.source.scope(one) for one in self.source.calls("DataLoader")]
        return any(isinstance(one, Function) and one.name == name for one in makers)

    # -- from one function to another -----------------------------------------------------------

    def express(
        self, expr: ast.expr, scope: Scope, goal: Scope, uses: list[ast.stmt], depth: int = 0
    ) -> str:
        """What ``expr`` of ``scope`` is called in ``goal``.

        Args:
            uses: gets the statements of ``goal`` that hand it on.

        Raises:
            CannotDerive: nobody can say.
        """
        if depth > _DEPTH or not isinstance(expr, ast.Name | ast.Attribute):
            raise CannotDerive
        code = self.source.code(expr)
        if scope is goal:
            return code
        if isinstance(expr, ast.Attribute):
            owner = self._owner(scope)
            if owner is None or not code.startswith("self."):
                raise CannotDerive
            if self._owner(goal) is owner:
                return code
            value, where = self._attribute(owner, code)
            return self.express(value, where, goal, uses, depth + 1)
        if isinstance(scope, Function) and expr.id in _parameters(scope):
            names = {
                self._through(call, expr.id, goal, uses, depth) for call in self.calls_of(scope)
            }
            if len(names) != 1:
                raise CannotDerive
            return names.pop()
        value_here = self._local(expr, scope)
        if value_here is None:
            raise CannotDerive
        return self.express(value_here, scope, goal, uses, depth + 1)

    def _through(
        self, call: Call, parameter: str, goal: Scope, uses: list[ast.stmt], depth: int
    ) -> str:
        if parameter not in call.given:
            raise CannotDerive
        caller = self.source.scope(call.node)
        if caller is goal:
            uses.append(self.source.statement(call.node))
        return self.express(call.given[parameter], caller, goal, uses, depth + 1)

    def calls_of(self, function: Function) -> list[Call]:
        """Calls of a function by its name, of a class where it is ``__init__``, and spawns."""
        owner = self._owner(function)
        name = function.name if function.name != "__init__" or owner is None else owner.name
        names = _parameters(function)[owner is not None :]
        calls = [
            _given(one, one.args, names)
            for one in self.source.calls(name)
            if isinstance(one.func, ast.Name) or owner is not None
        ]
        for one in self.source.calls("spawn"):
            if one.args and self.source.code(one.args[0]) == name:
                more = next((word.value for word in one.keywords if word.arg == "args"), None)
                handed = more.elts if isinstance(more, ast.Tuple) else []
                calls.append(_given(one, handed, names[1:]))
        return calls

    def _attribute(self, owner: ast.ClassDef, code: str) -> tuple[ast.expr, Scope]:
        """What ``self.x`` is first set to in ``__init__``."""
        for method in owner.body:
            if isinstance(method, Function) and method.name == "__init__":
                for node in ast.walk(method):
                    if isinstance(node, ast.Assign) and self.source.code(node.targets[0]) == code:
                        return node.value, method
        raise CannotDerive

    def _local(self, name: ast.Name, scope: Scope) -> ast.expr | None:
        """The value of the only assignment to a name in a scope."""
        values = [
            one.value
            for one in self.statements(scope)
            if isinstance(one, ast.Assign) and self.source.code(one.targets[0]) == name.id
        ]
        return values[0] if len(values) == 1 else None

    def _owner(self, scope: ast.AST) -> ast.ClassDef | None:
        parent = self.source.parent(scope)
        return parent if isinstance(parent, ast.ClassDef) else None

    def statements(self, scope: Scope) -> Iterator[ast.stmt]:
        """All statements of a scope, those inside blocks included, in the order of the text."""
        found = [
            one
            for one in ast.walk(scope)
            if isinstance(one, ast.stmt) and one is not scope and self.source.scope(one) is scope
        ]
        return iter(sorted(found, key=lambda one: one.lineno))

    def binder(self, code: str, scope: Scope) -> ast.stmt | None:
        """The last statement that gives a name its value; None for a parameter.

        Raises:
            CannotDerive: it has none here.
        """
        found = None
        for one in self.statements(scope):
            targets = one.targets if isinstance(one, ast.Assign) else []
            named = [t for target in targets for t in getattr(target, "elts", [target])]
            if isinstance(one, ast.AnnAssign) and one.value is not None:
                named = [one.target]
            if any(self.source.code(target) == code for target in named):
                found = one
        if found is None and not (isinstance(scope, Function) and code in _parameters(scope)):
            raise CannotDerive
        return found

    def is_conditional(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a flag decides about a node, here or around all calls of its function."""
        scope = self.source.scope(node)
        one = self.source.parent(node)
        while one is not scope:
            if isinstance(one, ast.If) and self._is_flag(one.test):
                return True
            one = self.source.parent(one)
        if not isinstance(scope, Function) or depth > _DEPTH:
            return False
        calls = self.calls_of(scope)
        return bool(calls) and all(self.is_conditional(call.node, depth + 1) for call in calls)

    def _is_flag(self, test: ast.expr) -> bool:
        """Whether this is up to who starts the script, and not to the machine's accelerators."""
        parts = {self.source.code(one) for one in ast.walk(test) if isinstance(one, ast.expr)}
        told = [self.source.code(test)]
        told += [
            self.source.code(one.value)
            for one in ast.walk(self.source.tree)
            if isinstance(one, ast.Assign) and self.source.code(one.targets[0]) in parts
        ]
        return not any("__name__" in text or "device_count" in text for text in told)

    def place(self, scope: Scope, binders: list[ast.stmt], uses: list[ast.stmt]) -> ast.stmt:
        """The statement after which all of these are bound and nothing is used yet.

        Raises:
            CannotDerive: there is no such place.
        """
        chains = [self._chain(one, scope) for one in (*binders, *uses)]
        shared = [block for block in chains[0] if all(block in chain for chain in chains)]
        if not binders or not shared:
            raise CannotDerive
        block = shared[-1]
        last = max(chain[block] for chain in chains[: len(binders)])
        if any(chain[block] <= last for chain in chains[len(binders) :]):
            raise CannotDerive
        owner, field = block
        found: ast.stmt = getattr(owner, field)[last]
        return found

    def _chain(self, one: ast.AST, scope: Scope) -> dict[tuple[ast.AST, str], int]:
        """Every block that holds a statement, outermost first, with its place there."""
        chain: dict[tuple[ast.AST, str], int] = {}
        while one is not scope:
            parent = self.source.parent(one)
            for field in ("body", "orelse", "finalbody"):
                block = getattr(parent, field, [])
                if isinstance(block, list) and one in block:
                    chain[parent, field] = block.index(one)
            one = parent
        return dict(reversed(chain.items()))


def _given(call: ast.Call, positional: list[ast.expr], names: list[str]) -> Call:
    given = dict(zip(names, positional, strict=False))
    words = {word.arg: word.value for word in call.keywords if word.arg is not None}
    return Call(call, {**given, **words})


def _parameters(function: Function) -> list[str]:
    every = function.args
    return [one.arg for one in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
