"""The comment above says another number of features or classes than the code has.

One of the two is wrong; a wrong number of classes trains without an error.

Fix: make them agree.
Source: PEP 8, "Comments that contradict the code are worse than no comments".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..layers import Chain, chains
from ..rule import Found, ScriptRule
from ..samples import inputs_of

_FEATURES = re.compile(r"#.*?\b(\d+)[ -](?:input )?features?\b")
_CLASSES = re.compile(r"#.*?\b(\d+)[ -]class(?:es)?\b")


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        if not chain.is_whole or not isinstance(chain.node, cst.Call) or not chain.layers:
            continue
        yield from _of_classes(facts, chain)
        for one in inputs_of(facts, chain):
            said = _said(facts, one.data, _FEATURES)
            if said is not None and len(one.input) == 2 and said != one.input[1]:
                yield Found(
                    one.data, f"the comment says {said} features and the data has {one.input[1]}"
                )


def _of_classes(facts: Facts, chain: Chain) -> Iterator[Found]:
    last = chain.layers[-1]
    said = _said(facts, chain.node, _CLASSES)
    is_other = last.kind == "Linear" and last.outs is not None and last.outs != said
    if said is not None and is_other and not (said == 2 and last.outs == 1):
        yield Found(
            last.node, f"the comment says {said} classes and the last layer makes {last.outs}"
        )


def _said(facts: Facts, node: cst.CSTNode, pattern: re.Pattern[str]) -> int | None:
    """What the last such comment above says, where nothing but data stands between."""
    rows = facts.text.splitlines()[: facts.script.line(node) - 1]
    for number, row in enumerate(reversed(rows)):
        found = pattern.search(row)
        if found:
            return int(found[1])
        if number > 5 or re.search(r"\bdef\b|\bclass\b|nn\.", row):
            return None
    return None


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(
        """
import torch
# 15 features, 3 class classification

data = torch.randn(123, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
model(data)
""",
    ),
    healthy=(
        """
import torch
# 16 features, 5 classes

data = torch.randn(123, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
model(data)
""",
    ),
)  # fmt: skip
