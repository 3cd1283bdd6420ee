"""``--fix`` of one script, from its file to its file: edits, proof, diff, and the file if asked."""

from pathlib import Path

from ..findings import Diagnosis
from ..observed.launching import ScriptRun, observe, record
from .applying import ScriptFile, apply
from .mending import diff_of, edits_for, left_alone, unmended, with_edits
from .proving import NUM_STEPS, Proof, prove
from .report import FixReport

_STATIC = "--static runs nothing"


def fix_by_text(path: Path, found: Diagnosis) -> FixReport:
    """What reading alone would change; nothing is run, nothing is written."""
    source = ScriptFile.read(path)
    edits = tuple(edits_for(source.text))
    proof = Proof(edits, unproved=_STATIC if edits else "")
    return _report(source, found, proof)


def fix(run: ScriptRun, found: Diagnosis, *, is_applied: bool) -> FixReport:
    """What reading and prices change, proved over 20 steps, and written where that is asked for.

    Raises:
        ConfigError: it cannot be run, or not be written.
    """
    source = ScriptFile.read(run.script)
    prices = observe(run).prices if run.price_s else ()
    edits = edits_for(source.text, prices)
    if not edits:
        return _report(source, found, Proof(()))
    proof = prove(source.text, edits, lambda text: record(run, text, NUM_STEPS))
    report = _report(source, found, proof)
    if not (is_applied and report.diff):
        return report
    kept = apply(source, with_edits(source.text, proof.kept))
    return _report(source, found, proof, str(kept))


def _report(source: ScriptFile, found: Diagnosis, proof: Proof, kept_in: str = "") -> FixReport:
    after = with_edits(source.text, proof.kept)
    diff = diff_of(source.whole(source.text), source.whole(after), source.path.name)
    return FixReport(
        script=found.script, diff=diff, proof=proof, left=tuple(left_alone(found)),
        unmended=tuple(unmended(source.text, found)), kept_in=kept_in,
    )  # fmt: skip
