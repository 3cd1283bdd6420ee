"""A loader gets both ``shuffle=True`` and a sampler.

DataLoader refuses the combination with a ValueError.

Fix: leave shuffle out; the sampler shuffles.
Source: torch.utils.data.DataLoader documentation: sampler is "mutually exclusive with shuffle".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        sampler = by_name(loader).get("sampler")
        origins = facts.flow.origins(sampler) if sampler is not None else []
        is_sampler = bool(origins) and all(
            isinstance(origin, cst.Call) and facts.meaning(origin).endswith("Sampler")
            for origin in origins
        )
        if is_sampler and facts.flag(loader, "shuffle"):
            yield Found(loader, "shuffle=True together with a sampler")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="from torch.utils.data import RandomSampler\nloader = DataLoader(data, shuffle=True, sampler=RandomSampler(data))"),),
    healthy=(looped(before="from torch.utils.data import RandomSampler\nloader = DataLoader(data, sampler=RandomSampler(data))"),),
)  # fmt: skip
