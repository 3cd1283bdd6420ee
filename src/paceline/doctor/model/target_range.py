"""Targets come from a normal distribution, but the output lies between 0 and 1.

A Sigmoid never reaches a target below 0 or above 1, so this loss has a floor far from 0.

Fix: use targets of 0 and 1, such as torch.randint(0, 2, size).float(), or leave out the Sigmoid.
Source: torch.nn.BCELoss documentation: "the targets y should be numbers between 0 and 1".
"""

from collections.abc import Iterator

import libcst as cst

from ..facts import Facts
from ..findings import Severity
from ..layers import chains
from ..rule import Found, ScriptRule
from ..samples import inputs_of


def check(facts: Facts) -> Iterator[Found]:
    for chain in chains(facts):
        if not chain.is_whole or not chain.layers or chain.layers[-1].kind != "Sigmoid":
            continue
        for data in inputs_of(facts, chain):
            if data.target_data is None:
                continue
            origins = facts.flow.origins(data.target_data)
            target = next((origin for origin in origins if isinstance(origin, cst.Call)), None)
            if target is not None and facts.meaning(target) == "torch.randn":
                yield Found(
                    target, "the target is normal noise, but the network ends in a Sigmoid (0 to 1)"
                )


_DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(64, 16), torch.{}(64, 1)
model = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())
for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
    out = model(a)
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_DATA.format("randn"),),
    healthy=(_DATA.format("rand"),),
)  # fmt: skip
