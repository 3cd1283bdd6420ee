"""Candidate: the next batch is copied to the device while this one is computed.

The copy leaves from pinned memory on a stream of its own (``data/transfer.py``), so it costs the
step nothing where the device has a copy engine. On a CPU there is nothing to copy.
"""

from collections.abc import Sequence

from ..speed import Speed, Value
from .candidate import Objects, TrialSubject

name = "ahead"
needs_feed = True
needs_whole_batch = False
keeps_bits = True


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    return () if subject.is_on_cpu or speed.ahead else (True,)


def apply(objects: Objects, value: Value) -> None:
    """Nothing to change on the objects: the loader reads the choice (``data/loader.py``)."""


def words(value: Value) -> str:
    return "copies ahead"
