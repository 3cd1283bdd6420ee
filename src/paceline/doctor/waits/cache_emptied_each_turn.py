"""Memory is freed, or garbage collected, in each iteration.

empty_cache() waits, and the freed memory has to be requested from the driver again at once;
gc.collect() visits all objects.

Fix: leave it out; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation.
Source: PyTorch CUDA semantics, "Memory management".
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import always_reached
from ..mends import remove_statement
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for node in always_reached(facts):
        names = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "gc.collect")
        if isinstance(node, cst.Call) and facts.meaning(node) in names:
            yield Found(node, f"{facts.code(node)} in each iteration")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "torch.cuda.empty_cache()"]),),
    healthy=(looped(after="torch.cuda.empty_cache()"),),
    mend=remove_statement,
)  # fmt: skip
