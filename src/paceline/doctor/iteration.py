"""One turn of a loop that trains, as its calls in the order of the text, through its functions.

    for x, y in loader:            ZERO      optimizer.zero_grad()
        train_step(x, y)   ->      BACKWARD  loss.backward()          (inside of train_step)
                                   STEP      optimizer.step()

Each with the branches that it stands in, so that rules compare only what happens in the same turn.
This module must not know rules.
"""

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from ..porting.dataflow import AnyLoop
from ..porting.tree import by_name, positional
from .facts import Facts
from .lineage import last_value
from .values import literal

_DEPTH = 4
_SCHEDULER = re.compile(r"lr_scheduler\.|(^|\.)\w+LR$|(^|\.)get_\w*schedule\w*$|ReduceLROnPlateau$")


class CallRole(enum.Enum):
    """What a call does for the training."""

    ZERO = "zero_grad"
    BACKWARD = "backward"
    UNSCALE = "unscale"
    CLIP = "clip"
    STEP = "step"
    UPDATE = "update"
    SCHEDULE = "schedule"


class Event(NamedTuple):
    """One call in a turn.

    Attributes:
        subject: whose it is: the text of optimizer, scaler, scheduler or loss.
        branches: each ``if``, ``try`` and inner loop around it within the turn, with the branch.
        is_scaled: the backward pass of ``scaler.scale(loss)``, the step of ``scaler.step(...)``.
    """

    role: CallRole
    call: cst.Call
    subject: str
    branches: tuple[tuple[cst.CSTNode, cst.CSTNode], ...] = ()
    is_scaled: bool = False

    @property
    def is_always(self) -> bool:
        """Whether it happens in every turn."""
        return not self.branches


class TrainingTurn(NamedTuple):
    """A loop that trains, with its events in the order of the text."""

    loop: AnyLoop
    events: tuple[Event, ...]

    def of(self, *roles: CallRole) -> list[Event]:
        return [one for one in self.events if one.role in roles]


def turns(facts: Facts) -> list[TrainingTurn]:
    """Each loop whose turns have a backward pass and a step: the innermost such around a step."""
    return facts.once(turns, lambda: _find_turns(facts))


def _find_turns(facts: Facts) -> list[TrainingTurn]:
    found: dict[AnyLoop, TrainingTurn] = {}
    for call, _ in facts.steps.steps:
        for chain in facts.flow.around(call):
            for loop in chain:
                turn = TrainingTurn(loop, tuple(events_of(facts, loop)))
                if turn.of(CallRole.BACKWARD) and turn.of(CallRole.STEP):
                    found[loop] = turn
                    break
    return list(found.values())


def _events(
    facts: Facts, block: cst.CSTNode, outer: tuple[tuple[cst.CSTNode, cst.CSTNode], ...], depth: int
) -> Iterator[Event]:
    for node in facts.script.within(block):
        if not isinstance(node, cst.Call):
            continue
        branches = (*outer, *branches_between(facts, node, block))
        role, subject, is_scaled = role_of(facts, node)
        if role is not None:
            yield Event(role, node, subject, branches, is_scaled)
            continue
        function = callee(facts, node)
        if function is not None and depth < _DEPTH and not _is_within(facts, node, function):
            yield from _events(facts, function.body, branches, depth + 1)


def callee(facts: Facts, call: cst.Call) -> cst.FunctionDef | None:
    """The function, or the method of an object of a class of the script's own, called here."""
    function = facts.flow.function_of(call)
    name = facts.method(call)
    if function is not None or not name or not isinstance(facts.owner(call), cst.Name):
        return function
    made = facts.flow.origins(facts.owner(call))
    kind = facts.meaning(made[0]) if len(made) == 1 and isinstance(made[0], cst.Call) else ""
    node = facts.flow.classes.get(kind)
    rows = node.body.body if node is not None and kind not in facts.modules else ()
    return next(
        (one for one in rows if isinstance(one, cst.FunctionDef) and one.name.value == name), None
    )


def _is_within(facts: Facts, node: cst.CSTNode, function: cst.CSTNode) -> bool:
    while node is not facts.script.module:
        if node is function:
            return True
        node = facts.script.parents[node]
    return False


