"""What a run leaves beside its trace, and what a comparison of runs leaves beside them.

    a run           summary.json     curve.svg          follow from the trace at any time
    a comparison    comparison.json  comparison.svg     follow from the traces of its runs

This module must not know engines.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ..system.files import OpenFolder
from .compared import Comparison
from .compared_svg import draw_comparison
from .summary import Summary, summarize
from .svg import draw_curve

SUMMARY_NAME = "summary.json"
CURVE_NAME = "curve.svg"
COMPARISON_NAME, PICTURE_NAME = "comparison.json", "comparison.svg"


def write_report(run_dir: Path, identity: Sequence[int] | None = None) -> Summary:
    """Summarise the run in ``run_dir`` and write its files there.

    Args:
        identity: of that folder, where it is open already.

    Raises:
        ConfigError: there is no trace, or it is damaged.
    """
    summary = summarize(run_dir)
    with closing(OpenFolder.open(run_dir, identity)) as place:
        place.replace(SUMMARY_NAME, _as_json(summary.to_json()))
        place.replace(CURVE_NAME, draw_curve(summary).encode())
    return summary


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the files of a comparison into its folder."""
    with closing(OpenFolder.open(folder)) as place:
        place.replace(COMPARISON_NAME, _as_json(comparison.to_json()))
        place.replace(PICTURE_NAME, draw_comparison(comparison).encode())


def _as_json(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, indent=2, allow_nan=False).encode() + b"\n"
