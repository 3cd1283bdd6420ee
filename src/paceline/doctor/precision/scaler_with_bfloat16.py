"""A GradScaler is used with autocast to bfloat16 only.

bfloat16 has the range of float32, so nothing underflows; the scaler still checks for infinite
gradients in each step and waits for the result.

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
        call for call in facts.script.calls("autocast")
        if literal(by_name(call).get("enabled")) != "False"
    ]  # fmt: skip
    dtypes = {facts.code(by_name(cast)["dtype"]) for cast in casts if "dtype" in by_name(cast)}
    if dtypes != {"torch.bfloat16"} or any("dtype" not in by_name(cast) for cast in casts):
        return
    for scaler in facts.script.calls("GradScaler"):
        if "enabled" not in by_name(scaler):
            yield Found(scaler, "a GradScaler, but all autocast is to bfloat16")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(scaled(dtype="torch.bfloat16"),),
    healthy=(scaled(), looped(),),
)  # fmt: skip
