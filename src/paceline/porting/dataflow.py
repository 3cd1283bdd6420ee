"""Where a script's training loop is, and what its names are called elsewhere in the text.

    step call -> the loop around it, in this function or in its caller's -> loader, optimizer
    an expression in one function -> the same thing in another: by arguments, ``self.x``, aliases

Everything is read from the tree; what is not clear without running the script is not derived. This
module must not know what is done with what it finds.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .reading import INIT, WRAP
from .tree import Block, CannotDerive, Scope, SourceTree, Statement, by_name, positional

_DEPTH = 8


class Loop(NamedTuple):
    """The loop over batches, with its expressions as its own function has them."""

    node: cst.For
    loader: cst.BaseExpression
    optimizer: cst.BaseExpression


class FunctionCall(NamedTuple):
    """A call of a function, with what it gives to each parameter."""

    node: cst.Call
    given: dict[str, cst.BaseExpression]


class Flow:
    """What flows where in one script."""

    def __init__(self, script: SourceTree) -> None:
        self.script = script
        self._zeroed = {
            script.code(one.func.value)
            for one in script.calls("zero_grad")
            if isinstance(one.func, cst.Attribute)
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
        for call in self.script.calls("step"):
            optimizer = self._stepped(call)
            for node in self._around(call) if optimizer else ():
                loader = self._iterated(node)
                if optimizer and loader:
                    yield Loop(node, loader, optimizer)

    def _stepped(self, call: cst.Call) -> cst.BaseExpression | None:
        """The optimizer of ``optimizer.step()`` or ``scaler.step(optimizer)``; else None."""
        if not isinstance(call.func, cst.Attribute):
            return None
        for one in (call.func.value, *positional(call)[:1]):
            if self.script.code(one) in self._zeroed and isinstance(one, cst.Name | cst.Attribute):
                return one
        return None

    def _around(self, node: cst.CSTNode, depth: int = 0) -> Iterator[cst.For]:
        """The innermost loop around a node, in its function or around each call of that."""
        for one in self.script.up(node):
            if isinstance(one, cst.For):
                yield one
                return
            if isinstance(one, cst.While):
                raise CannotDerive
        if depth < _DEPTH:
            for call in self._calls_of(self.script.scope(node)):
                yield from self._around(call.node, depth + 1)

    def _iterated(self, loop: cst.For) -> cst.BaseExpression | None:
        """The loader of ``for batch in tqdm(loader)``; None where it is no name."""
        found = loop.iter
        for _ in range(_DEPTH):
            if isinstance(found, cst.Call):
                is_several = self.script.meaning(found.func) in ("zip", "range")
                if is_several or not positional(found):
                    return None
                found = positional(found)[0]
                continue
            value = self._local(found) if isinstance(found, cst.Name) else None
            if not isinstance(value, cst.Call) or self.makes_loader(value) or not positional(value):
                break
            found = positional(value)[0]  # bar = tqdm(loader)
        return found if isinstance(found, cst.Name | cst.Attribute) else None

    def makes_loader(self, value: cst.BaseExpression | None) -> bool:
        """Whether this is ``DataLoader(...)``, or a call of a function that makes one."""
        if not isinstance(value, cst.Call):
            return False
        makers = [self.script.scope(one) for one in self.script.calls("DataLoader")]
        names = [one.name.value for one in makers if isinstance(one, cst.FunctionDef)]
        return self.script.meaning(value.func).rpartition(".")[2] in ("DataLoader", *names)

    # -- from one function to another -----------------------------------------------------------

    def express(
        self, expr: cst.BaseExpression, goal: Scope, uses: list[cst.CSTNode], depth: int = 0
    ) -> str:
        """What an expression is called in ``goal``.

        Args:
            uses: gets what of ``goal`` hands it on.

        Raises:
            CannotDerive: nobody can say.
        """
        if depth > _DEPTH or not isinstance(expr, cst.Name | cst.Attribute):
            raise CannotDerive
        code, scope = self.script.code(expr), self.script.scope(expr)
        if scope is goal:
            return code
        if isinstance(expr, cst.Attribute):
            owner = self._owner(scope)
            if owner is None or not code.startswith("self."):
                raise CannotDerive
            if self._owner(goal) is owner:
                return code
            return self.express(self._attribute(owner, code), goal, uses, depth + 1)
        if code in _parameters(scope):
            calls = self._calls_of(scope)
            names = {self._through(call, code, goal, uses, depth) for call in calls}
            if len(names) != 1:
                raise CannotDerive
            return names.pop()
        value = self._local(expr)
        if value is None:
            raise CannotDerive
        return self.express(value, goal, uses, depth + 1)

    def _through(
        self, call: FunctionCall, name: str, goal: Scope, uses: list[cst.CSTNode], depth: int
    ) -> str:
        if name not in call.given:
            raise CannotDerive
        if self.script.scope(call.node) is goal:
            uses.append(call.node)
        return self.express(call.given[name], goal, uses, depth + 1)

    def _calls_of(self, function: Scope) -> Iterator[FunctionCall]:
        """Calls of a function by its name, of a class where it is ``__init__``, and spawns."""
        if isinstance(function, cst.Module):
            return
        owner, name = self._owner(function), function.name.value
        if owner is not None and name == "__init__":
            name = owner.name.value
        names = _parameters(function)[owner is not None :]
        for one in self.script.calls(name):
            if isinstance(one.func, cst.Name) or owner is not None:
                given = dict(zip(names, positional(one), strict=False))
                yield FunctionCall(one, given | by_name(one))
        for one in self.script.calls("spawn"):
            if positional(one) and self.script.code(positional(one)[0]) == name:
                more = by_name(one).get("args")
                handed = more.elements if isinstance(more, cst.Tuple) else ()
                values = [each.value for each in handed]
                yield FunctionCall(one, dict(zip(names[1:], values, strict=False)))

    def _attribute(self, owner: cst.ClassDef, code: str) -> cst.BaseExpression:
        """What ``self.x`` is first set to in ``__init__``."""
        for value, target in self.script.assigned:
            scope = self.script.scope(value)
            name = scope.name.value if isinstance(scope, cst.FunctionDef) else ""
            if (target, name) == (code, "__init__") and self._owner(scope) is owner:
                return value
        raise CannotDerive

    def _local(self, name: cst.Name) -> cst.BaseExpression | None:
        """The value of the only assignment to a name in its scope."""
        values = [value for value, target in self.script.assigned if target == name.value]
        here = self.script.scope(name)
        values = [one for one in values if self.script.scope(one) is here]
        return values[0] if len(values) == 1 else None

    def _owner(self, scope: Scope) -> cst.ClassDef | None:
        """The class whose method this is."""
        block = self.script.parents.get(scope)
        owner = block and self.script.parents.get(block)
        return owner if isinstance(owner, cst.ClassDef) else None

    def binder(self, code: str, scope: Scope) -> Statement | None:
        """The last statement that gives a name its value; None for a parameter.

        Raises:
            CannotDerive: it has none here.
        """
        found = None
        for one in self.script.nodes:
            if isinstance(one, cst.AssignTarget | cst.AnnAssign):
                parts = getattr(one.target, "elements", None)
                named = [one.target] if parts is None else [each.value for each in parts]
                is_set = isinstance(one, cst.AssignTarget) or one.value is not None
                is_here = is_set and self.script.scope(one) is scope
                if is_here and code in map(self.script.code, named):
                    found = self.script.statement(one)
        if found is None and code not in _parameters(scope):
            raise CannotDerive
        return found

    def is_conditional(self, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether a flag decides about a node, here or around all calls of its function."""
        if any(isinstance(one, cst.If) and self._is_flag(one.test) for one in self.script.up(node)):
            return True
        calls = list(self._calls_of(self.script.scope(node))) if depth <= _DEPTH else []
        return bool(calls) and all(self.is_conditional(call.node, depth + 1) for call in calls)

    def _is_flag(self, test: cst.BaseExpression) -> bool:
        """Whether this is up to who starts the script, and not to the machine's accelerators."""
        parts, told = self.script.inside(test), [self.script.code(test)]
        told += [self.script.code(value) for value, name in self.script.assigned if name in parts]
        return not any("__name__" in text or "device_count" in text for text in told)

    def place(self, binders: list[cst.CSTNode], uses: list[cst.CSTNode]) -> cst.CSTNode:
        """The line after which all of these are bound and nothing is used yet.

        Raises:
            CannotDerive: there is no such place.
        """
        places = [self._blocks(one) for one in (*binders, *uses)]
        shared = [block for block in places[0] if all(block in one for one in places)]
        if not binders or not shared:
            raise CannotDerive
        last = max(one[shared[0]] for one in places[: len(binders)])
        if any(one[shared[0]] <= last for one in places[len(binders) :]):
            raise CannotDerive
        return shared[0].body[last]

    def _blocks(self, node: cst.CSTNode) -> dict[Block, int]:
        """Every block of its scope that holds a node, innermost first, with its place there."""
        found: dict[Block, int] = {}
        for one in self.script.up(node):
            if isinstance(one, Block):
                found[one] = list(one.body).index(node)  # type: ignore[arg-type]
            node = one
        return found


def _parameters(scope: Scope) -> list[str]:
    if isinstance(scope, cst.Module):
        return []
    every = scope.params
    listed = (*every.posonly_params, *every.params, *every.kwonly_params)
    return [one.name.value for one in listed]


class Parts:
    """What `prepare` would be given, by the names of one function.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found.
    """

    def __init__(self, script: SourceTree) -> None:
        self.flow = flow = Flow(script)
        self.loop = flow.loop()
        wraps = script.calls(WRAP)
        self.wraps = [script.statement(one) for one in wraps]
        models = [name for value, name in script.assigned if value in wraps]
        if len(set(models)) != 1 or len(models) != len(wraps):
            raise CannotDerive
        self.scope = script.scope(wraps[0])
        here = script.scope(self.loop.node)
        self.uses: list[cst.CSTNode] = [self.loop.node] if here is self.scope else []
        told = (self.loop.optimizer, self.loop.loader)
        self.names = [models.pop(), *(flow.express(one, self.scope, self.uses) for one in told)]
        self.is_flagged = all(flow.is_conditional(one) for one in [*script.calls(INIT), *wraps])
