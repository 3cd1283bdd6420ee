"""Which loop of a script trains, what it goes over, and whose parameters it changes.

    optimizer.step() -> the loops around it -> the one over a loader, or the only one
    optimizer -> the models whose parameters it was made for; its schedulers

Above 300 lines, since which loop it is depends on whose steps, and on what they go over. This
module must not know what is done with what it finds.
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
_OF_A_MODEL = ("parameters", "named_parameters", "configure_optimizers", "trainable_parameters")
_PASSED_ON = re.compile(
    r"(^|\.)(enumerate|islice|iter|tqdm|trange|track|progress|log_every|notebook)$"
)
"""What gives the batches of its first argument one by one."""
_LITERALS = cst.List | cst.ListComp | cst.Tuple | cst.Dict | cst.Set | cst.BaseNumber
_MAKES_LISTS = ("range", "zip", "list", "sorted", "reversed", "tuple", "random.sample")
_DEPTH = 8
_NO_LOOP = (
    "no optimizer.step() in a loop was found in it; where another file has the loop, check that one"
)


class Loop(NamedTuple):
    """The loop that trains.

    Attributes:
        loader: what it goes over, as its own function calls that; None: it counts updates.
        outer: the loops around it, innermost first.
        taken: how it takes its batches by hand; None: it is over a loader itself, or has none.
        numbers: the range that it goes through in each epoch, and takes its batches by; or None.
    """

    node: AnyLoop
    loader: cst.BaseExpression | None
    outer: list[AnyLoop]
    taken: Taken | None = None
    numbers: cst.Call | None = None

    @property
    def counts_updates(self) -> bool:
        """Whether it has neither epochs nor a loader."""
        return self.loader is None and self.numbers is None


class OptimizerSteps:
    """The steps of optimizers, and what the loops around them go over; none is refused."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.script = flow, flow.script
        self._zeroed = {
            self.script.code(one.func.value)
            for one in self.script.calls("zero_grad")
            if isinstance(one.func, cst.Attribute)
        }
        self.steps = [
            (call, found) for call in self.script.calls("step") if (found := self._stepped(call))
        ]

    def _stepped(self, call: cst.Call) -> cst.BaseExpression | None:
        """The optimizer of ``optimizer.step()`` or ``scaler.step(optimizer)``; else None."""
        if not isinstance(call.func, cst.Attribute):
            return None
        for one in (call.func.value, *positional(call)[:1]):
            if isinstance(one, cst.Name | cst.Attribute) and self._is_optimizer(one):
                return one
        return None

    def _is_optimizer(self, one: cst.BaseExpression) -> bool:
        made = [each for each in self.flow.origins(one) if isinstance(each, cst.Call)]
        if any(_SCHEDULER.search(self.script.meaning(each.func)) for each in made):
            return False
        if self.script.code(one) in self._zeroed:
            return True
        return any(
            _OPTIMIZER.search(self.script.meaning(each.func))
            or (each.args and next(self._owned(each.args[0]), None) is not None)
            for each in made
        )

    # -- what it goes over ----------------------------------------------------------------------

    def iterated(self, loop: cst.For) -> cst.BaseExpression | None:
        """The loader of ``for batch in tqdm(loader)``; None where it is no name."""
        found = loop.iter
        for _ in range(_DEPTH):
            if isinstance(found, cst.Name):
                value = self._local(found)
                if value is None or not self._passes_on(value):
                    break
                found = value
            elif not isinstance(found, cst.Call) or not self._passes_on(found):
                break
            else:
                found = positional(found)[0]
        return found if isinstance(found, cst.Name | cst.Attribute) else None

    def _passes_on(self, call: cst.BaseExpression) -> bool:
        if not isinstance(call, cst.Call) or not positional(call):
            return False
        name = self.script.meaning(call.func)
        return _PASSED_ON.search(name or self.script.code(call.func)) is not None

    def _local(self, name: cst.Name) -> cst.BaseExpression | None:
        """What a name is bound to once: ``bar = tqdm(loader)``, ``with tqdm(loader) as bar``."""
        scope = self.script.scope(name)
        for one in self.script.up(name):
            for item in one.items if isinstance(one, cst.With) else ():
                if item.asname and self.script.code(item.asname.name) == name.value:
                    return item.item
        values = self.flow.bindings(name.value, self.flow.home(name.value, scope))
        return values[0].value if len(values) == 1 else None

    def is_loader(self, expr: cst.BaseExpression) -> bool | None:
        """Whether this comes from ``DataLoader(...)``; None: nobody can say."""
        made = self.flow.origins(expr)
        if any(self.makes_loader(one) for one in made):
            return True
        is_other = bool(made) and all(
            isinstance(one, _LITERALS)
            or (isinstance(one, cst.Call) and self.script.meaning(one.func) in _MAKES_LISTS)
            for one in made
        )
        return False if is_other else None

    def makes_loader(self, value: cst.BaseExpression) -> bool:
        """Whether this is ``DataLoader(...)``, or a class of the script's own that is one."""
        if not isinstance(value, cst.Call):
            return False
        name = self.script.meaning(value.func).rpartition(".")[2]
        bases = self.flow.classes[name].bases if name in self.flow.classes else ()
        return "DataLoader" in (
            name,
            *(self.script.meaning(b.value).rpartition(".")[2] for b in bases),
        )

    # -- whose parameters -----------------------------------------------------------------------

    def models(self, optimizer: cst.BaseExpression) -> dict[str, cst.BaseExpression]:
        """The models that an optimizer was made for, by their text."""
        found: dict[str, cst.BaseExpression] = {}
        made = self.flow.origins(optimizer)
        for one in made:
            for owner in self._owned(one):
                found[self.script.code(owner)] = owner
        for scope in () if found else {self.script.scope(one) for one in made}:
            for owner in self._owned(scope):  # groups that a loop collects
                found[self.script.code(owner)] = owner
        for one in () if found else made:
            called = {self.script.code(call.func) for call in self.script.every_call}
            for given in positional(one) if isinstance(one, cst.Call) else ():
                if (
                    isinstance(given, cst.Name | cst.Attribute)
                    and self.script.code(given) in called
                ):
                    found[self.script.code(given)] = given
        return found

    def _owned(self, node: cst.CSTNode, depth: int = 0) -> Iterator[cst.BaseExpression]:
        """Whose ``parameters()`` stand in an expression, or in what its names are bound to."""
        own: list[cst.BaseExpression] = []
        for one in self.script.within(node):
            func = one.func if isinstance(one, cst.Call) else None
            if isinstance(func, cst.Attribute) and func.attr.value in _OF_A_MODEL:
                own.append(self._whole(func.value))
        own = [one for one in own if isinstance(one, cst.Name | cst.Attribute)]
        yield from own
        if own or depth > 1 or isinstance(node, Scope):
            return
        for name in (one for one in self.script.within(node) if isinstance(one, cst.Name)):
            home = self.flow.home(name.value, self.script.scope(name))
            for binding in self.flow.bindings(name.value, home):
                if binding.value is not node:
                    yield from self._owned(binding.value, depth + 1)

    def _whole(self, part: cst.BaseExpression) -> cst.BaseExpression:
        """``model`` of ``model.encoder``, unless that is set as a whole."""
        while isinstance(part, cst.Attribute):
            code = self.script.code(part)
            is_set = any(one.name == code for one in self.script.bindings)
            if is_set or self.script.code(part.value) == "self":
                break
            part = part.value
        return part

    def schedulers(self) -> dict[str, cst.BaseExpression]:
        """What else is stepped and was made as a schedule of a learning rate, by its text."""
        found: dict[str, cst.BaseExpression] = {}
        for call in self.script.calls("step"):
            one = call.func.value if isinstance(call.func, cst.Attribute) else None
            if not isinstance(one, cst.Name | cst.Attribute):
                continue
            made = [each for each in self.flow.origins(one) if isinstance(each, cst.Call)]
            if any(_SCHEDULER.search(self.script.meaning(each.func)) for each in made):
                found[self.script.code(one)] = one
        return found


