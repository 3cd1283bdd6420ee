"""A hidden state is carried from one batch to the next with its graph.

The second backward() raises "Trying to backward through the graph a second time", or with
retain_graph=True goes back through all batches so far.

Fix: hidden = hidden.detach() at the start of each iteration; for an LSTM both of its states.
Source: PyTorch examples, word_language_model, repackage_hidden(): "wraps hidden states in new Tensors, to detach them from their history".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, TrainingTurn, branches_between, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        if not all(event.is_always for event in turn.of(CallRole.BACKWARD)):
            continue
        for call in facts.forward_calls():
            statement = facts.script.statement(call)
            if not isinstance(statement, cst.Assign) or statement.value is not call:
                continue
            target = statement.targets[0].target
            if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
                continue
            arguments = {name for arg in call.args[1:] for name in _names(facts, arg.value)}
            for name in _names(facts, target.elements[1].value):
                if name in arguments and _is_carried(facts, turn, statement, name):
                    yield Found(call, f"{name} is carried to the next iteration with its graph")
                    break


def _names(facts: Facts, expr: cst.CSTNode) -> list[str]:
    return [node.value for node in facts.script.within(expr) if isinstance(node, cst.Name)]


def _is_carried(facts: Facts, turn: TrainingTurn, statement: cst.Assign, name: str) -> bool:
    """Whether a name keeps the value that a statement assigns until the next turn."""
    nodes = list(facts.script.within(turn.loop))
    if statement not in nodes or any(
        True for _ in branches_between(facts, statement, turn.loop.body)
    ):
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    others = [
        node for node in nodes
        if isinstance(node, cst.Assign | cst.AugAssign | cst.For | cst.Del) and node is not statement
        and node is not turn.loop
    ]  # fmt: skip
    targets = [
        facts.code(target)
        for node in others
        for target in (
            [target.target for target in node.targets]
            if isinstance(node, cst.Assign)
            else [node.target]
        )
    ]
    is_reassigned = any(word.search(target) for target in targets)
    is_detached = "detach" in facts.uncommented or "repackage" in facts.uncommented
    return not is_reassigned and not is_detached


_RNN = [*STEP[:2], "out, hidden = model(x, hidden)", "loss = loss_fn(out, y)", *STEP[3:]]
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(_RNN, epoch="hidden = None"),),
    healthy=(
        looped(["hidden = torch.zeros(1, 64, 8, device=device)", *_RNN]),
        looped(["hidden = hidden.detach()", *_RNN], epoch="hidden = model.begin()"),
        looped(["for part in x:\n    out, hidden = model(part, hidden)", *STEP[1:]], epoch="hidden = None"),
    ),
)  # fmt: skip
