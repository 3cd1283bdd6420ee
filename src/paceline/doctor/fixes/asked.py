"""``--fix`` for one script: find the edits, prove them, make the diff, and write it if asked."""

from pathlib import Path

from ..findings import Diagnosis
from ..observed.launching import ScriptRun, observe, record
from .applying import ScriptFile, apply
from .mending import diff_of, edits_for, left_alone, unmended, with_edits
from .proving import NUM_STEPS, Proof, prove
from .report import FixReport

_STATIC = "--static runs nothing"


def fix_by_text(path: Path, diagnosis: Diagnosis) -> FixReport:
    """Return the edits that reading alone suggests; nothing is run and nothing is written."""
    source = ScriptFile.read(path)
    edits = tuple(edits_for(source.text))
    proof = Proof(edits, unproved=_STATIC if edits else "")
    return _report(source, diagnosis, proof)


def fix(run: ScriptRun, diagnosis: Diagnosis, *, is_applied: bool) -> FixReport:
    """Return the edits that rules and prices suggest, proved over 20 steps.

    Args:
        is_applied: whether to write the proved edits into the script.

    Raises:
        ConfigError: the script cannot be run, or not be written.
    """
    source = ScriptFile.read(run.script)
    prices = observe(run).prices if run.price_s else ()
    edits = edits_for(source.text, prices)
    if not edits:
        return _report(source, diagnosis, Proof(()))
    proof = prove(source.text, edits, lambda text: record(run, text, NUM_STEPS))
    report = _report(source, diagnosis, proof)
    if not (is_applied and report.diff):
        return report
    backup = apply(source, with_edits(source.text, proof.kept))
    return _report(source, diagnosis, proof, str(backup))


def _report(source: ScriptFile, diagnosis: Diagnosis, proof: Proof, kept_in: str = "") -> FixReport:
    new_text = with_edits(source.text, proof.kept)
    diff = diff_of(source.whole(source.text), source.whole(new_text), source.path.name)
    return FixReport(
        script=diagnosis.script, diff=diff, proof=proof, left=tuple(left_alone(diagnosis)),
        unmended=tuple(unmended(source.text, diagnosis)), kept_in=kept_in,
    )  # fmt: skip
