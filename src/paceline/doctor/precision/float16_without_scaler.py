"""A network trains in float16 without a GradScaler.

Gradients below 6e-8 become 0 in float16, and small ones are most of them.

Fix: a torch.amp.GradScaler, or dtype=torch.bfloat16, which needs none.
Source: torch.amp documentation, "Gradient Scaling".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name, positional
from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule
from ..values import literal

_FLOAT16 = re.compile(r"float16$|torch\.half$")
_HAS = re.compile(r"[Ss]caler|[Aa]ccelerat|deepspeed|apex")


def check(facts: Facts) -> Iterator[Found]:
    if _HAS.search(facts.uncommented):
        return
    for turn in turns(facts):
        for block in facts.flow.reached([turn.loop.body]):
            for node in facts.script.within(block):
                items = node.items if isinstance(node, cst.With) else ()
                for one in (item.item for item in items):
                    if isinstance(one, cst.Call) and _is_float16(facts, one):
                        yield Found(one, "autocast to float16 without a GradScaler")


def _is_float16(facts: Facts, call: cst.Call) -> bool:
    name = facts.meaning(call)
    if not name.endswith("autocast") or literal(by_name(call).get("enabled")) == "False":
        return False
    given = by_name(call).get("dtype")
    if given is not None:
        text = facts.code(given)
        return _FLOAT16.search(text) is not None and "bfloat16" not in text
    first = positional(call)[0] if positional(call) else by_name(call).get("device_type")
    return name == "torch.cuda.amp.autocast" or literal(first) == "cuda"


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(
            [
                "optimizer.zero_grad()",
                'with torch.autocast("cuda", dtype=torch.float16):',
                "    loss = loss_fn(model(x.to(device)), y.to(device))",
                "loss.backward()",
                "optimizer.step()",
            ]
        ),),
    healthy=(scaled(),
        looped(
            [
                "optimizer.zero_grad()",
                'with torch.autocast("cuda", dtype=torch.bfloat16):',
                "    loss = loss_fn(model(x.to(device)), y.to(device))",
                "loss.backward()",
                "optimizer.step()",
            ]
        ),),
)  # fmt: skip
