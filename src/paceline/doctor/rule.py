"""The form of a rule: one file whose docstring says what, why, fix and source; examples; one check.

    \"\"\"One line: what is wrong.

    Why that costs something, or is a bug.

    Fix: what to write instead.
    Source: who says so.
    \"\"\"
    def check(facts: Facts) -> Iterator[Found]: ...
    def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None: ...      only where safe
    RULE = ScriptRule.of(__name__, __doc__, Severity.BUG, check, sick=(...), healthy=(...))

A check is a pure function of the facts; a rule that is not sure yields nothing. It must fire in
each sick example and in no healthy one (checked by `paceline doctor --test-rules` and the tests).
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
    """A place where a rule fires, optionally with a more specific text than the rule's.

    Attributes:
        node: the finding is reported at its first line.
        what: what is wrong here; if empty, the rule's ``what``.
        fix: what to write instead; if empty, the rule's ``fix``.
    """

    node: cst.CSTNode
    what: str = ""
    fix: str = ""


Check: TypeAlias = Callable[[Facts], Iterable[Found]]
Mend: TypeAlias = Callable[[Facts, cst.CSTNode, TreeEdits], None]
"""Records the edits that fix a finding, or none if it cannot; losses and gradients stay equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRule:
    """One rule, as the doctor applies it.

    Attributes:
        name: the name of its file, with hyphens.
        group: the name of its folder.
        what, why, fix, source: the four parts of its docstring.
        sick: scripts in which it must fire.
        healthy: scripts in which it must not fire.
        mend: edits the script; None where no edit leaves losses and gradients as they are.
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
        """Return the rule that a file defines by its name, docstring, check and examples.

        Raises:
            ValueError: the docstring lacks a part, or an example is missing.
        """
        *_, group, name = module.split(".")
        what, _, rest = (doc or "").partition("\n\n")
        why, _, rest = rest.partition("\n\nFix: ")
        fix, _, source = rest.partition("\nSource: ")
        parts = [" ".join(part.split()) for part in (what, why, fix, source)]
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
        """The rule's texts, without its check and its examples."""
        return {
            "name": self.name, "group": self.group, "severity": self.severity.value,
            "what": self.what, "why": self.why, "fix": self.fix, "source": self.source,
            "mends": self.mend is not None,
        }  # fmt: skip


def rules_in(group: str, path: Sequence[str]) -> tuple[ScriptRule, ...]:
    """Import every module of a group's package and return their rules, ordered by file name."""
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    return tuple(importlib.import_module(f"{group}.{name}").RULE for name in names)
