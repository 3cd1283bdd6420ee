"""Each process of a data-parallel run reads all of the data.

Without a sampler every process draws from the whole data set: an epoch is as long as one for each
process, and adding processes does not shorten it.

Fix: sampler=DistributedSampler(data), and its set_epoch(epoch).
Source: torch.nn.parallel.DistributedDataParallel documentation; torch.utils.data.distributed.DistributedSampler.
"""

import re
from collections.abc import Iterator

from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule

_DIVIDES_DATA = re.compile(
    r"[Ss]ampler|Subset|\.shard\(|split_dataset_by_node|Accelerator|IterableDataset|"
    r"\[(int\()?(self\.)?(local_|global_)?rank\)?\s*::|webdataset|indices|random_split|num_replicas"
)


def check(facts: Facts) -> Iterator[Found]:
    if not facts.script.calls("DistributedDataParallel") or _DIVIDES_DATA.search(facts.uncommented):
        return
    if re.search(r"rank", _data_code(facts)):
        return
    for turn in turns(facts):
        for loader in facts.loaders_of_loop(turn.loop):
            if not facts.has_stars(loader) and "batch_sampler" not in by_name(loader):
                yield Found(
                    loader, "a loader without DistributedSampler, under DistributedDataParallel"
                )


def _data_code(facts: Facts) -> str:
    """Return the code that makes the loaders' data, as far as it can be seen."""
    code = []
    for loader in facts.loaders:
        data = facts.data_of(loader)
        origins = facts.flow.origins(data) if data is not None else ()
        code += [facts.code(origin) for origin in origins]
    return "\n".join(code)


_DDP = "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)\n"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped(before=_DDP),),
    healthy=(
        looped(),
        looped(before=_DDP + "from torch.utils.data.distributed import DistributedSampler\nloader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))"),
    ),
)  # fmt: skip
