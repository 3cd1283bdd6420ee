"""Every process writes the same file.

They write at the same time: the file may be a mixture of several.

Fix: put if torch.distributed.get_rank() == 0: before it.
Source: PyTorch tutorial "Getting Started with Distributed Data Parallel", "Save and Load Checkpoints".
"""

from collections.abc import Iterator

from ...porting.reading import Source, writes
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    wrapped = facts.script.calls("parallel.DistributedDataParallel", "DistributedDataParallel")
    if not wrapped or not facts.script.calls("distributed.init_process_group"):
        return
    source = Source(facts.text)
    lines = {line for line, _, text in writes(source) if text.startswith("torch.save")}
    for call in facts.script.calls("torch.save"):
        if facts.script.line(call) in lines:
            yield Found(call, f"{facts.code(call)} runs in every process")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="import torch.distributed as dist\ndist.init_process_group('nccl')\nnet = nn.parallel.DistributedDataParallel(model)", end="torch.save(model.state_dict(), 'model.pt')"),),
    healthy=(looped(before="import torch.distributed as dist\ndist.init_process_group('nccl')\nnet = nn.parallel.DistributedDataParallel(model)", end="if dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'model.pt')"),),
)  # fmt: skip
