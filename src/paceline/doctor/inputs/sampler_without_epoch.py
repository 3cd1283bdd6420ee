"""A DistributedSampler never gets the epoch.

It shuffles by seed and epoch, so without set_epoch every epoch has the same order and the same
split.

Fix: sampler.set_epoch(epoch) at the start of each epoch.
Source: torch.utils.data.distributed.DistributedSampler documentation, warning.
"""

from collections.abc import Iterator

from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    if "set_epoch" in facts.uncommented:
        return
    for call in facts.script.calls("DistributedSampler"):
        if literal(by_name(call).get("shuffle")) == "False" or facts.has_stars(call):
            continue
        loaders = [
            loader for loader in facts.loaders
            if "sampler" in by_name(loader) and call in facts.flow.origins(by_name(loader)["sampler"])
        ]  # fmt: skip
        for turn in turns(facts):
            iterated = facts.loaders_of_loop(turn.loop)
            if loops_around(facts, turn) and any(loader in iterated for loader in loaders):
                yield Found(call, "set_epoch() is never called, so each epoch has the same order")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before="from torch.utils.data.distributed import DistributedSampler\nsampler = DistributedSampler(data)\nloader = DataLoader(data, batch_size=8, sampler=sampler)").replace("loader = DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)\n", ""),),
    healthy=(looped(epoch="sampler.set_epoch(epoch)", before="from torch.utils.data.distributed import DistributedSampler\nsampler = DistributedSampler(data)\nloader = DataLoader(data, batch_size=8, sampler=sampler)"),),
)  # fmt: skip
