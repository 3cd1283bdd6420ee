"""A loader is made anew in each epoch, of the same data.

Its worker processes begin anew, and persistent_workers cannot help.

Fix: make it once, before the loop.
Source: torch.utils.data.DataLoader documentation, persistent_workers.
"""

from collections.abc import Iterator

import libcst as cst

from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import loops_around, turns
from ..rule import Found, ScriptRule
from ..values import number


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        outer = loops_around(facts, turn)
        for loader in facts.loaders_of_loop(turn.loop):
            loops = [
                one for one in facts.script.up(loader) if isinstance(one, cst.For) and one in outer
            ]
            is_guarded = any(isinstance(one, cst.If) for one in facts.script.up(loader))
            workers = facts.argument(loader, "num_workers", 5)
            count = None if workers is None else number(facts.flow, workers)
            if loops and not is_guarded and count and not _depends(facts, loader, loops[0]):
                yield Found(loader, f"made anew in each turn of line {facts.script.line(loops[0])}")


def _depends(facts: Facts, loader: cst.Call, loop: cst.For) -> bool:
    """Whether what it is made of changes in the loop."""
    inside = set(facts.script.within(loop))
    changed = {one.name for one in facts.script.bindings if one.node in inside}
    changed |= {one.value for one in facts.script.within(loop.target) if isinstance(one, cst.Name)}
    given = {
        one.value for part in loader.args for one in facts.script.within(part)
        if isinstance(one, cst.Name)
    }  # fmt: skip
    return bool(changed & given)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(epoch="loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4)"),),
    healthy=(looped(before="loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4)"),),
)  # fmt: skip
