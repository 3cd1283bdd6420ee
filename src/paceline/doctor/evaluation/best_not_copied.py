"""The best weights are kept as a reference, not as a copy.

state_dict() returns the parameters themselves: the saved weights keep changing with the model and
end as those of the last epoch.

Fix: copy.deepcopy(model.state_dict()), or torch.save it at once.
Source: PyTorch, Saving and Loading Models: "you must serialize best_model_state or use deepcopy".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import Binding, TreeEdits
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        outer = [turn.loop, *loops_around(facts, turn)]
        for binding in facts.script.bindings:
            loops = [node for node in facts.script.up(binding.node) if node in outer]
            if binding.place is None and loops and _is_kept(facts, binding, loops[-1]):
                yield Found(binding.node, f"{facts.code(binding.node)} is not a copy")


def _is_kept(facts: Facts, binding: Binding, loop: cst.CSTNode) -> bool:
    """Whether a model from outside the loop, or its state, is kept as the best and used after it."""
    model = _model_of(facts, binding.value)
    is_branched = any(isinstance(node, cst.If) for node in facts.script.up(binding.node))
    if model is None or not is_branched or "best" not in binding.name.lower():
        return False
    name, nodes = facts.code(model), set(facts.script.within(loop))
    is_made_inside = any(
        other.name == name and other.node in nodes for other in facts.script.bindings
    )
    order = facts.script.order
    end = max(order[node] for node in nodes if node in order)
    is_used = any(
        facts.code(node) == binding.name and order[node] > end
        for node in facts.script.nodes
        if isinstance(node, cst.Name | cst.Attribute)
    )
    is_changed = (
        re.search(rf"deepcopy\(\s*{re.escape(binding.name)}\b", facts.uncommented) is not None
    )
    return is_used and not is_made_inside and not is_changed


def _model_of(facts: Facts, value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the model that a value is, or whose state it is; None if it is neither."""
    if isinstance(value, cst.Call) and facts.method(value) == "state_dict":
        value = facts.owner(value)
    elif not isinstance(value, cst.Name):
        return None
    return value if facts.is_model(value) else None


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Clone each tensor of a state; a model has to be copied by hand."""
    if isinstance(node, cst.Assign) and isinstance(node.value, cst.Call):
        items = f"{facts.code(node.value)}.items()"
        edits.replace(node.value, f"{{key: value.clone() for key, value in {items}}}")


_BEST = "model.eval()\nscore = loss.item()\nif score < best:\n    best, best_weights = score, None\n    best_weights = {}\nmodel.train()"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        looped(before="best = 9.0", after=_BEST.format("model.state_dict()"), end="model.load_state_dict(best_weights)"),
        looped(before="best = 9.0\nbest_model = None", after="if loss.item() < best:\n    best_model = model", end="torch.save(best_model.state_dict(), 'best.pt')"),
    ),
    healthy=(
        looped(before="import copy\nbest = 9.0", after=_BEST.format("copy.deepcopy(model.state_dict())"), end="model.load_state_dict(best_weights)"),
        looped(before="best = 9.0", after=_BEST.format("{k: v.clone() for k, v in model.state_dict().items()}"), end="model.load_state_dict(best_weights)"),
        looped(before="best = 9.0", after="if loss.item() < best:\n    best_state = model.state_dict()\n    torch.save(best_state, 'best.pt')"),
        looped(before="best, best_model = 9.0, None", epoch="model = nn.Linear(16, 8).to(device)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)", after="if loss.item() < best:\n    best_model = model", end="torch.save(best_model.state_dict(), 'best.pt')"),
    ),
    mend=mend,
)  # fmt: skip