class Stepping(OptimizerSteps):
    """The loop that trains, with its optimizers.

    Raises:
        CannotDerive: there is none, or there are several.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow)
        self.loop = self._find()
        self.optimizers = {self.script.code(one): one for _, one in self.steps}

    @property
    def calls_again(self) -> bool:
        """Whether an optimizer of the script's own may call the model again inside its step."""
        return any(
            self._has_closure(call, one) and not self._is_torch(one) for call, one in self.steps
        )

    def _has_closure(self, call: cst.Call, optimizer: cst.BaseExpression) -> bool:
        given = positional(call) or list(by_name(call).values())
        is_own = isinstance(call.func, cst.Attribute) and call.func.value is optimizer
        return is_own and bool(given) and not isinstance(given[0], cst.BaseNumber)

    def _is_torch(self, optimizer: cst.BaseExpression) -> bool:
        made = [one for one in self.flow.origins(optimizer) if isinstance(one, cst.Call)]
        names = [self.script.meaning(one.func) for one in made]
        return bool(names) and all(one.startswith("torch.optim.") for one in names)

    def _find(self) -> Loop:
        script = self.script
        found = {}
        for call, _ in self.steps:
            for chain in self.flow.around(call):
                if not chain:
                    raise CannotDerive(
                        f"line {script.line(call)} steps outside of any loop; each step belongs "
                        "to a batch: for batch in loader: with pace.step(): ..."
                    )
                loop = self._chosen(call, chain)
                found[loop.node] = loop
        if not found:
            raise CannotDerive(self._by_hand() or _NO_LOOP)
        if len(found) > 1:
            lines = " and ".join(str(script.line(one)) for one in found)
            raise CannotDerive(
                f"the loops of lines {lines} all train; a run has one loop: put them into scripts "
                "of their own, or into one function that gets its loader as an argument"
            )
        return next(iter(found.values()))

    def _by_hand(self) -> str:
        """A sentence where parameters are changed without an optimizer."""
        hands = [
            call
            for call in self.script.calls("add_", "sub_", "copy_")
            if ".grad" in self.script.code(call) and any(self.flow.around(call))
        ]
        if not hands or self.script.calls("step"):
            return ""
        return (
            f"line {self.script.line(hands[0])} changes parameters by hand, and an update is an "
            "optimizer's step; write optimizer = torch.optim.SGD(model.parameters(), lr=...) and "
            "optimizer.step()"
        )

    def _by_phase(self, chain: list[AnyLoop]) -> str:
        """``for phase in (...): for batch in loaders[phase]:``, with a step in one of them."""
        inner, code = chain[0], self.script.code
        if not (isinstance(inner, cst.For) and isinstance(inner.iter, cst.Subscript)):
            return ""
        names = self.script.inside(inner.iter)
        for outer in chain[1:]:
            if isinstance(outer, cst.For) and code(outer.target) in names:
                over = code(inner.iter.value)
                return (
                    f"line {self.script.line(inner)} goes over {code(inner.iter)}, a loader for "
                    f"each {code(outer.target)} of line {self.script.line(outer)}, and one of them "
                    f"trains: give that one a name (loader = {over}['train']) and a loop of its "
                    "own, for batch in loader: ... optimizer.step(), and validation another one "
                    "behind it"
                )
        return ""

    def _chosen(self, call: cst.Call, chain: list[AnyLoop]) -> Loop:
        """The loop over batches among those around a step."""
        over: dict[AnyLoop, cst.BaseExpression | None] = {
            one: self.iterated(one) for one in chain if isinstance(one, cst.For)
        }
        kinds = {node: self.is_loader(expr) for node, expr in over.items() if expr is not None}
        for number, node in enumerate(chain):
            if kinds.get(node) or (number == 0 and node in kinds and kinds[node] is None):
                return Loop(node, over[node], chain[number + 1 :])
        taken = taken_by_hand(self.flow, chain[0])
        if taken is not None and (self.is_loader(taken.loader) or self.makes_loader(taken.loader)):
            return Loop(chain[0], taken.loader, chain[1:], taken)
        if len(chain) == 1:
            return Loop(chain[0], None, [])
        if (numbers := numbers_of(self.flow, chain[0])) is not None:
            return Loop(chain[0], None, chain[1:], numbers=numbers)
        if why := self._by_phase(chain):
            raise CannotDerive(why)
        lines = [self.script.line(one) for one in chain]
        raise CannotDerive(
            f"the loop of line {lines[0]}, inside that of line {lines[1]}, steps at line "
            f"{self.script.line(call)} and goes over no DataLoader: make what it takes batches "
            "from one (DataLoader(range(n), batch_size=...) for numbers that it counts), or write "
            "one loop: for number in pace.updates(n)"
        )
