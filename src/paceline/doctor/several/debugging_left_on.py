"""The environment is set for debugging.

CUDA_LAUNCH_BLOCKING=1 waits for each kernel; TORCH_DISTRIBUTED_DEBUG=DETAIL compares the shapes of
each collective over all ranks.

Fix: leave it out once the fault is found.
Source: PyTorch CUDA semantics, "Asynchronous execution"; torch.distributed documentation, "Debugging".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_SET = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "TORCH_SHOW_CPP_STACKTRACES": (),
}


def check(facts: Facts) -> Iterator[Found]:
    for one in facts.script.bindings:
        found = re.fullmatch(r"""os\.environ\[['"](\w+)['"]\]""", one.name)
        is_on = found is not None and literal(one.value) in _SET.get(found[1], ())
        if found and is_on and not any(isinstance(up, cst.If) for up in facts.script.up(one.node)):
            yield Found(one.node, f"{found[1]}={literal(one.value)}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'"),),
    healthy=(looped(before="import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '0'"),),
)  # fmt: skip
