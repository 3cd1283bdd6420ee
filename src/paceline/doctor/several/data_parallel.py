"""``nn.DataParallel``: one process drives all devices.

It copies the model in each step, gathers outputs on one device, and Python code for all devices
runs under one lock (GIL).

Fix: DistributedDataParallel, one process for each device (paceline launch --workers N starts them).
Source: torch.nn.DataParallel documentation: "it is recommended to use DistributedDataParallel".
"""

from collections.abc import Iterator

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.calls("DataParallel"):
        if facts.meaning(call) in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            yield Found(call, f"{facts.code(call)} drives all devices from one process")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(before="net = nn.DataParallel(model)"),),
    healthy=(looped(before="net = nn.parallel.DistributedDataParallel(model)"),),
)  # fmt: skip
