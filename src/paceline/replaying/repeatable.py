"""Whether a run can be made again from its trace, and if not, the one reason why.

    header            who computed what, where, and how it was rounded
    resumed records   what was another from there on

A replay computes plainly, in one process, as many threads at a time as a worker had. Nothing is
tried here: what was otherwise is named. This module must not know tasks, tensors or files.
"""

from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError
from ..protocols import parse
from ..trace.records import Header, Record, Resumed

_ARE_KEPT = (
    "program", "source", "protocol", "workers", "threads", "lookahead", "dropped", "nonfinite",
    "learning_rates", "init",
)  # fmt: skip
"""Fields of the header that must be the same after a resume."""


def refuse(run_dir: Path, header: Header, records: Iterable[Record], until: int | None) -> None:
    """Raise ConfigError where the run cannot be made again up to version ``until``.

    Args:
        until: None: to its end. What came after it does not matter.
    """
    if reason := _reason(header):
        raise ConfigError(f"{run_dir} cannot be replayed: {reason}")
    for one in records:
        if not isinstance(one, Resumed) or (until is not None and one.version >= until):
            continue
        if reason := _resumed_reason(header, one):
            raise ConfigError(
                f"{run_dir} cannot be replayed beyond version {one.version}, where it was resumed: "
                f"{reason}; --until {one.version} shows it up to there"
            )


def _reason(header: Header) -> str:
    """Why what this header describes cannot be made again; empty where it can."""
    program, device = header.text("program"), header.text("device")
    kind, _, name = program.partition(" ")
    if "program" not in header.fields:
        return "its trace does not name what ran; it is of an older version of Paceline"
    if kind == "script":
        return f"it ran the script {name}, whose loop the trace does not hold; run it again"
    if not name:
        return "its task was handed over from Python and has no name to find it by"
    if header.text("path") == "collective":
        return "its gradients were averaged by torch.distributed, in an order of its own"
    if not device.startswith("cpu"):
        return f"it ran on {device}, and only what a CPU computed comes out equal bit for bit"
    if rounding := header.texts("rounding"):
        return f"it ran with {' and '.join(rounding)}, which rounds otherwise than plain code does"
    return ""


def _resumed_reason(header: Header, resumed: Resumed) -> str:
    """Why what followed a resume cannot be made again; empty where it can."""
    changes = {"workers": resumed.workers, **resumed.changes}
    now = Header(fields={**header.fields, **changes})
    if reason := _reason(now):
        return reason
    for name in _ARE_KEPT:
        was, is_now = header.fields.get(name), now.fields.get(name)
        if was != is_now:
            return f"it went on with {name.replace('_', ' ')} {_word(is_now)}, and had {_word(was)}"
    if parse(now.text("protocol"), now.number("workers")).update_rule == "mean":
        return (
            f"it went on under {now.text('protocol')}, and the trace does not hold the state of "
            "each worker's own optimizer"
        )
    return ""


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
