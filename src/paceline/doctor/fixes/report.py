"""The result of ``--fix``, as a value and as lines. This module must not know how it was found."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..findings import ScriptFinding
from .proving import NUM_STEPS, Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class FixReport:
    """The changes that would be, or were, made to a script.

    Attributes:
        script: its path.
        diff: the unified diff; empty if nothing changes.
        proof: the proof of the edits in the diff.
        left: bugs that are left alone, since their fix changes what is computed.
        unmended: bugs that their rule mends elsewhere, but not at this place.
        kept_in: the file that keeps the script's old text; empty if nothing was written.
    """

    script: str
    diff: str
    proof: Proof
    left: tuple[ScriptFinding, ...]
    unmended: tuple[ScriptFinding, ...] = ()
    kept_in: str = ""

    def _names(self) -> list[str]:
        """Return the names of what is fixed, each once."""
        return list(dict.fromkeys(edit.name for edit in self.proof.kept))

    def to_json(self) -> dict[str, object]:
        return {
            "script": self.script, "diff": self.diff, "applied": bool(self.kept_in),
            "fixes": self._names(),
            "changes_numbers": [[edit.name, why] for edit, why in self.proof.dropped],
            "not_reached": [[edit.name, line] for edit, line in self.proof.unreached],
            "proved_steps": self.proof.num_steps, "unproved": self.proof.unproved,
            "left_alone": [bug.to_json() for bug in (*self.left, *self.unmended)],
            "kept_in": self.kept_in,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the report's lines, without the diff."""
        proof = self.proof
        if proof.kept and proof.num_steps:
            yield (
                f"{len(proof.kept)} fixed ({', '.join(self._names())}); over "
                f"{proof.num_steps} steps every loss and every gradient is equal to the last bit"
            )
        elif proof.kept:
            yield f"{len(proof.kept)} fixed, not proved: {proof.unproved}"
        elif proof.unproved:
            yield f"nothing is fixed: {proof.unproved}"
        elif proof.unreached:
            yield f"{self.script}: nothing was proved"
        else:
            yield f"{self.script}: nothing can be fixed without changing numbers"
        for edit, why in proof.dropped:
            yield (
                f"left out, since it changes {why}: {self.script}:{edit.line} {edit.name} "
                f"({edit.what})"
            )
        for edit, line in proof.unreached:
            yield (
                f"left out, since line {line} was not seen to run in {NUM_STEPS} steps, so nothing "
                f"is proved of it: {self.script}:{edit.line} {edit.name} ({edit.what})"
            )
        for bug in self.left:
            yield (
                f"left alone, since it changes what is computed: {self.script}:{bug.line} "
                f"{bug.rule}: {bug.fix}"
            )
        for bug in self.unmended:
            yield f"left alone: {self.script}:{bug.line} {bug.rule}: {bug.fix}"
        if self.kept_in:
            yield f"written; paceline doctor {self.script} --undo restores the old text"
