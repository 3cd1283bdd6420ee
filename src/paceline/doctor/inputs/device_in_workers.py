"""A data set uses CUDA, and worker processes read it.

Workers are forked: it ends in "Cannot re-initialize CUDA in forked subprocess", or each worker
holds a context of the device.

Fix: give back tensors of the host, and move them in the loop that trains.
Source: torch.utils.data documentation, "Multi-process data loading": "not recommended to return CUDA tensors".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import number

_CUDA = re.compile(r"""\.cuda\(|\.to\(\s*['"]cuda|device\s*=\s*['"]cuda""")
_PARTS = re.compile(r"(^|\.)(random_split|Subset)$")


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        workers = facts.argument(loader, "num_workers", 5)
        count = None if workers is None else number(facts.flow, workers)
        data = facts.data_of(loader)
        if not count or data is None:
            continue
        for made in _whole(facts, data):
            node = (
                facts.flow.classes.get(facts.meaning(made)) if isinstance(made, cst.Call) else None
            )
            for one in facts.script.within(node.body) if node is not None else ():
                is_reader = isinstance(one, cst.FunctionDef) and one.name.value == "__getitem__"
                if is_reader and _CUDA.search(facts.code(one)):
                    yield Found(one, f"__getitem__ uses CUDA, in {count} worker processes")


def _whole(facts: Facts, data: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """What a data set is made by; of a part, what the whole is made by."""
    found = facts.flow.origins(data)
    if not found and isinstance(data, cst.Name):  # one of several that a call gives
        home = facts.flow.home(data.value, facts.script.scope(data))
        found = [one.value for one in facts.flow.bindings(data.value, home)]
    for made in found:
        given = positional(made) if isinstance(made, cst.Call) else []
        if given and _PARTS.search(facts.meaning(made)):
            yield from facts.flow.origins(given[0])
        else:
            yield made


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
""", """
import torch
from torch.utils.data import DataLoader, Dataset, random_split
class Data(Dataset):
    def __getitem__(self, i):
        return torch.ones(3).cuda()
    def __len__(self):
        return 8
first, second = random_split(Data(), [6, 2])
loader = DataLoader(first, num_workers=2)
"""),
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
