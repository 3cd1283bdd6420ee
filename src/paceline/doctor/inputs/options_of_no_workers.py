"""A loader has options for worker processes but no worker processes.

persistent_workers and prefetch_factor raise a ValueError if num_workers is 0.

Fix: num_workers=2 (or more), or leave the option out.
Source: torch.utils.data.DataLoader documentation.
"""

from collections.abc import Iterator

from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import number


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        keywords = by_name(loader)
        workers = facts.argument(loader, "num_workers", 5)
        count = 0 if workers is None else number(facts.flow, workers)
        if count != 0 or facts.has_stars(loader):
            continue
        prefetch = keywords.get("prefetch_factor")
        if facts.flag(loader, "persistent_workers"):
            yield Found(loader, "persistent_workers=True with num_workers=0")
        elif prefetch is not None and number(facts.flow, prefetch):
            yield Found(loader, "prefetch_factor with num_workers=0")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="loader = DataLoader(data, batch_size=8, shuffle=True, persistent_workers=True)"),),
    healthy=(looped(before="loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)"),),
)  # fmt: skip
