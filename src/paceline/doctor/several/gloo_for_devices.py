"""Gradients of CUDA devices are exchanged with gloo.

gloo copies them to the host and sums them there; nccl exchanges them between devices directly.

Fix: init_process_group("nccl").
Source: torch.distributed documentation, "Which backend to use?".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_CUDA = re.compile(r"\.cuda\(|['\"]cuda|device_ids\s*=\s*\[")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.calls("distributed.init_process_group"):
        backend = facts.argument(call, "backend", 0)
        is_gloo = backend is not None and literal(backend) == "gloo"
        is_guarded = any(isinstance(node, cst.If) for node in facts.script.up(call))
        moves = [
            move for move in facts.methods("cuda", "to")
            if _CUDA.search(facts.code(move)) and facts.is_model(facts.owner(move))
        ]  # fmt: skip
        if is_gloo and not is_guarded and moves and "nccl" not in facts.uncommented:
            yield Found(
                call, f"gloo, but line {facts.script.line(moves[0])} puts the model on CUDA"
            )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="import torch.distributed as dist\ndist.init_process_group('gloo')\nmodel = model.cuda()"),),
    healthy=(looped(before="import torch.distributed as dist\ndist.init_process_group('nccl')\nmodel = model.cuda()"),),
)  # fmt: skip
