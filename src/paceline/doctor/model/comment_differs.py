"""A comment states a different number of features or classes than the code.

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
from ..syntax import lines_of

_FEATURES = re.compile(r"#.*?\b(\d+)[ -](?:input )?features?\b")
_CLASSES = re.compile(r"#.*?\b(\d+)[ -]class(?:es)?\b")


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        if not chain.is_whole or not isinstance(chain.node, cst.Call) or not chain.layers:
            continue
        yield from _wrong_classes(facts, chain)
        for data in inputs_of(facts, chain):
            features = _number_in_comment(facts, data.data, _FEATURES)
            if features is not None and len(data.input) == 2 and features != data.input[1]:
                yield Found(
                    data.data,
                    f"the comment says {features} features and the data has {data.input[1]}",
                )


def _wrong_classes(facts: Facts, chain: Chain) -> Iterator[Found]:
    last = chain.layers[-1]
    classes = _number_in_comment(facts, chain.node, _CLASSES)
    is_other = last.kind == "Linear" and last.outs is not None and last.outs != classes
    if classes is not None and is_other and not (classes == 2 and last.outs == 1):
        yield Found(
            last.node, f"the comment says {classes} classes and the last layer outputs {last.outs}"
        )


def _number_in_comment(facts: Facts, node: cst.CSTNode, pattern: re.Pattern[str]) -> int | None:
    """Return the number in the last such comment above a node, with only data in between."""
    lines = lines_of(facts.text)[: facts.script.line(node) - 1]
    for distance, line in enumerate(reversed(lines)):
        match = pattern.search(line)
        if match:
            return int(match[1])
        if distance > 5 or re.search(r"\bdef\b|\bclass\b|nn\.", line):
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
