"""A schedule with one step for each epoch is advanced with each batch.

It ends after that many batches; a cosine then rises and falls again and again.

Fix: call its step() once an epoch, or create it for epochs * len(loader) steps.
Source: torch.optim.lr_scheduler.CosineAnnealingLR documentation, T_max: "maximum number of iterations".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, loops_around, turns
from ..rule import Found, ScriptRule
from ..values import number

_LENGTHS = {"CosineAnnealingLR": ("T_max", 1), "LinearLR": ("total_iters", 3),
            "PolynomialLR": ("total_iters", 1), "OneCycleLR": ("total_steps", 2)}  # fmt: skip


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        outer = loops_around(facts, turn)
        for event in turn.of(CallRole.SCHEDULE):
            is_plain = event.is_always and not event.call.args
            for schedule in facts.flow.origins(facts.owner(event.call)) if is_plain else ():
                length = _length(facts, schedule)
                if length is not None and any(_counts_to(facts, loop, length) for loop in outer):
                    yield Found(
                        event.call,
                        f"{facts.code(event.call)} with each batch, for a schedule of "
                        f"{facts.code(length)} steps, as many as there are epochs",
                    )


def _length(facts: Facts, schedule: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the number of steps that a schedule is made for."""
    kind = facts.meaning(schedule).rpartition(".")[2] if isinstance(schedule, cst.Call) else ""
    if kind not in _LENGTHS or not isinstance(schedule, cst.Call):
        return None
    return facts.argument(schedule, *_LENGTHS[kind])


def _counts_to(facts: Facts, loop: AnyLoop, length: cst.BaseExpression) -> bool:
    """Whether a loop counts epochs up to this number."""
    if not isinstance(loop, cst.For) or "epoch" not in facts.code(loop.target).lower():
        return False
    ranges = [
        node for node in facts.script.within(loop.iter)
        if isinstance(node, cst.Call) and re.search(r"(^|\.)t?range$", facts.meaning(node))
    ]  # fmt: skip
    ends = [positional(call)[:2][-1] for call in ranges if positional(call)]
    for end in ends:
        code = facts.code(end)
        if code == facts.code(length) or code.replace(" ", "") == f"{facts.code(length)}+1":
            return True
        count = number(facts.flow, end)
        if count is not None and count == number(facts.flow, length):
            return True
    return False


_MADE = "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={})"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP, "scheduler.step()"], before=_MADE.format(10)),),
    healthy=(
        looped([*STEP, "scheduler.step()"], before=_MADE.format("10 * len(loader)")),
        looped(after="scheduler.step()", before=_MADE.format(10)),
        looped([*STEP, "scheduler.step()"], before=_MADE.format("1000")),
    ),
)  # fmt: skip
