"""A copy with non_blocking=True has a source that is not pinned.

CUDA copies pageable memory through its own buffer: the host waits anyway.

Fix: pin_memory=True in the DataLoader.
Source: PyTorch tutorial "A guide on good usage of non_blocking and pin_memory()".
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import TreeEdits
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..mends import set_arguments
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        loaders = facts.loaders_of_loop(turn.loop)
        if not loaders or not isinstance(turn.loop, cst.For):
            continue
        if any(
            facts.option(loader, "pin_memory") not in (None, "False") or facts.has_stars(loader)
            for loader in loaders
        ):
            continue
        names = {
            node.value
            for node in facts.script.within(turn.loop.target)
            if isinstance(node, cst.Name)
        }
        for call in facts.methods("to", "cuda"):
            is_inside = turn.loop in list(facts.script.up(call))
            if (
                is_inside
                and facts.code(facts.owner(call)) in names
                and facts.flag(call, "non_blocking")
            ):
                yield Found(call, f"{facts.code(call)}, and the loader of line "
                                  f"{facts.script.line(loaders[0])} does not pin")  # fmt: skip
                break


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Pass ``pin_memory=True`` to the loaders of the innermost loop that has any."""
    loops = [outer for outer in facts.script.up(node) if isinstance(outer, cst.For)]
    loaders = (facts.loaders_of_loop(loop) for loop in loops)
    for loader in next(filter(None, loaders), []):
        set_arguments(edits, loader, pin_memory="True")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(["x = x.to(device, non_blocking=True)", *STEP]).replace(", pin_memory=True", ""),),
    healthy=(looped(["x = x.to(device, non_blocking=True)", *STEP]),),
    mend=mend,
)  # fmt: skip
