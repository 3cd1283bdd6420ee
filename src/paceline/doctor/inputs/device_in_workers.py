"""A data set uses CUDA and is read by worker processes.

Workers are forked: this raises "Cannot re-initialize CUDA in forked subprocess", or each worker
holds its own CUDA context.

Fix: return host tensors, and move them in the training loop.
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
        for dataset in _whole(facts, data):
            name = facts.meaning(dataset) if isinstance(dataset, cst.Call) else ""
            class_node = facts.flow.classes.get(name)
            for node in facts.script.within(class_node.body) if class_node is not None else ():
                is_reader = isinstance(node, cst.FunctionDef) and node.name.value == "__getitem__"
                if is_reader and _CUDA.search(facts.code(node)):
                    yield Found(node, f"__getitem__ uses CUDA in {count} worker processes")


def _whole(facts: Facts, data: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the expressions that may make a data set, or the whole that it is a part of."""
    origins = facts.flow.origins(data)
    if not origins and isinstance(data, cst.Name):  # one of several values that a call returns
        home = facts.flow.home(data.value, facts.script.scope(data))
        origins = [binding.value for binding in facts.flow.bindings(data.value, home)]
    for origin in origins:
        arguments = positional(origin) if isinstance(origin, cst.Call) else []
        if arguments and _PARTS.search(facts.meaning(origin)):
            yield from facts.flow.origins(arguments[0])
        else:
            yield origin


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
