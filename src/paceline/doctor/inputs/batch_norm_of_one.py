"""Batch norm is trained with a batch of one sample.

Its variance over the batch is 0 or undefined; BatchNorm1d raises "Expected more than 1 value per
channel when training".

Fix: a larger batch; drop_last=True if only the last batch has one sample; or GroupNorm.
Source: torch.nn.BatchNorm1d documentation; torch.nn.functional.batch_norm.
"""

from collections.abc import Iterator

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule
from ..samples import num_samples


def check(facts: Facts) -> Iterator[Found]:
    norms = facts.script.calls("nn.BatchNorm1d")
    if not norms:
        return
    for turn in turns(facts):
        for loader in facts.loaders_of_loop(turn.loop):
            size, total = facts.batch_size(loader), num_samples(facts, loader)
            is_explicit = facts.argument(loader, "batch_size", 1) is not None
            is_kept = facts.option(loader, "drop_last") in (None, "False")
            if size == 1 and is_explicit:
                yield Found(loader, "batches of one sample, and a BatchNorm1d")
            elif size and size > 1 and total and total % size == 1 and is_kept:
                yield Found(
                    loader,
                    f"{total} samples in batches of {size}: the last has one, and a BatchNorm1d",
                )


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped().replace("batch_size=64", "batch_size=1"), looped().replace("512", "513"),),
    healthy=(looped(), looped().replace("512", "513").replace("shuffle=True", "shuffle=True, drop_last=True"),),
)  # fmt: skip
