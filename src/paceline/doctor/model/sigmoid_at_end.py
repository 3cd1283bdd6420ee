"""A network ends in a Sigmoid, and its loss is not one on logits.

Its exp and log lose precision in 16 bits (BCELoss is refused under autocast), and the Sigmoid is an
extra pass over memory.

Fix: leave the Sigmoid out, train with BCEWithLogitsLoss, and apply torch.sigmoid where the result
is shown.
Source: torch.amp documentation, "Prefer binary_cross_entropy_with_logits".
"""

from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..layers import chains
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    if facts.script.calls("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"):
        return
    for chain in chains(facts):
        last = chain.layers[-1] if chain.layers else None
        is_end = chain.is_whole and isinstance(chain.node, cst.Call)
        if last is not None and is_end and last.kind == "Sigmoid":
            yield Found(last.node)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.NOTE, check,
    sick=("""
from torch import nn
model = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())
loss_fn = nn.BCELoss()
""",),
    healthy=("""
from torch import nn
model = nn.Sequential(nn.Linear(16, 1))
loss_fn = nn.BCEWithLogitsLoss()
""",),
)  # fmt: skip
