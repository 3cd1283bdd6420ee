"""Finds what `prepare` is given, the function in which it has names, and the line for the call.

    the loop that trains -> the functions around it, outwards -> the first one that runs only once
    and has names for all: model, optimizer, loader, schedulers

Above 300 lines, since why there is no such function is told where it is looked for. This module
must not know what its results are used for.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import libcst as cst

from .dataflow import AnyLoop, Flow
from .endless import endless
from .indexed import check_visible
from .iterators import inner_loader
from .loops import Stepping
from .reading import INIT, WRAP
from .tree import CannotDerive, Scope, SourceTree

_DEPTH = 8
STARTED = "check the script that is started, which is read with the files of its folder"


class Parts:
    """What `prepare` is given, by its names in one function, and where.

    Attributes:
        training: the loop that trains, with its optimizers.
        loop: that loop.
        scope: the function, or the module.
        models, optimizers, schedulers: their names there.
        loader: its name there; None if there is none.
        endless: how a loop that takes its batches by hand becomes one over `pace.updates`, if so.
        before: the line of ``scope`` before which all of them exist.
        epochs: the loop over epochs; None if there is none.
        is_flagged: whether torch's own process group is made only if the user asks for it.

    Raises:
        CannotDerive: something cannot be found, or is made repeatedly.
    """

    loader: str | None

    def __init__(self, script: SourceTree) -> None:
        self.script, self.flow = script, Flow(script)
        self.training = Stepping(self.flow)
        self.loop = self.training.loop
        wraps = script.calls(WRAP)
        self.is_flagged = all(
            self.flow.is_conditional(call) for call in [*script.calls(INIT), *wraps]
        )
        self._models = self._find_models(wraps)
        self.endless = endless(self.flow, self.loop, [call for call, _ in self.training.steps])
        self.scope, use = self._choose_scope()
        outer = self.loops_around(use)
        self.epochs = next((loop for loop in reversed(outer) if loop is not self.loop.node), None)
        if self.epochs is None and use is not self.loop.node:
            self.epochs = self.loop.outer[-1] if self.loop.outer else None
        self._check_epochs()

    @property
    def names(self) -> list[str]:
        """The names of everything that `prepare` is given, in its order."""
        loader = [] if self.loader is None else [self.loader]
        return [*self.models, *self.optimizers, *loader, *self.schedulers]

    def _find_models(self, wraps: list[cst.Call]) -> list[cst.BaseExpression]:
        script = self.script
        targets = self._wrapped(wraps)
        if len(targets) == 1:
            return list(targets.values())
        all_models: dict[str, cst.BaseExpression] = {}
        for code, optimizer in self.training.optimizers.items():
            models = self.training.models(optimizer)
            if not models:
                raise CannotDerive(
                    f"line {script.line(optimizer)}: the model whose parameters {code} steps was "
                    "not found; make it of model.parameters(), with plain tensors in a "
                    "torch.nn.ParameterList([...])"
                )
            all_models |= models
        if not targets.keys() <= all_models.keys():
            raise CannotDerive
        return list(all_models.values())

    def _check_epochs(self) -> None:
        """Raise CannotDerive if another file may call the loop, with all that it is given."""
        is_given = not any(
            isinstance(origin, cst.Call)
            for optimizer in self.training.optimizers.values()
            for origin in self.flow.origins(optimizer)
        )
        if is_given and self.epochs is None and isinstance(self.scope, cst.FunctionDef):
            raise CannotDerive(
                f"line {self.script.line(self.loop.node)} trains in {self.scope.name.value}(), "
                "which gets its model and its optimizer from elsewhere, perhaps each epoch; "
                f"{STARTED}"
            )

    def _wrapped(self, wraps: list[cst.Call]) -> dict[str, cst.BaseExpression]:
        """Return the names that wrapped models are assigned to, by their text."""
        script = self.script
        wrap_around = {id(node): wrap for wrap in wraps for node in (wrap, *script.up(wrap))}
        wrapped = [
            binding
            for binding in script.bindings
            if id(binding.value) in wrap_around and binding.place is None
        ]
        if len(wrapped) != len(wraps):
            raise CannotDerive
        nodes = {binding.name: binding.node for binding in wrapped}
        models: dict[str, cst.BaseExpression] = {}
        for name, node in nodes.items():
            if not isinstance(node, cst.Assign):
                raise CannotDerive
            models[name] = node.targets[0].target
        return models

    # -- in which function ----------------------------------------------------------------------

    def _choose_scope(self) -> tuple[Scope, cst.CSTNode]:
        """Return the innermost function that has names for all and runs once, and its way in.

        The way in is the node of the function that leads to the loop.
        """
        reason = self._shared_reason()
        for scope, use in self._scopes():
            if self.flow.is_repeated(scope):
                reason = self._trial_reason(scope, use) or reason
                continue
            if self._is_called_again(scope):
                lines = [str(self.script.line(call.node)) for call in self.flow.calls_of(scope)]
                calls = f"lines {', '.join(lines)} all call the function that trains"
                reason = self._trial_reason(scope, use, calls) or CannotDerive(
                    f"{calls}, but a run has one training loop: put them into separate scripts"
                )
                continue
            try:
                self._find_names(scope, use)
                return scope, use
            except CannotDerive as why:
                reason = why if why.why else reason
        scope, use = next(self._scopes())  # it may make the loader and get all else as arguments
        if not (self.flow.is_repeated(scope) or self._is_called_again(scope)):
            with suppress(CannotDerive):
                self._find_names(scope, use, self.flow.taken_as)
                return scope, use
        raise reason

    def _shared_reason(self) -> CannotDerive:
        """Return why no function has names for all; a loop that validates, too, has two loaders."""
        line, function = self.script.line(self.loop.node), self.script.scope(self.loop.node)
        calls = [str(self.script.line(call.node)) for call in self.flow.calls_of(function)]
        if len(calls) > 1 and isinstance(function, cst.FunctionDef):
            return CannotDerive(
                f"lines {', '.join(calls)} call {function.name.value}(), whose loop of line {line} "
                "trains; where it only validates call a function without optimizer.step()"
            )
        missing = "names for its model, its optimizer and its loader"
        if not calls and isinstance(function, cst.FunctionDef):
            return CannotDerive(
                f"line {line} trains in {function.name.value}(), which has no {missing}, or is "
                f"called from another file; {STARTED}"
            )
        return CannotDerive(
            f"the loop of line {line} trains, but no function that runs only once has {missing}"
        )

    def _trial_reason(self, scope: Scope, use: cst.CSTNode, calls: str = "") -> CannotDerive | None:
        """Return what to write if a function called repeatedly has names for all; else None."""
        ways = self.flow.calls_of(scope)
        if len(ways) > 1 and not calls:
            return None
        try:
            self._find_names(scope, use)
        except CannotDerive:
            return None
        names = ", ".join(self.names)
        over = "epochs" if self.loop.loader is not None else "updates"
        repeated = (
            f"line {self.script.line(ways[0].node)} calls the function that trains repeatedly"
        )
        return CannotDerive(
            f"{calls or repeated}, but a run is one training; if each call is a training of its "
            "own (a layer, a fold) write with pace.trial(): around the loop of line "
            f"{self.script.line(self._line)}, in it first {names} = "
            f"pace.prepare({names}), then for number in pace.{over}(n)"
        )

    def _is_called_again(self, scope: Scope) -> bool:
        """Whether a function is called more than once, other than in branches of one ``if``."""
        ways = [self._branches(call.node) for call in self.flow.calls_of(scope)]
        return any(
            not any(
                block in second and second[block] is not branch for block, branch in first.items()
            )
            for index, first in enumerate(ways)
            for second in ways[:index]
        )

    def _branches(self, node: cst.CSTNode) -> dict[cst.CSTNode, cst.CSTNode]:
        """Return every ``if`` and ``try`` around a node, with the branch that holds the node."""
        branches: dict[cst.CSTNode, cst.CSTNode] = {}
        for ancestor in self.script.up(node):
            if isinstance(ancestor, cst.If | cst.Try):
                branches[ancestor] = node
            node = ancestor
        return branches

    def _scopes(self) -> Iterator[tuple[Scope, cst.CSTNode]]:
        """Yield the functions from the loop's outwards, each with its node that leads to it."""
        scope, use = self.script.scope(self.loop.node), self.loop.node
        for _ in range(_DEPTH):
            yield scope, use
            calls = self.flow.calls_with_gradients(scope)
            if not calls:
                return
            ways = {self.script.scope(call.node): call.node for call in reversed(calls)}
            if len(ways) > 1:
                return
            ((scope, use),) = ways.items()  # type: ignore[assignment]  # a scope, as ways holds them

    def _find_names(
        self, scope: Scope, use: cst.CSTNode,
        express: Callable[[cst.BaseExpression, Scope], str] | None = None,
    ) -> None:  # fmt: skip
        """Find all names in a function, and the line before which they exist."""
        loops = self.loops_around(use)
        self._line = self.before = self.script.block_line(loops[-1] if loops else use)
        is_by_hand = self.loop.taken is not None and self.endless is None
        if (
            is_by_hand
            and self.loop.taken is not None
            and scope is self.script.scope(self.loop.node)
        ):
            self._before_iterators(self.loop.taken.iterations, scope)
        take_loader = express or partial(self.flow.express, is_bound=True)
        express = express or self.flow.express
        self.models = [express(model, scope) for model in self._models]
        self.optimizers = [
            express(optimizer, scope) for optimizer in self.training.optimizers.values()
        ]
        loader = self.loop.loader
        if self.endless is not None:
            self.loader = self._endless_loader(scope)
        else:
            self.loader = None if loader is None else take_loader(loader, scope)
        if self.loop.numbers is not None:
            assert isinstance(self.loop.node, cst.For)
            check_visible(self.flow, self.loop.node, scope, set(self.script.within(self._line)))
        for name in (*self.models, *self.optimizers, *([self.loader] if self.loader else [])):
            self._check_bound(name, scope)
        if loader is not None and (attribute := inner_loader(self.flow, loader)):
            self.loader = f"{self.loader}.{attribute}"
        self.schedulers = [
            scheduler_name
            for scheduler in self.training.schedulers().values()
            if (scheduler_name := self._scheduler(scheduler, scope)) is not None
        ]

    def _endless_loader(self, scope: Scope) -> str:
        """Return the name of an endless loop's loader in a function."""
        assert self.endless is not None
        if scope is not self.script.scope(self.loop.node):
            raise CannotDerive
        return self.endless.loader

    def _before_iterators(self, iterations: list[cst.Call], scope: Scope) -> None:
        """Move the line of `prepare` before the iterators, so that their loaders are prepared."""
        script, inside = self.script, set(self.script.within(self._line))
        block = script.parents[self._line]
        for call in (iteration for iteration in iterations if iteration not in inside):
            line = script.block_line(script.statement(call))
            if script.scope(call) is not scope or script.parents[line] is not block:
                raise CannotDerive(
                    f"line {script.line(call)} makes the iterator that the loop of line "
                    f"{script.line(self._line)} takes its batches from; create it right before "
                    "the loop, or write for batch in loader"
                )
            self.before = min(self.before, line, key=script.order.__getitem__)

    def loops_around(self, use: cst.CSTNode) -> list[AnyLoop]:
        """Return the loops of its function that a node is in, or is, innermost first."""
        return [node for node in (use, *self.script.up(use)) if isinstance(node, AnyLoop)]

    def _check_bound(self, name: str, scope: Scope) -> None:
        """Raise CannotDerive unless a name is assigned before the loop, and not inside it."""
        assignments = [binding.node for binding in self.flow.bindings(name, scope)]
        if self.flow.home(name.partition(".")[0], scope) is not scope or not assignments:
            return
        order, inside = self.script.order, set(self.script.within(self._line))
        if again := [node for node in assignments if node in inside]:
            raise CannotDerive(
                f"line {self.script.line(again[0])} creates {name} again in each iteration of the "
                f"loop of line {self.script.line(self._line)}, but a run trains one model on one "
                "loader: create it once before the loop, or make each iteration a training of its "
                "own: with pace.trial(): around what it creates and trains"
            )
        if not any(order[node] < order[self.before] for node in assignments):
            raise CannotDerive

    def _scheduler(self, scheduler: cst.BaseExpression, scope: Scope) -> str | None:
        """Return a scheduler's name in a function if it is always made; None: it stays as it is."""
        try:
            name = self.flow.express(scheduler, scope)
        except CannotDerive:
            return None
        assignments = [binding.node for binding in self.flow.bindings(name, scope)]
        is_sure = all(
            self.script.order[node] < self.script.order[self.before]
            and not any(isinstance(ancestor, cst.If) for ancestor in self._ancestors_beside(node))
            for node in assignments
        )
        return name if is_sure else None

    def _ancestors_beside(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node that do not hold the line of `prepare`."""
        shared = set(self.script.up(self.before))
        return (ancestor for ancestor in self.script.up(node) if ancestor not in shared)


def names_of(text: str) -> list[str] | None:
    """Return the names of model, optimizer, loader and schedulers; None if they are not found."""
    try:
        return Parts(SourceTree(text)).names
    except CannotDerive:
        return None
