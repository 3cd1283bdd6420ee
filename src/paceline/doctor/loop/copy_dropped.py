"""A tensor is moved, and the result is dropped.

to() and cuda() of a tensor give a new one; the old stays where it is. (Of a module they do not.)

Fix: x = x.to(device).
Source: torch.Tensor.to documentation: "returns a copy".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("to", "cuda"):
        statement = facts.script.parents[call]
        owner = facts.owner(call)
        if (
            isinstance(statement, cst.Expr)
            and isinstance(owner, cst.Name)
            and _is_tensor(facts, owner)
        ):
            name = facts.code(owner)
            yield Found(
                call, f"{facts.code(call)} changes nothing", f"write {name} = {facts.code(call)}"
            )


def _is_tensor(facts: Facts, name: cst.Name) -> bool:
    """What a loop over a loader gives, or torch makes."""
    if facts.is_model(name):
        return False
    for loop in facts.script.up(name):
        if isinstance(loop, cst.For) and facts.loaders_of_loop(loop):
            inside = [one for one in facts.script.within(loop.target) if isinstance(one, cst.Name)]
            if name.value in [one.value for one in inside]:
                return not _is_mapping(facts, name.value, loop)
    made = facts.flow.origins(name)
    return bool(made) and all(
        isinstance(one, cst.Call)
        and re.search(r"^torch\.(rand\w*|zeros|ones|tensor|full|empty|arange)$", facts.meaning(one))
        for one in made
    )


def _is_mapping(facts: Facts, name: str, loop: cst.For) -> bool:
    """Whether a batch has names: what tokenizers give moves in place, and a dict has no to()."""
    for one in facts.script.within(loop.body):
        if isinstance(one, cst.Arg) and one.star == "**" and facts.code(one.value) == name:
            return True
        if isinstance(one, cst.Subscript) and facts.code(one.value) == name:
            place = one.slice[0].slice
            if isinstance(place, cst.Index) and isinstance(place.value, cst.SimpleString):
                return True
    return False


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(["x.to(device)", *STEP[1:]]),),
    healthy=(
        looped(), looped(["x.to(device)", STEP[1], "loss = model(**x).loss", *STEP[3:]]).replace("for x, y in", "for x in"),
        looped(["x.to(device)", STEP[1], "loss = loss_fn(model(x['ids']), x['labels'])", *STEP[3:]]).replace("for x, y in", "for x in"),
    ),
)  # fmt: skip
