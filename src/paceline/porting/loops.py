"""Finds a script's training loop, what it iterates over, and the models that it trains.

    optimizer.step() -> the loops around it -> the one over a loader, or the only one
    optimizer -> the models whose parameters it was made for; its schedulers

Above 300 lines, since the choice of the loop depends on the optimizers that step in it and on what
it goes over. This module must not know what its results are used for.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .dataflow import AnyLoop, Flow
from .indexed import numbers_of
from .iterators import Taken, taken_by_hand
from .tree import CannotDerive, Scope, by_name, positional

_OPTIMIZER = re.compile(
    r"(^|\.)optim\.(?!lr_scheduler|swa_utils)|(^|\.)(SGD|Adam\w*|NAdam|RAdam|RMSprop|Adadelta|Adagrad|"
    r"ASGD|LBFGS|SparseAdam|Lion|Adafactor|Muon)$|"
    r"(^|\.)(configure|create|get|make|build|init)_optimizers?$"
)
_SCHEDULER = re.compile(
    r"lr_scheduler\.|\.SWALR$|(^|[._])(get|create|make|build)\w*schedul\w*$|(^|\.)\w+LR$"
)
_GIVEN_SCHEDULER = re.compile(r"(self\.)?(?!\w*(noise|profil))\w*schedul\w*")
_OF_A_MODEL = ("parameters", "named_parameters", "configure_optimizers", "trainable_parameters")
USES_OF_A_MODEL = ("train", "eval", "state_dict", "load_state_dict", "zero_grad", "parameters")
_RETURN_SELF = (
    "to", "cuda", "cpu", "double", "float", "half", "bfloat16", "train", "eval", "requires_grad_",
)  # fmt: skip
"""Methods of a model that return it."""
_COPIES = ("torch.compile", "copy.copy", "copy.deepcopy")
"""Functions that return another form of a model, with the same attributes."""
_LOSS = re.compile(r"(^|[._])(\w*criteri\w*|\w*loss\w*)$")
_PASSED_ON = re.compile(
    r"(^|\.)(enumerate|islice|iter|tqdm|trange|track|progress|log_every|notebook)$"
)
"""Functions that yield the batches of their first argument one by one."""
_LITERALS = cst.List | cst.ListComp | cst.Tuple | cst.Dict | cst.Set | cst.BaseNumber
_MAKES_LISTS = (
    "range", "zip", "list", "sorted", "reversed", "tuple", "random.sample", "numpy.split",
    "numpy.array_split", "torch.split", "torch.chunk", "torch.tensor_split",
)  # fmt: skip
_DEPTH = 8
_NO_LOOP = (
    "no optimizer.step() in a loop was found, here or in what it calls from files of its folder"
)


class Loop(NamedTuple):
    """The loop that trains.

    Attributes:
        node: the loop.
        loader: what its function calls the loader that it goes over; None if it has none.
        outer: the loops around it, innermost first.
        taken: how it takes batches by hand; None if it goes over the loader itself, or has none.
        numbers: the range of each epoch by which it takes its batches; None if there is none.
    """

    node: AnyLoop
    loader: cst.BaseExpression | None
    outer: list[AnyLoop]
    taken: Taken | None = None
    numbers: cst.Call | None = None

    @property
    def counts_updates(self) -> bool:
        """Whether the loop counts updates: it has neither epochs nor a loader."""
        return self.loader is None and self.numbers is None


def makers_of(flow: Flow, expr: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what made an object, or the one that it is a moved, compiled or copied form of."""
    makers: list[cst.BaseExpression] = []
    traced, seen = [expr], set[cst.BaseExpression]()
    for part in traced:
        for origin in flow.origins(part):
            if origin in seen:
                continue
            seen.add(origin)
            inner = _passed_on(flow, origin)
            if inner is None:
                makers.append(origin)
            else:
                traced.append(inner)
    return makers


