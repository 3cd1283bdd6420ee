"""Gradients of several batches are accumulated, but the losses are not divided.

Each backward() adds the gradient of a mean over its own batch: after K batches the step is K times
as large as for one batch of all samples.

Fix: divide the loss by the number of accumulated batches, or the learning rate.
Source: PyTorch, Automatic Mixed Precision examples, "Gradient accumulation": loss = loss / iters_to_accumulate.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, TrainingTurn, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        backward, steps, zeroes = (
            turn.of(role) for role in (CallRole.BACKWARD, CallRole.STEP, CallRole.ZERO)
        )
        if len(backward) != 1 or not backward[0].is_always or len(steps) != 1:
            continue
        tests = [node.test for node, _ in steps[0].branches if isinstance(node, cst.If)]
        is_counted = len(tests) == 1 and re.search(r"%", facts.code(tests[0])) is not None
        is_accumulated = bool(zeroes) and all(zero.branches for zero in zeroes)
        if is_counted and is_accumulated and not _is_divided(facts, turn, backward[0]):
            yield Found(backward[0].call, f"{facts.code(backward[0].call)} in each iteration, but a step "
                                          f"only where {facts.code(tests[0])}")  # fmt: skip


def _is_divided(facts: Facts, turn: TrainingTurn, backward: Event) -> bool:
    """Whether the loss is divided, scaled or a sum on its way to backward()."""
    names = set(re.findall(r"\w+", backward.subject))
    blocks = [facts.code(block) for block in facts.flow.reached([turn.loop.body])]
    lines = [line for block in blocks for line in block.splitlines()]
    assignments = [
        line for line in lines if names & set(re.findall(r"\w+", line.partition("=")[0]))
    ]
    return any(
        re.search(r"/|\* |sum|scale|weight", code) for code in [*assignments, backward.subject]
    )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([STEP[0], *STEP[2:4], "if (i + 1) % 4 == 0:\n    optimizer.step()\n    optimizer.zero_grad()"]),),
    healthy=(looped([STEP[0], "loss = loss_fn(model(x), y) / 4", STEP[3], "if (i + 1) % 4 == 0:\n    optimizer.step()\n    optimizer.zero_grad()"]),),
)  # fmt: skip
