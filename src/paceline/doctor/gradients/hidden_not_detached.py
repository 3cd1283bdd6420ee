"""A hidden state goes from one batch to the next with its graph.

The second backward() ends in "Trying to backward through the graph a second time", or with
retain_graph=True goes back through all batches so far.

Fix: hidden = hidden.detach() at the beginning of each turn; of an LSTM both of its states.
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
        if not all(one.is_always for one in turn.of(CallRole.BACKWARD)):
            continue
        for call in facts.forward_calls():
            statement = facts.script.statement(call)
            if not isinstance(statement, cst.Assign) or statement.value is not call:
                continue
            target = statement.targets[0].target
            if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
                continue
            given = {one for arg in call.args[1:] for one in _names(facts, arg.value)}
            for name in _names(facts, target.elements[1].value):
                if name in given and _is_carried(facts, turn, statement, name):
                    yield Found(call, f"{name} is carried to the next turn with its graph")
                    break


def _names(facts: Facts, expr: cst.CSTNode) -> list[str]:
    return [one.value for one in facts.script.within(expr) if isinstance(one, cst.Name)]


def _is_carried(facts: Facts, turn: TrainingTurn, statement: cst.Assign, name: str) -> bool:
    """Whether a name keeps what this statement gave it until the next turn."""
    inside = list(facts.script.within(turn.loop))
    if statement not in inside or any(
        True for _ in branches_between(facts, statement, turn.loop.body)
    ):
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    others = [
        one for one in inside
        if isinstance(one, cst.Assign | cst.AugAssign | cst.For | cst.Del) and one is not statement
        and one is not turn.loop
    ]  # fmt: skip
    targets = [
        facts.code(each)
        for one in others
        for each in (
            [target.target for target in one.targets]
            if isinstance(one, cst.Assign)
            else [one.target]
        )
    ]
    is_anew = any(word.search(one) for one in targets)
    return (
        not is_anew and "detach" not in facts.uncommented and "repackage" not in facts.uncommented
    )


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
