"""A GradScaler with autocast to bfloat16 only.

bfloat16 reaches as far down as float32, so that nothing underflows; the scaler still looks for
infinite gradients in each step and waits for the answer.

Fix: leave the scaler out, or GradScaler(enabled=False).
Source: torch.amp documentation, "Gradient Scaling".
"""

from collections.abc import Iterator

from ...porting.tree import by_name
from ..examples import looped, scaled
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    casts = [
        one for one in facts.script.calls("autocast")
        if literal(by_name(one).get("enabled")) != "False"
    ]  # fmt: skip
    kinds = {facts.code(one) for one in (by_name(each).get("dtype") for each in casts) if one}
    if (
        not casts
        or kinds != {"torch.bfloat16"}
        or any("dtype" not in by_name(one) for one in casts)
    ):
        return
    for one in facts.script.calls("GradScaler"):
        if "enabled" not in by_name(one):
            yield Found(one, "a GradScaler, and all autocast is to bfloat16")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(scaled(dtype="torch.bfloat16"),),
    healthy=(scaled(), looped(),),
)  # fmt: skip
