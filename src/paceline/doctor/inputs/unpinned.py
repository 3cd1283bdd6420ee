"""Batches for a CUDA device come from memory that is not pinned.

The driver first copies them into its own pinned buffer, and no copy can overlap with computation.
For small batches pinning gains nothing.

Fix: pin_memory=True in the DataLoader, and .to(device, non_blocking=True).
Source: PyTorch performance tuning guide; torch.utils.data documentation, "Memory Pinning".
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
        if not isinstance(turn.loop, cst.For):
            continue
        loaders = [
            loader for loader in facts.loaders_of_loop(turn.loop)
            if facts.option(loader, "pin_memory") is None and not facts.has_stars(loader)
        ]  # fmt: skip
        names = {
            node.value
            for node in facts.script.within(turn.loop.target)
            if isinstance(node, cst.Name)
        }
        for call in facts.methods("cuda"):
            is_batch = (
                turn.loop in list(facts.script.up(call)) and facts.code(facts.owner(call)) in names
            )
            if loaders and is_batch and not call.args:
                yield Found(
                    loaders[0],
                    f"its batches are moved by {facts.code(call)} (line {facts.script.line(call)})",
                )
                break


def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Pass ``pin_memory=True`` to the loader."""
    assert isinstance(node, cst.Call)
    set_arguments(edits, node, pin_memory="True")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(["x, y = x.cuda(), y.cuda()", *STEP[1:]]).replace(", pin_memory=True", ""),),
    healthy=(looped(["x, y = x.cuda(), y.cuda()", *STEP[1:]]),),
    mend=mend,
)  # fmt: skip