def branches_between(
    facts: Facts, node: cst.CSTNode, block: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Each ``if``, ``try`` and loop between a node and a block, with the branch taken."""
    below = node
    while node is not block and node is not facts.script.module:
        node = facts.script.parents[node]
        if isinstance(node, cst.If | cst.Try | cst.For | cst.While | cst.IfExp | cst.Match):
            is_test = isinstance(node, cst.If | cst.IfExp | cst.While) and below is node.test
            is_sequence = isinstance(node, cst.For) and below is node.iter
            if not is_test and not is_sequence and node is not block:
                yield node, below
        below = node


def role_of(facts: Facts, call: cst.Call) -> tuple[CallRole | None, str, bool]:
    """What one call is, whose, and whether it goes through a scaler."""
    name, meaning = facts.method(call), facts.meaning(call)
    if re.search(r"(^|\.)clip_grad_(norm|value)_?$", meaning) or name.startswith("clip_grad_"):
        return CallRole.CLIP, "", False
    if not name:
        return None, "", False
    owner = facts.owner(call)
    subject = facts.code(owner)
    if name == "zero_grad":
        return CallRole.ZERO, subject, False
    if name == "backward":
        is_scaled = "scale(" in subject or _is_scaled_before(facts, owner)
        given = positional(call)
        if "manual_backward" in facts.code(call) or "accelerator" in subject:
            return CallRole.BACKWARD, facts.code(given[0]) if given else "", False
        return CallRole.BACKWARD, subject, is_scaled
    if name == "unscale_":
        given = positional(call)
        return CallRole.UNSCALE, facts.code(given[0]) if given else "", True
    if name == "update" and is_scaler(facts, owner):
        return CallRole.UPDATE, subject, True
    if name == "step":
        return _step_of(facts, call, owner)
    return None, "", False


def _is_scaled_before(facts: Facts, loss: cst.BaseExpression) -> bool:
    """``loss = scaler.scale(loss)``, and then ``loss.backward()``."""
    value = last_value(facts, loss) if isinstance(loss, cst.Name) else None
    return isinstance(value, cst.Call) and facts.method(value) == "scale"


def _step_of(
    facts: Facts, call: cst.Call, owner: cst.BaseExpression
) -> tuple[CallRole | None, str, bool]:
    for one, optimizer in facts.steps.steps:
        if one is call:
            return CallRole.STEP, facts.code(optimizer), optimizer is not owner
    made = [one for one in facts.flow.origins(owner) if isinstance(one, cst.Call)]
    if any(_SCHEDULER.search(facts.script.meaning(one.func)) for one in made):
        return CallRole.SCHEDULE, facts.code(owner), False
    return None, "", False


def is_scaler(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether this is a ``GradScaler`` that scales, or may."""
    made = [one for one in facts.flow.origins(expr) if isinstance(one, cst.Call)]
    return any(
        facts.script.meaning(one.func).endswith("GradScaler")
        and literal(by_name(one).get("enabled")) != "False"
        for one in made
    )


def schedulers_made(facts: Facts) -> Iterator[tuple[str, cst.Call]]:
    """Each name of a scheduler with the call that makes it."""
    for binding in facts.script.bindings:
        value = binding.value
        if binding.place is None and isinstance(value, cst.Call):
            name = facts.script.meaning(value.func)
            if _SCHEDULER.search(name):
                yield binding.name, value


def follows(first: Event, second: Event) -> bool:
    """Whether ``second`` comes after ``first`` in each turn in which either happens."""
    return first.branches == second.branches


def always(facts: Facts) -> list[cst.CSTNode]:
    """Every node that is reached in every turn that trains, through the functions of its loop."""
    return facts.once(always, lambda: _find_always(facts))


def _find_always(facts: Facts) -> list[cst.CSTNode]:
    return [
        node for turn in turns(facts)
        for node in _always(facts, turn.loop.body, turn.loop.body, _trains_in(turn), 0)
    ]  # fmt: skip


def _trains_in(turn: TrainingTurn) -> set[tuple[cst.CSTNode, cst.CSTNode]]:
    """The branches that every backward pass of a turn stands in: ``if len(memory) > 1000``."""
    first, *rest = (set(one.branches) for one in turn.of(CallRole.BACKWARD))
    return {one for one in first.intersection(*rest) if isinstance(one[0], cst.If)}


def _always(
    facts: Facts, block: cst.CSTNode, top: cst.CSTNode,
    trains_in: set[tuple[cst.CSTNode, cst.CSTNode]], depth: int,
) -> Iterator[cst.CSTNode]:  # fmt: skip
    for node in facts.script.within(block):
        is_branched = any(one not in trains_in for one in branches_between(facts, node, top))
        if is_branched or _is_deferred(facts, node, top):
            continue
        yield node
        function = callee(facts, node) if isinstance(node, cst.Call) else None
        if function is not None and depth < _DEPTH and not _is_within(facts, node, function):
            yield from _always(facts, function.body, function.body, trains_in, depth + 1)


def _is_deferred(facts: Facts, node: cst.CSTNode, top: cst.CSTNode) -> bool:
    """Whether it stands in a function or lambda that is only defined here."""
    while node is not top and node is not facts.script.module:
        node = facts.script.parents[node]
        if isinstance(node, cst.FunctionDef | cst.Lambda):
            return node is not top
    return False


def loops_around(facts: Facts, turn: TrainingTurn) -> list[AnyLoop]:
    """The loops around a loop that trains, on any way to it."""
    found: list[AnyLoop] = []
    for chain in facts.flow.around(turn.loop):
        found += [one for one in chain if one not in found]
    return found


def events_of(facts: Facts, loop: AnyLoop) -> list[Event]:
    """The events of one turn of any loop, inner loops as branches."""
    return facts.once((events_of, loop), lambda: list(_events(facts, loop.body, (), 0)))