def _passed_on(flow: Flow, value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the model of ``model.to(device)`` or ``copy.deepcopy(model)``; None for others."""
    if not isinstance(value, cst.Call):
        return None
    if flow.script.meaning(value.func) in _COPIES:
        return next(iter(positional(value)), None)
    if isinstance(value.func, cst.Attribute) and value.func.attr.value in _RETURN_SELF:
        return value.func.value
    return None


def forward_of(flow: Flow, maker: str) -> cst.FunctionDef | None:
    """Return what an object of a class of the script runs when it is called."""
    definition = flow.classes.get(maker)
    methods = definition.body.body if definition is not None else ()
    named = {one.name.value: one for one in methods if isinstance(one, cst.FunctionDef)}
    return named.get("forward", named.get("__call__"))


class OptimizerSteps:
    """The optimizers' steps in a script, and what the loops around them go over.

    No script is refused.

    Attributes:
        steps: each call that steps, with its optimizer.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.script = flow, flow.script
        self._zeroed = {
            self.script.code(call.func.value)
            for call in self.script.calls("zero_grad")
            if isinstance(call.func, cst.Attribute)
        }
        self.steps = [
            (call, optimizer)
            for call in self.script.calls("step")
            if (optimizer := self._stepped_optimizer(call))
        ]

    def _stepped_optimizer(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer of ``optimizer.step()`` or ``scaler.step(optimizer)``, or None."""
        if not isinstance(call.func, cst.Attribute):
            return None
        for candidate in (call.func.value, *positional(call)[:1]):
            if isinstance(candidate, cst.Name | cst.Attribute) and self._is_optimizer(candidate):
                return candidate
        return None

    def _is_optimizer(self, expr: cst.BaseExpression) -> bool:
        makers = [origin for origin in self.flow.origins(expr) if isinstance(origin, cst.Call)]
        if any(_SCHEDULER.search(self.script.meaning(call.func)) for call in makers):
            return False
        if self.script.code(expr) in self._zeroed:
            return True
        return any(
            _OPTIMIZER.search(self.script.meaning(call.func))
            or (call.args and next(self._owners(call.args[0]), None) is not None)
            for call in makers
        )

    # -- what a loop goes over ------------------------------------------------------------------

    def iterated(self, loop: cst.For) -> cst.BaseExpression | None:
        """Return the loader of ``for batch in tqdm(loader)``; None if it is not a name."""
        iterated = loop.iter
        for _ in range(_DEPTH):
            if isinstance(iterated, cst.Name):
                value = self._local(iterated)
                if value is None or not self._passes_on(value):
                    break
                iterated = value
            elif not isinstance(iterated, cst.Call) or not self._passes_on(iterated):
                break
            else:
                iterated = positional(iterated)[0]
        return iterated if isinstance(iterated, cst.Name | cst.Attribute) else None

    def _passes_on(self, call: cst.BaseExpression) -> bool:
        if not isinstance(call, cst.Call) or not positional(call):
            return False
        name = self.script.meaning(call.func)
        return _PASSED_ON.search(name or self.script.code(call.func)) is not None

    def _local(self, name: cst.Name) -> cst.BaseExpression | None:
        """Return a name's only value: ``bar = tqdm(loader)``, ``with tqdm(loader) as bar``."""
        scope = self.script.scope(name)
        for ancestor in self.script.up(name):
            for item in ancestor.items if isinstance(ancestor, cst.With) else ():
                if item.asname and self.script.code(item.asname.name) == name.value:
                    return item.item
        values = self.flow.bindings(name.value, self.flow.home(name.value, scope))
        return values[0].value if len(values) == 1 else None

    def is_loader(self, expr: cst.BaseExpression) -> bool | None:
        """Whether this comes from ``DataLoader(...)``; None if it cannot be seen."""
        origins = self.flow.origins(expr)
        if any(self.makes_loader(origin) for origin in origins):
            return True
        return False if origins and all(map(self._is_other, origins)) else None

    def _is_other(self, origin: cst.BaseExpression) -> bool:
        """Whether this can be no loader: a literal, ``list(...)``, ``[...] * 4``."""
        if isinstance(origin, cst.BinaryOperation):
            return self._is_other(origin.left) or self._is_other(origin.right)
        if isinstance(origin, cst.Call):
            return self.script.meaning(origin.func) in _MAKES_LISTS
        return isinstance(origin, _LITERALS)

    def makes_loader(self, value: cst.BaseExpression) -> bool:
        """Whether this makes a ``DataLoader``, or a subclass of the script's own."""
        if not isinstance(value, cst.Call):
            return False
        name = self.script.meaning(value.func).rpartition(".")[2]
        bases = self.flow.classes[name].bases if name in self.flow.classes else ()
        return "DataLoader" in (
            name,
            *(self.script.meaning(base.value).rpartition(".")[2] for base in bases),
        )

    # -- models and schedulers ------------------------------------------------------------------

    def models(self, optimizer: cst.BaseExpression) -> dict[str, cst.BaseExpression]:
        """Return the models that an optimizer was made for, by their text."""
        models: dict[str, cst.BaseExpression] = {}
        origins = self.flow.origins(optimizer)
        for origin in origins:
            for owner in self._owners(origin):
                models[self.script.code(owner)] = owner
        for scope in () if models else {self.script.scope(origin) for origin in origins}:
            for owner in self._owners(scope):  # groups that a loop collects
                models[self.script.code(owner)] = owner
        for origin in () if models else origins:
            called = {self.script.code(call.func) for call in self.script.every_call}
            for argument in positional(origin) if isinstance(origin, cst.Call) else ():
                if (
                    isinstance(argument, cst.Name | cst.Attribute)
                    and self.script.code(argument) in called
                ):
                    models[self.script.code(argument)] = argument
        if not models and not any(isinstance(origin, cst.Call) for origin in origins):
            return self._given_models()
        return models

    def _given_models(self) -> dict[str, cst.BaseExpression]:
        """Return what the script calls and uses as a model, where another file makes all."""
        used = {
            self.script.code(call.func.value)
            for call in self.script.calls(*USES_OF_A_MODEL)
            if isinstance(call.func, cst.Attribute)
        }
        return {
            code: call.func
            for call in self.script.every_call
            if isinstance(call.func, cst.Name | cst.Attribute)
            and (code := self.script.code(call.func)) in used
            and not _LOSS.search(code)
            and not any(isinstance(origin, cst.Call) for origin in makers_of(self.flow, call.func))
        }

    def _owners(self, node: cst.CSTNode, depth: int = 0) -> Iterator[cst.BaseExpression]:
        """Yield objects whose ``parameters()`` are in an expression, or in its names' values."""
        owners: list[cst.BaseExpression] = []
        for part in self.script.within(node):
            func = part.func if isinstance(part, cst.Call) else None
            if isinstance(func, cst.Attribute) and func.attr.value in _OF_A_MODEL:
                owners.append(self._outermost(func.value))
        owners = [owner for owner in owners if isinstance(owner, cst.Name | cst.Attribute)]
        yield from owners
        if owners or depth > 1 or isinstance(node, Scope):
            return
        for name in (part for part in self.script.within(node) if isinstance(part, cst.Name)):
            home = self.flow.home(name.value, self.script.scope(name))
            for binding in self.flow.bindings(name.value, home):
                if binding.value is not node:
                    yield from self._owners(binding.value, depth + 1)

    def _outermost(self, part: cst.BaseExpression) -> cst.BaseExpression:
        """Return ``model`` for ``model.encoder``, unless ``model.encoder`` itself is assigned."""
        while isinstance(part, cst.Attribute):
            code = self.script.code(part)
            is_set = any(binding.name == code for binding in self.script.bindings)
            if is_set or self.script.code(part.value) == "self":
                break
            part = part.value
        return part

    def schedulers(self) -> dict[str, cst.BaseExpression]:
        """Return the learning rate schedulers that are stepped, by their text."""
        schedulers: dict[str, cst.BaseExpression] = {}
        for call in self.script.calls("step"):
            owner = call.func.value if isinstance(call.func, cst.Attribute) else None
            if not isinstance(owner, cst.Name | cst.Attribute):
                continue
            makers = [origin for origin in self.flow.origins(owner) if isinstance(origin, cst.Call)]
            is_made = any(_SCHEDULER.search(self.script.meaning(maker.func)) for maker in makers)
            if is_made or (not makers and self._is_given_scheduler(call)):
                schedulers[self.script.code(owner)] = owner
        return schedulers

    def _is_given_scheduler(self, call: cst.Call) -> bool:
        """Whether this may step a learning rate scheduler that another file made."""
        assert isinstance(call.func, cst.Attribute)
        code = self.script.code(call.func.value)
        is_imported = isinstance(call.func.value, cst.Name) and (
            self.script.meaning(call.func.value) != code
        )
        is_alone = isinstance(self.script.parents[call], cst.Expr) and len(call.args) < 2
        return is_alone and not is_imported and _GIVEN_SCHEDULER.fullmatch(code) is not None


class Stepping(OptimizerSteps):
    """The loop that trains, with its optimizers.

    Attributes:
        loop: the loop.
        optimizers: those that step, by their text.

    Raises:
        CannotDerive: there is no such loop, or there are several.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.loop = self._find_loop()
        self.optimizers = {self.script.code(optimizer): optimizer for _, optimizer in self.steps}

    @property
    def calls_again(self) -> bool:
        """Whether an optimizer that is not torch's may call the model again inside its step."""
        return any(
            self._has_closure(call, optimizer) and not self._is_torch(optimizer)
            for call, optimizer in self.steps
        )

    def _has_closure(self, call: cst.Call, optimizer: cst.BaseExpression) -> bool:
        arguments = positional(call) or list(by_name(call).values())
        is_own = isinstance(call.func, cst.Attribute) and call.func.value is optimizer
        return is_own and bool(arguments) and not isinstance(arguments[0], cst.BaseNumber)

    def _is_torch(self, optimizer: cst.BaseExpression) -> bool:
        makers = [origin for origin in self.flow.origins(optimizer) if isinstance(origin, cst.Call)]
        names = [self.script.meaning(call.func) for call in makers]
        return bool(names) and all(name.startswith("torch.optim.") for name in names)

    def _find_loop(self) -> Loop:
        script = self.script
        loops = {}
        for call, _ in self.steps:
            for chain in self.flow.around_steps(call):
                if not chain:
                    raise CannotDerive(
                        f"line {script.line(call)} steps outside of any loop; each step needs a "
                        "batch: for batch in loader: with pace.step(): ..."
                    )
                loop = self._choose(call, chain)
                loops[loop.node] = loop
        if not loops:
            raise CannotDerive(self._by_hand_reason() or self._hidden_step_reason() or _NO_LOOP)
        if len(loops) > 1:
            lines = " and ".join(str(script.line(node)) for node in loops)
            raise CannotDerive(
                f"the loops of lines {lines} all train, but a run has one training loop: put them "
                "into separate scripts, or into one function that takes the loader as an argument"
            )
        return next(iter(loops.values()))

    def _hidden_step_reason(self) -> str:
        """Return a sentence if a loop computes gradients, but where it steps is not seen."""
        for call in self.script.every_call:
            is_backward = (
                isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
            )
            if is_backward and any(self.flow.around(call)):
                return (
                    f"line {self.script.line(call)} computes gradients in a loop, but no "
                    "optimizer.step() was found: a step inside another object "
                    "(optimizer.step_and_update_lr()) is not seen; call the torch optimizer's "
                    "step() in the loop, or write the lines yourself"
                )
        return ""

    def _by_hand_reason(self) -> str:
        """Return a sentence if parameters are changed without an optimizer; else an empty text."""
        changes = [
            call
            for call in self.script.calls("add_", "sub_", "copy_")
            if ".grad" in self.script.code(call) and any(self.flow.around(call))
        ]
        if not changes or self.script.calls("step"):
            return ""
        return (
            f"line {self.script.line(changes[0])} changes parameters by hand, but an update must "
            "be an optimizer's step; write optimizer = torch.optim.SGD(model.parameters(), "
            "lr=...) and optimizer.step()"
        )

    def _phase_reason(self, chain: list[AnyLoop]) -> str:
        """Return a sentence if only one phase of several trains; else an empty text.

        ``for phase in (...): for batch in loaders[phase]:``, with a step in one of them.
        """
        inner, code = chain[0], self.script.code
        if not (isinstance(inner, cst.For) and isinstance(inner.iter, cst.Subscript)):
            return ""
        names = self.script.inside(inner.iter)
        for outer in chain[1:]:
            if isinstance(outer, cst.For) and code(outer.target) in names:
                over = code(inner.iter.value)
                return (
                    f"line {self.script.line(inner)} iterates over {code(inner.iter)}, a loader "
                    f"for each {code(outer.target)} of line {self.script.line(outer)}, and only "
                    f"one of them trains: name that one (loader = {over}['train']) and write its "
                    "own loop, for batch in loader: ... optimizer.step(), followed by a loop for "
                    "validation"
                )
        return ""

    def _choose(self, call: cst.Call, chain: list[AnyLoop]) -> Loop:
        """Return the loop over batches among the loops around a step."""
        iterated: dict[AnyLoop, cst.BaseExpression | None] = {
            loop: self.iterated(loop) for loop in chain if isinstance(loop, cst.For)
        }
        is_loader = {
            node: self.is_loader(expr) for node, expr in iterated.items() if expr is not None
        }
        for depth, node in enumerate(chain):
            if is_loader.get(node) or (
                depth == 0 and node in is_loader and is_loader[node] is None
            ):
                return Loop(node, iterated[node], chain[depth + 1 :])
        by_hand = taken_by_hand(self.flow, chain[0])
        if by_hand is not None and (
            self.is_loader(by_hand.loader) or self.makes_loader(by_hand.loader)
        ):
            return Loop(chain[0], by_hand.loader, chain[1:], by_hand)
        if len(chain) == 1:
            return Loop(chain[0], None, [])
        if (numbers := numbers_of(self.flow, chain[0])) is not None:
            return Loop(chain[0], None, chain[1:], numbers=numbers)
        if reason := self._phase_reason(chain):
            raise CannotDerive(reason)
        lines = [self.script.line(loop) for loop in chain]
        raise CannotDerive(
            f"the loop of line {lines[0]}, inside that of line {lines[1]}, steps at line "
            f"{self.script.line(call)} but iterates over no DataLoader: make one of what it takes "
            "batches from (DataLoader(range(n), batch_size=...) for numbers that it counts), or "
            "write one loop: for number in pace.updates(n)"
        )
