"""What a run leaves beside its trace, and what a comparison of runs leaves beside them.

    a run           summary.json     curve.svg          follow from the trace at any time
    a comparison    comparison.json  comparison.svg     follow from the traces of its runs

This module must not know engines.
"""

import json
import os
from pathlib import Path

from .compared import Comparison
from .compared_svg import draw_comparison
from .summary import Summary, summarize
from .svg import draw_curve

SUMMARY_NAME = "summary.json"
CURVE_NAME = "curve.svg"
COMPARISON_NAME, PICTURE_NAME = "comparison.json", "comparison.svg"


def write_report(run_dir: Path) -> Summary:
    """Summarise the run in ``run_dir`` and write its files there.

    Raises:
        ConfigError: there is no trace, or it is damaged.
    """
    summary = summarize(run_dir)
    _replace(run_dir / SUMMARY_NAME, _as_json(summary.to_json()))
    _replace(run_dir / CURVE_NAME, draw_curve(summary))
    return summary


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the files of a comparison into its folder."""
    _replace(folder / COMPARISON_NAME, _as_json(comparison.to_json()))
    _replace(folder / PICTURE_NAME, draw_comparison(comparison))


def _as_json(fields: dict[str, object]) -> str:
    return json.dumps(fields, indent=2, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
