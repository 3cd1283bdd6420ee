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

_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "TORCH_SHOW_CPP_STACKTRACES": (),
}


def check(facts: Facts) -> Iterator[Found]:
    for binding in facts.script.bindings:
        variable = re.fullmatch(r"""os\.environ\[['"](\w+)['"]\]""", binding.name)
        if variable is None or literal(binding.value) not in _DEBUGGING.get(variable[1], ()):
            continue
        if not any(isinstance(node, cst.If) for node in facts.script.up(binding.node)):
            yield Found(binding.node, f"{variable[1]}={literal(binding.value)}")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'"),),
    healthy=(looped(before="import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '0'"),),
)  # fmt: skip
