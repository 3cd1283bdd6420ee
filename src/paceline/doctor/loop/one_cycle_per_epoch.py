"""A schedule that counts steps is advanced once an epoch.

It covers a small part of its cycle: the learning rate stays near the warm-up's.

Fix: call its step() after each optimizer.step().
Source: torch.optim.lr_scheduler.OneCycleLR documentation: "step should be called after a batch has been used".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import by_name
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, events_of, loops_around, turns
from ..rule import Found, ScriptRule
from ..values import single

_WARM_UP = re.compile(r"(^|\.)get_\w+_schedule_with_warmup$")
"""Schedules of transformers, whose third argument is a number of steps."""


def check(facts: Facts) -> Iterator[Found]:
    updates = {event.call for turn in turns(facts) for event in events_of(facts, turn.loop)}
    for loop in (loop for turn in turns(facts) for loop in loops_around(facts, turn)):
        for event in events_of(facts, loop):
            around = (loop, *(node for node, _ in event.branches))
            if (
                event.role is CallRole.SCHEDULE
                and event.call not in updates
                and not any(_takes_batches(facts, node) for node in around)
                and _counts_steps(facts, event)
            ):
                yield Found(
                    event.call,
                    f"{facts.code(event.call)} once an epoch, for a schedule that counts steps",
                )


def _takes_batches(facts: Facts, node: cst.CSTNode) -> bool:
    """Whether a node is a loop that has, or may have, one turn for each batch."""
    if not isinstance(node, AnyLoop):
        return False
    if "len(" in facts.code(node.test if isinstance(node, cst.While) else node.iter):
        return True
    iterated = facts.steps.iterated(node) if isinstance(node, cst.For) else None
    if iterated is None:
        return bool(facts.loaders_of_loop(node))
    return facts.steps.is_loader(iterated) is not False


def _counts_steps(facts: Facts, event: Event) -> bool:
    """Whether a schedule is made for a number of steps, and not of epochs."""
    for origin in facts.flow.origins(facts.owner(event.call)):
        if isinstance(origin, cst.Call) and facts.meaning(origin).endswith("OneCycleLR"):
            keywords = by_name(origin)
            total = facts.code(keywords["total_steps"]) if "total_steps" in keywords else ""
            per_epoch = (
                facts.code(keywords["steps_per_epoch"]) if "steps_per_epoch" in keywords else "1"
            )
            return "len(" in total or per_epoch != "1"
        if isinstance(origin, cst.Call) and _WARM_UP.search(facts.meaning(origin)):
            steps = facts.argument(origin, "num_training_steps", 2)
            return steps is not None and "len(" in facts.code(single(facts.flow, steps))
    return False


_ONE_CYCLE = "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=10, steps_per_epoch=len(loader))"
_SEVERAL = [
    "x, y = x.to(device), y.to(device)",
    "for _ in range(4):",
    *(f"    {line}" for line in STEP[1:]),
]
"""Several updates for each batch."""
_FIRST = "for x, y in loader:\n    for _ in range(4):\n        loss_fn(model(x), y).backward()\n        optimizer.step()"

RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before=_ONE_CYCLE, after="scheduler.step()"),
        looped(_SEVERAL, before=_ONE_CYCLE, after="scheduler.step()"),
        looped(before="total = 10 * len(loader)\nscheduler = transformers.get_linear_schedule_with_warmup(optimizer, 100, total)", after="scheduler.step()"),
    ),
    healthy=(
        looped(before="scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 10)", after="scheduler.step()"),
        looped([*STEP, "scheduler.step()"], before=_ONE_CYCLE),
        looped([*_SEVERAL, "scheduler.step()"], before=_ONE_CYCLE),
        looped([*STEP, "scheduler.step()"], before=_ONE_CYCLE, epoch=_FIRST),
    ),
)  # fmt: skip
