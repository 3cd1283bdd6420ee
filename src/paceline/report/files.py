"""What a run leaves beside its trace: ``summary.json`` and ``curve.svg``.

Both follow from the trace, so they can be made again at any time. This module must not know
engines.
"""

import json
import os
from pathlib import Path

from .summary import Summary, summarize
from .svg import draw_curve

SUMMARY_NAME = "summary.json"
CURVE_NAME = "curve.svg"


def write_report(run_dir: Path) -> Summary:
    """Summarise the run in ``run_dir`` and write its files there.

    Raises:
        ConfigError: there is no trace, or it is damaged.
    """
    summary = summarize(run_dir)
    _replace(
        run_dir / SUMMARY_NAME, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n"
    )
    _replace(run_dir / CURVE_NAME, draw_curve(summary))
    return summary


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all: a reader sees the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
