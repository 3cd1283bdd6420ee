"""A model is moved to its device again in every iteration of a loop around its training.

Nothing moves if it is already there, but every parameter is checked; and if it is not, the
optimizer was created before the parameters were moved.

Fix: put the line before the loop, and before the optimizer is created.
Source: torch.optim documentation, "Constructing it": move a model before its optimizer is made.
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.dataflow import AnyLoop
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    training: set[cst.CSTNode] = set()
    for turn in turns(facts):
        training |= {turn.loop, *loops_around(facts, turn)}
    moves = [
        call for call in facts.methods("to", "cuda", "xpu", "cpu")
        if isinstance(facts.owner(call), cst.Name | cst.Attribute) and facts.is_model(facts.owner(call))
    ]  # fmt: skip
    for call in moves:
        loop = _loop_of(facts, call)
        if loop not in training or _is_to_cpu(facts, call):
            continue
        name, nodes = facts.code(facts.owner(call)), set(facts.script.within(loop.body))
        constructors = facts.constructors(facts.owner(call))
        is_made_before = bool(constructors) and not nodes.intersection(constructors)
        if is_made_before and not _is_moved_to_cpu(facts, name):
            yield Found(call, f"{facts.code(call)} in a loop, for a model created before it")


def _is_moved_to_cpu(facts: Facts, name: str) -> bool:
    """Whether a model is moved to the CPU anywhere, also as ``model.eval().cpu()``."""
    return any(
        _is_to_cpu(facts, call) and facts.code(facts.owner(call)).partition("(")[0].startswith(name)
        for call in facts.methods("to", "cpu")
    )


def _loop_of(facts: Facts, call: cst.Call) -> AnyLoop | None:
    """Return the innermost loop around a call in its own function, or None."""
    return next((node for node in facts.script.up(call) if isinstance(node, AnyLoop)), None)


def _is_to_cpu(facts: Facts, call: cst.Call) -> bool:
    argument = call.args[0].value if call.args else None
    return facts.method(call) == "cpu" or (literal(argument) or "").startswith("cpu")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(epoch="model.cuda()"), looped(epoch="model = model.to(device)")),
    healthy=(
        looped(before="model.cuda()"), looped(epoch="model.cuda()", after="model.cpu()"),
        looped(epoch="model.to(device)", after="torch.save(model.eval().cpu(), 'model.pt')"),
        looped(epoch="model = nn.Linear(16, 8).to(device)"), looped(epoch="best = model.to('cpu')"),
    ),
)  # fmt: skip
