"""What a rule is: one file with what, why, fix and source as its docstring, examples, one check.

    \"\"\"One line: what is wrong.

    Why that costs something, or is a bug.

    Fix: what to write instead.
    Source: who says so.
    \"\"\"
    def check(facts: Facts) -> Iterator[Found]: ...
    def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None: ...      where it is safe
    RULE = ScriptRule.of(__name__, __doc__, Severity.BUG, check, sick=(...), healthy=(...))

A check is a pure function of facts; a rule that is not sure yields nothing. Each sick example must
be found, each healthy one must not (`paceline doctor --test-rules`, and the tests).
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import libcst as cst

from ..porting.tree import TreeEdits
from .facts import Facts
from .findings import Severity


class Found(NamedTuple):
    """Where a rule fires, with words of its own instead of the rule's.

    Attributes:
        node: whose first line it is.
        what: what is there; empty: the rule's first line.
        fix: what to write; empty: the rule's.
    """

    node: cst.CSTNode
    what: str = ""
    fix: str = ""


Check: TypeAlias = Callable[[Facts], Iterable[Found]]
Mend: TypeAlias = Callable[[Facts, cst.CSTNode, TreeEdits], None]
"""Puts the fix of one finding into edits, nothing where it cannot; losses and gradients stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRule:
    """One rule.

    Attributes:
        name: its file's, with hyphens.
        group: its folder's.
        what, why, fix, source: the parts of its docstring.
        sick: scripts in which it must fire; healthy: in which it must not.
        mend: writes the fix, where one leaves losses and gradients as they are.
    """

    name: str
    group: str
    severity: Severity
    what: str
    why: str
    fix: str
    source: str
    check: Check
    sick: tuple[str, ...]
    healthy: tuple[str, ...]
    mend: Mend | None = None

    @classmethod
    def of(
        cls, module: str, doc: str | None, severity: Severity, check: Check, *,
        sick: tuple[str, ...], healthy: tuple[str, ...], mend: Mend | None = None,
    ) -> "ScriptRule":  # fmt: skip
        """A rule from its file.

        Raises:
            ValueError: the docstring lacks a part.
        """
        *_, group, name = module.split(".")
        what, _, rest = (doc or "").partition("\n\n")
        why, _, rest = rest.partition("\n\nFix: ")
        fix, _, source = rest.partition("\nSource: ")
        parts = [" ".join(one.split()) for one in (what, why, fix, source)]
        if not all(parts) or not sick or not healthy:
            raise ValueError(
                f"{module} must have what, why, Fix: and Source: in its docstring, and sick and "
                "healthy examples"
            )
        return cls(
            name=name.replace("_", "-"), group=group, severity=severity, what=parts[0].rstrip("."),
            why=parts[1], fix=parts[2], source=parts[3], check=check, sick=sick, healthy=healthy,
            mend=mend,
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """Without its check and its examples."""
        return {
            "name": self.name, "group": self.group, "severity": self.severity.value,
            "what": self.what, "why": self.why, "fix": self.fix, "source": self.source,
            "mends": self.mend is not None,
        }  # fmt: skip


def rules_in(group: str, path: Sequence[str]) -> tuple[ScriptRule, ...]:
    """Those of a package: one of each of its files, in the order of their names."""
    names = sorted(one.name for one in pkgutil.iter_modules(path))
    return tuple(importlib.import_module(f"{group}.{name}").RULE for name in names)
