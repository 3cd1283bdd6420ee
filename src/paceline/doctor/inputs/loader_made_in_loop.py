"""A loader is created again in each epoch, from the same data.

Its worker processes start again, and persistent_workers cannot help.

Fix: create it once, before the loop.
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
                node
                for node in facts.script.up(loader)
                if isinstance(node, cst.For) and node in outer
            ]
            is_guarded = any(isinstance(node, cst.If) for node in facts.script.up(loader))
            workers = facts.argument(loader, "num_workers", 5)
            count = None if workers is None else number(facts.flow, workers)
            if loops and not is_guarded and count and not _depends(facts, loader, loops[0]):
                yield Found(
                    loader, f"created again in each iteration of line {facts.script.line(loops[0])}"
                )


def _depends(facts: Facts, loader: cst.Call, loop: cst.For) -> bool:
    """Whether a loader's arguments change in a loop."""
    nodes = set(facts.script.within(loop))
    changed = {binding.name for binding in facts.script.bindings if binding.node in nodes}
    changed |= {
        node.value for node in facts.script.within(loop.target) if isinstance(node, cst.Name)
    }
    used = {
        node.value for argument in loader.args for node in facts.script.within(argument)
        if isinstance(node, cst.Name)
    }  # fmt: skip
    return bool(changed & used)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(epoch="loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4)"),),
    healthy=(looped(before="loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=4)"),),
)  # fmt: skip
