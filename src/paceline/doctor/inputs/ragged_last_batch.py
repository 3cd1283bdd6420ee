"""The last batch is smaller than the others.

Each epoch ends with a batch of a different shape: it triggers compilation and tuning again, uses
tensor cores badly, and its samples weigh more than others in a mean.

Fix: drop_last=True for training, not for evaluation.
Source: torch.utils.data.DataLoader documentation, drop_last; PyTorch performance tuning guide.
"""

from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..samples import num_samples


def check(facts: Facts) -> Iterator[Found]:
    for loader in facts.loaders:
        size, total = facts.batch_size(loader), num_samples(facts, loader)
        is_kept = facts.option(loader, "drop_last") in (None, "False")
        if not size or not total or not is_kept or total <= size or total % size == 0:
            continue
        if any(facts.is_in(loop, r"no_grad|inference_mode") for loop in facts.loops_over(loader)):
            continue
        yield Found(
            loader, f"{total} samples in batches of {size}: the last one has {total % size}"
        )


_TEXT = """
import torch
from torch.utils.data import DataLoader
data = torch.randn({}, 16)
loader = DataLoader(data, batch_size=64{})
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(_TEXT.format(123, ""),),
    healthy=(_TEXT.format(128, ""), _TEXT.format(123, ", drop_last=True")),
)  # fmt: skip
