"""A network trains in float16 without a GradScaler.

Gradients below 6e-8 become 0 in float16, and most gradients are small.

Fix: a torch.amp.GradScaler, or dtype=torch.bfloat16, which needs no scaler.
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
_PRECISION_TOOLS = re.compile(r"[Ss]caler|[Aa]ccelerat|deepspeed|apex")


def check(facts: Facts) -> Iterator[Found]:
    if _PRECISION_TOOLS.search(facts.uncommented):
        return
    for turn in turns(facts):
        for block in facts.flow.reached([turn.loop.body]):
            for node in facts.script.within(block):
                items = node.items if isinstance(node, cst.With) else ()
                for context in (item.item for item in items):
                    if isinstance(context, cst.Call) and _is_float16(facts, context):
                        yield Found(context, "autocast to float16 without a GradScaler")


def _is_float16(facts: Facts, call: cst.Call) -> bool:
    name = facts.meaning(call)
    if not name.endswith("autocast") or literal(by_name(call).get("enabled")) == "False":
        return False
    dtype = by_name(call).get("dtype")
    if dtype is not None:
        code = facts.code(dtype)
        return _FLOAT16.search(code) is not None and "bfloat16" not in code
    device = positional(call)[0] if positional(call) else by_name(call).get("device_type")
    return name == "torch.cuda.amp.autocast" or literal(device) == "cuda"


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
