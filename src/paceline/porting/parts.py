"""What `prepare` would be given: the names of one function, and the line before which they exist.

    the loop that trains -> the functions around it, outwards -> the first that is gone through once
    and has names for all: model, optimizer, loader, schedulers

This module must not know what is done with what it finds.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

import libcst as cst

from .dataflow import AnyLoop, Flow
from .endless import endless
from .indexed import check_visible
from .loops import Stepping
from .reading import INIT, WRAP
from .tree import CannotDerive, Scope, SourceTree

_DEPTH = 8


class Parts:
    """What `prepare` is given, by the names of one function, and where.

    Attributes:
        scope: that function, or the module.
        models, optimizers, loader, schedulers: their names there; loader None: there is none.
        endless: how a loop that takes its batches by hand becomes one over `pace.updates`; or None.
        before: the line of ``scope`` before which all of them exist.
        epochs: the loop over epochs; None: there is none.
        is_flagged: whether a group of torch's own is made only where somebody asks for it.

    Raises:
        CannotDerive: something cannot be found, or is made again and again.
    """

    loader: str | None

    def __init__(self, script: SourceTree) -> None:
        self.script, self.flow = script, Flow(script)
        self.training = Stepping(self.flow)
        self.loop = self.training.loop
        wraps = script.calls(WRAP)
        self.is_flagged = all(
            self.flow.is_conditional(one) for one in [*script.calls(INIT), *wraps]
        )
        self._models = self._find_models(wraps)
        self.endless = endless(self.flow, self.loop, [call for call, _ in self.training.steps])
        self.scope, use = self._settle()
        outer = self.loops_around(use)
        self.epochs = next((one for one in reversed(outer) if one is not self.loop.node), None)
        if self.epochs is None and use is not self.loop.node:
            self.epochs = self.loop.outer[-1] if self.loop.outer else None

    @property
    def names(self) -> list[str]:
        loader = [] if self.loader is None else [self.loader]
        return [*self.models, *self.optimizers, *loader, *self.schedulers]

    def _find_models(self, wraps: list[cst.Call]) -> list[cst.BaseExpression]:
        script = self.script
        targets = self._wrapped(wraps)
        if len(targets) == 1:
            return list(targets.values())
        found: dict[str, cst.BaseExpression] = {}
        for code, optimizer in self.training.optimizers.items():
            models = self.training.models(optimizer)
            if not models:
                raise CannotDerive(
                    f"line {script.line(optimizer)}: whose parameters {code} steps could not be "
                    "found; make it of model.parameters(), and plain tensors a model by "
                    "torch.nn.ParameterList([...])"
                )
            found |= models
        if not targets.keys() <= found.keys():
            raise CannotDerive
        return list(found.values())

    def _wrapped(self, wraps: list[cst.Call]) -> dict[str, cst.BaseExpression]:
        """What DistributedDataParallel's models are called, by their text."""
        script = self.script
        held = {id(one): wrap for wrap in wraps for one in (wrap, *script.up(wrap))}
        wrapped = [one for one in script.bindings if id(one.value) in held and one.place is None]
        if len(wrapped) != len(wraps):
            raise CannotDerive
        nodes = {one.name: one.node for one in wrapped}
        found: dict[str, cst.BaseExpression] = {}
        for name, node in nodes.items():
            if not isinstance(node, cst.Assign):
                raise CannotDerive
            found[name] = node.targets[0].target
        return found

    # -- in which function ----------------------------------------------------------------------

    def _settle(self) -> tuple[Scope, cst.CSTNode]:
        """The innermost function that has all of them and is gone through once."""
        reason = CannotDerive(
            f"the loop of line {self.script.line(self.loop.node)} trains, and no function that is "
            "gone through once has names for its model, its optimizer and its loader"
        )
        for scope, use in self._scopes():
            if self.flow.is_repeated(scope):
                reason = self._each_of_its_own(scope, use) or reason
                continue
            if self._is_called_again(scope):
                lines = [str(self.script.line(one.node)) for one in self.flow.calls_of(scope)]
                reason = CannotDerive(
                    f"lines {', '.join(lines)} all call what trains; a run has one loop: put them "
                    "into scripts of their own"
                )
                continue
            try:
                self._name(scope, use)
                return scope, use
            except CannotDerive as why:
                reason = why if why.why else reason
        scope, use = next(self._scopes())  # the loader may be made there, all else given to it
        if not (self.flow.is_repeated(scope) or self._is_called_again(scope)):
            with suppress(CannotDerive):
                self._name(scope, use, self.flow.taken_as)
                return scope, use
        raise reason

    def _each_of_its_own(self, scope: Scope, use: cst.CSTNode) -> CannotDerive | None:
        """What to write where a function that is called in a loop has names for all; None: it has
        not.
        """
        try:
            self._name(scope, use)
        except CannotDerive:
            return None
        call, names = self.flow.calls_of(scope)[0].node, ", ".join(self.names)
        over = "epochs" if self.loop.loader is not None else "updates"
        return CannotDerive(
            f"line {self.script.line(call)} calls what trains again and again, and a run is one "
            "training; where each call is one of its own (a layer, a fold) write with "
            f"pace.trial(): around the loop of line {self.script.line(self.loop.node)}, in it "
            f"first {names} = pace.prepare({names}), then for number in pace.{over}(n)"
        )

    def _is_called_again(self, scope: Scope) -> bool:
        """Whether a function is called more than once, and not in branches of one ``if``."""
        ways = [self._branches(one.node) for one in self.flow.calls_of(scope)]
        return any(
            not any(a in two and two[a] is not b for a, b in one.items())
            for number, one in enumerate(ways)
            for two in ways[:number]
        )

    def _branches(self, node: cst.CSTNode) -> dict[cst.CSTNode, cst.CSTNode]:
        """Every ``if`` and ``try`` around a node, with the branch that the node stands in."""
        found: dict[cst.CSTNode, cst.CSTNode] = {}
        for one in self.script.up(node):
            if isinstance(one, cst.If | cst.Try):
                found[one] = node
            node = one
        return found

    def _scopes(self) -> Iterator[tuple[Scope, cst.CSTNode]]:
        """The functions from the loop's own outwards, each with what in it leads to the loop."""
        scope, use = self.script.scope(self.loop.node), self.loop.node
        for _ in range(_DEPTH):
            yield scope, use
            calls = self.flow.calls_of(scope)
            if not calls:
                return
            ways = {self.script.scope(one.node): one.node for one in reversed(calls)}
            if len(ways) > 1:
                return
            ((scope, use),) = ways.items()  # type: ignore[assignment]  # a scope, as ways holds them

    def _name(
        self, scope: Scope, use: cst.CSTNode,
        express: Callable[[cst.BaseExpression, Scope], str] | None = None,
    ) -> None:  # fmt: skip
        """Find all names there, and the line before which they exist."""
        around = self.loops_around(use)
        self._line = self.before = self.script.block_line(around[-1] if around else use)
        is_by_hand = self.loop.taken is not None and self.endless is None
        if (
            is_by_hand
            and self.loop.taken is not None
            and scope is self.script.scope(self.loop.node)
        ):
            self._before_iterators(self.loop.taken.iterations, scope)
        express = express or self.flow.express
        self.models = [express(one, scope) for one in self._models]
        self.optimizers = [express(one, scope) for one in self.training.optimizers.values()]
        loader = self.loop.loader
        if self.endless is not None:
            self.loader = self._endless_loader(scope)
        else:
            self.loader = None if loader is None else express(loader, scope)
        if self.loop.numbers is not None:
            assert isinstance(self.loop.node, cst.For)
            check_visible(self.flow, self.loop.node, scope, set(self.script.within(self._line)))
        for name in (*self.models, *self.optimizers, *([self.loader] if self.loader else [])):
            self._check_bound(name, scope)
        self.schedulers = [
            found
            for one in self.training.schedulers().values()
            if (found := self._scheduler(one, scope)) is not None
        ]

    def _endless_loader(self, scope: Scope) -> str:
        """What the loader of a loop without end is called there."""
        assert self.endless is not None
        if scope is not self.script.scope(self.loop.node):
            raise CannotDerive
        return self.endless.loader

    def _before_iterators(self, iterations: list[cst.Call], scope: Scope) -> None:
        """What is taken from an iterator is of a loader that was prepared before."""
        script, inside = self.script, set(self.script.within(self._line))
        block = script.parents[self._line]
        for call in (one for one in iterations if one not in inside):
            line = script.block_line(script.statement(call))
            if script.scope(call) is not scope or script.parents[line] is not block:
                raise CannotDerive(
                    f"line {script.line(call)} makes the iterator that the loop of line "
                    f"{script.line(self._line)} takes its batches from; make it right before the "
                    "loop, or write for batch in loader"
                )
            self.before = min(self.before, line, key=script.order.__getitem__)

    def loops_around(self, use: cst.CSTNode) -> list[AnyLoop]:
        """The loops of its own function that a node stands in, or is, innermost first."""
        return [one for one in (use, *self.script.up(use)) if isinstance(one, AnyLoop)]

    def _check_bound(self, name: str, scope: Scope) -> None:
        """A name has its value before the loop, and no other inside."""
        bound = [one.node for one in self.flow.bindings(name, scope)]
        if self.flow.home(name.partition(".")[0], scope) is not scope or not bound:
            return
        order, inside = self.script.order, set(self.script.within(self._line))
        if again := [one for one in bound if one in inside]:
            raise CannotDerive(
                f"line {self.script.line(again[0])} makes {name} anew in each turn of the loop of "
                f"line {self.script.line(self._line)}; a run trains one model on one loader: make "
                "it once before the loop, or give each turn a run of its own: with pace.trial(): "
                "around what it makes and trains"
            )
        if not any(order[one] < order[self.before] for one in bound):
            raise CannotDerive

    def _scheduler(self, one: cst.BaseExpression, scope: Scope) -> str | None:
        """Its name there, where it is made in any case; None: it stays as it is."""
        try:
            name = self.flow.express(one, scope)
        except CannotDerive:
            return None
        bound = [each.node for each in self.flow.bindings(name, scope)]
        is_sure = all(
            self.script.order[each] < self.script.order[self.before]
            and not any(isinstance(up, cst.If) for up in self._up_to_common(each))
            for each in bound
        )
        return name if is_sure else None

    def _up_to_common(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in and the place of `prepare` does not."""
        shared = set(self.script.up(self.before))
        return (one for one in self.script.up(node) if one not in shared)


def names_of(text: str) -> list[str] | None:
    """Model, optimizer, loader and schedulers, by their names; None where they cannot be found."""
    try:
        return Parts(SourceTree(text)).names
    except CannotDerive:
        return None
