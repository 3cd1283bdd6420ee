"""The trace of a run: an append-only file of its facts, orders and measurements.

One JSON object per line (records.py), ``"kind"`` first and a checksum of all lines so far last;
``"t"`` is in seconds since the run's start. Reports are computed from this file alone, so they can
be made again later, and the order of its lines *is* the run, so it can be replayed. This module
must not know engines or reports.

    {"kind": "run", "format": 3, "task": "lenet", ...}
    {"kind": "joined", "t": 0.81, "member": 0, "worker": 0, "pid": 4711}
    {"kind": "grant", "t": 0.82, "ticket": [0, 0, 0], "leases": [[0, 0, 0, 128]], "upcoming": []}
    {"kind": "pushed", "t": 0.84, "ticket": [0, 0, 0], "samples": 128, "loss": 2.3, ...}
    {"kind": "apply", "t": 0.84, "tickets": [[0, 0, 0], [1, 0, 0]], "weights": [0.5, 0.5]}
    {"kind": "resumed", "t": 9.1, "version": 412, "workers": 2, "lost": 17, "changes": {}}

`reader` reads a complete trace, `following` one that is being written.
"""

from .reader import (
    FORMAT,
    contradiction,
    has_begun,
    read_header,
    read_trace,
    refuse_other_format,
)
from .writer import Trace

FILE_NAME = "trace.jsonl"
"""File name of the trace in a run's folder."""

__all__ = [
    "FILE_NAME",
    "FORMAT",
    "Trace",
    "contradiction",
    "has_begun",
    "read_header",
    "read_trace",
    "refuse_other_format",
]
