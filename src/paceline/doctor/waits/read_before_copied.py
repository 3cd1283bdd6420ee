"""A copy to the host is read before it has finished.

With non_blocking=True the host continues at once and may read the old content.

Fix: leave non_blocking out, or torch.cuda.synchronize() before it is read.
Source: PyTorch tutorial "A guide on good usage of non_blocking and pin_memory()".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_WAITS = re.compile(r"synchronize|\.wait\(|record")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.methods("to"):
        is_host = any(literal(argument) == "cpu" for argument in positional(call)[:1])
        if not is_host or not facts.flag(call, "non_blocking"):
            continue
        scope = facts.script.scope(call)
        if _WAITS.search(facts.code(scope)):
            continue
        parent = facts.script.parents[call]
        is_read = isinstance(parent, cst.Attribute) and parent.attr.value in (
            "numpy",
            "item",
            "tolist",
        )
        if is_read or _is_read_next(facts, call):
            yield Found(call, f"{facts.code(call)} is read before the copy has finished")


def _is_read_next(facts: Facts, call: cst.Call) -> bool:
    """Whether the next line reads the name that the copy is bound to."""
    name = re.escape(facts.bound_to(call))
    pattern = rf"\b{name}\.(numpy|item|tolist)\(|print\(.*\b{name}\b"
    return bool(name) and re.search(pattern, facts.following(call)) is not None


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(looped([*STEP, "host = loss.detach().to('cpu', non_blocking=True)", "seen.append(host.numpy())"], before="seen = []"),),
    healthy=(looped([*STEP, "host = loss.detach().to('cpu', non_blocking=True)", "torch.cuda.synchronize()", "seen.append(host.numpy())"], before="seen = []"),),
)  # fmt: skip
