"""A data set uses CUDA, and worker processes read it.

Workers are forked: it ends in "Cannot re-initialize CUDA in forked subprocess", or each worker
holds a context of the device.

Fix: give back tensors of the host, and move them in the loop that trains.
Source: torch.utils.data documentation, "Multi-process data loading": "not recommended to return CUDA tensors".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import number

_CUDA = re.compile(r"""\.cuda\(|\.to\(\s*['"]cuda|device\s*=\s*['"]cuda""")


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        workers = facts.given(loader, "num_workers", 5)
        count = None if workers is None else number(facts.flow, workers)
        data = facts.data_of(loader)
        if not count or data is None:
            continue
        for made in facts.flow.origins(data):
            node = (
                facts.flow.classes.get(facts.meaning(made)) if isinstance(made, cst.Call) else None
            )
            for one in facts.script.within(node.body) if node is not None else ():
                is_reader = isinstance(one, cst.FunctionDef) and one.name.value == "__getitem__"
                if is_reader and _CUDA.search(facts.code(one)):
                    yield Found(one, f"__getitem__ uses CUDA, in {count} worker processes")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=("""
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __getitem__(self, i):
        return torch.ones(3).cuda()
    def __len__(self):
        return 8
loader = DataLoader(Data(), num_workers=2)
""",),
    healthy=("""
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __getitem__(self, i):
        return torch.ones(3)
    def __len__(self):
        return 8
loader = DataLoader(Data(), num_workers=2)
""",),
)  # fmt: skip
