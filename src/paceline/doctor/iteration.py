"""The training calls in one turn (one iteration) of a loop, in the order of the text.

    for x, y in loader:            ZERO      optimizer.zero_grad()
        train_step(x, y)   ->      BACKWARD  loss.backward()          (inside train_step)
                                   STEP      optimizer.step()

Calls of the script's own functions are followed. Each event keeps the branches around it, so that
rules compare only what happens in the same turn. This module must not know rules.
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
    """What a call does in the training step."""

    ZERO = "zero_grad"
    BACKWARD = "backward"
    UNSCALE = "unscale"
    CLIP = "clip"
    STEP = "step"
    UPDATE = "update"
    SCHEDULE = "schedule"


class Event(NamedTuple):
    """One training call in a turn.

    Attributes:
        role: what the call does.
        call: the call itself.
        subject: the text of the optimizer, scaler, scheduler or loss that it concerns.
        branches: each ``if``, ``try`` and inner loop around it within the turn, and which branch.
        is_scaled: whether it goes through a GradScaler: ``scaler.scale(loss).backward()``,
            ``scaler.step(optimizer)``.
    """

    role: CallRole
    call: cst.Call
    subject: str
    branches: tuple[tuple[cst.CSTNode, cst.CSTNode], ...] = ()
    is_scaled: bool = False

    @property
    def is_always(self) -> bool:
        """Whether the call is made in every turn."""
        return not self.branches


class TrainingTurn(NamedTuple):
    """A training loop, with the events of one turn in the order of the text."""

    loop: AnyLoop
    events: tuple[Event, ...]

    def of(self, *roles: CallRole) -> list[Event]:
        """The events with one of these roles, in the order of the text."""
        return [event for event in self.events if event.role in roles]


def turns(facts: Facts) -> list[TrainingTurn]:
    """Return the training loops: around each step, the innermost that has a backward pass, too."""
    return facts.once(turns, lambda: _find_turns(facts))


def _find_turns(facts: Facts) -> list[TrainingTurn]:
    turns_by_loop: dict[AnyLoop, TrainingTurn] = {}
    for call, _ in facts.steps.steps:
        for chain in facts.flow.around(call):
            for loop in chain:
                turn = TrainingTurn(loop, tuple(events_of(facts, loop)))
                if turn.of(CallRole.BACKWARD) and turn.of(CallRole.STEP):
                    turns_by_loop[loop] = turn
                    break
    return list(turns_by_loop.values())


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
    """Return the script's own function or method that a call calls, or None."""
    function = facts.flow.function_of(call)
    name = facts.method(call)
    if function is not None or not name or not isinstance(facts.owner(call), cst.Name):
        return function
    origins = facts.flow.origins(facts.owner(call))
    is_made_once = len(origins) == 1 and isinstance(origins[0], cst.Call)
    class_name = facts.meaning(origins[0]) if is_made_once else ""
    node = facts.flow.classes.get(class_name)
    lines = node.body.body if node is not None and class_name not in facts.modules else ()
    return next(
        (line for line in lines if isinstance(line, cst.FunctionDef) and line.name.value == name),
        None,
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
    """Yield each ``if``, ``try`` and loop between a node and a block, with the branch taken."""
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
    """Return a call's role, the text of its subject, and whether it goes through a scaler.

    The role is None for a call that has no part in the training step.
    """
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
        arguments = positional(call)
        if "manual_backward" in facts.code(call) or "accelerator" in subject:
            return CallRole.BACKWARD, facts.code(arguments[0]) if arguments else "", False
        return CallRole.BACKWARD, subject, is_scaled
    if name == "unscale_":
        arguments = positional(call)
        return CallRole.UNSCALE, facts.code(arguments[0]) if arguments else "", True
    if name == "update" and is_scaler(facts, owner):
        return CallRole.UPDATE, subject, True
    if name == "step":
        return _step_of(facts, call, owner)
    return None, "", False


def _is_scaled_before(facts: Facts, loss: cst.BaseExpression) -> bool:
    """Whether a loss was scaled in a line of its own: ``loss = scaler.scale(loss)``."""
    value = last_value(facts, loss) if isinstance(loss, cst.Name) else None
    return isinstance(value, cst.Call) and facts.method(value) == "scale"


def _step_of(
    facts: Facts, call: cst.Call, owner: cst.BaseExpression
) -> tuple[CallRole | None, str, bool]:
    for step, optimizer in facts.steps.steps:
        if step is call:
            return CallRole.STEP, facts.code(optimizer), optimizer is not owner
    origins = [origin for origin in facts.flow.origins(owner) if isinstance(origin, cst.Call)]
    if any(_SCHEDULER.search(facts.script.meaning(origin.func)) for origin in origins):
        return CallRole.SCHEDULE, facts.code(owner), False
    return None, "", False


def is_scaler(facts: Facts, expr: cst.BaseExpression) -> bool:
    """Whether a value may be a ``GradScaler`` that is enabled."""
    origins = [origin for origin in facts.flow.origins(expr) if isinstance(origin, cst.Call)]
    return any(
        facts.script.meaning(origin.func).endswith("GradScaler")
        and literal(by_name(origin).get("enabled")) != "False"
        for origin in origins
    )


def scheduler_bindings(facts: Facts) -> Iterator[tuple[str, cst.Call]]:
    """Yield each name that a scheduler is assigned to, with the call that makes it."""
    for binding in facts.script.bindings:
        value = binding.value
        if binding.place is None and isinstance(value, cst.Call):
            name = facts.script.meaning(value.func)
            if _SCHEDULER.search(name):
                yield binding.name, value


def follows(first: Event, second: Event) -> bool:
    """Whether every turn has both events or neither, since they are in the same branches."""
    return first.branches == second.branches


def always_reached(facts: Facts) -> list[cst.CSTNode]:
    """Return the nodes that every training turn reaches, also through the functions it calls."""
    return facts.once(always_reached, lambda: _find_always_reached(facts))


def _find_always_reached(facts: Facts) -> list[cst.CSTNode]:
    return [
        node for turn in turns(facts)
        for node in _always_reached(
            facts, turn.loop.body, turn.loop.body, _training_branches(turn), 0
        )
    ]  # fmt: skip


def _training_branches(turn: TrainingTurn) -> set[tuple[cst.CSTNode, cst.CSTNode]]:
    """Return the ``if`` branches around every backward pass of a turn: ``if step > 1000:``."""
    first, *others = (set(event.branches) for event in turn.of(CallRole.BACKWARD))
    return {branch for branch in first.intersection(*others) if isinstance(branch[0], cst.If)}


def _always_reached(
    facts: Facts, block: cst.CSTNode, top: cst.CSTNode,
    training_branches: set[tuple[cst.CSTNode, cst.CSTNode]], depth: int,
) -> Iterator[cst.CSTNode]:  # fmt: skip
    for node in facts.script.within(block):
        branches = branches_between(facts, node, top)
        is_branched = any(branch not in training_branches for branch in branches)
        if is_branched or _is_deferred(facts, node, top):
            continue
        yield node
        function = callee(facts, node) if isinstance(node, cst.Call) else None
        if function is not None and depth < _DEPTH and not _is_within(facts, node, function):
            yield from _always_reached(
                facts, function.body, function.body, training_branches, depth + 1
            )


def _is_deferred(facts: Facts, node: cst.CSTNode, top: cst.CSTNode) -> bool:
    """Whether a node is in a function or lambda that the block only defines."""
    while node is not top and node is not facts.script.module:
        node = facts.script.parents[node]
        if isinstance(node, cst.FunctionDef | cst.Lambda):
            return node is not top
    return False


def loops_around(facts: Facts, turn: TrainingTurn) -> list[AnyLoop]:
    """Return the loops around a training loop, by any path of calls that leads to it."""
    loops: list[AnyLoop] = []
    for chain in facts.flow.around(turn.loop):
        loops += [loop for loop in chain if loop not in loops]
    return loops


def events_of(facts: Facts, loop: AnyLoop) -> list[Event]:
    """Return the events of one turn of any loop; inner loops count as branches."""
    return facts.once((events_of, loop), lambda: list(_events(facts, loop.body, (), 0)))
