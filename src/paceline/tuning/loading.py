"""Candidate: processes that load batches ahead of the step.

They help only where a step waits for its batch, so the trial compares the loader with one cached
batch first and asks for options only if that is more than 2 % faster. Processes cost cores: no
more are tried than the container's quota leaves.
"""

from collections.abc import Sequence

from ..speed import Speed, Value
from .candidate import Objects, TrialSubject

name = "loader_workers"
needs_feed = True
needs_whole_batch = False
keeps_bits = True


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    fair = max(1, subject.num_cores // subject.num_workers)
    counts = [1]
    while counts[-1] * 2 <= fair:
        counts.append(counts[-1] * 2)
    return [one for one in counts if one != speed.loader_workers]


def apply(objects: Objects, value: Value) -> None:
    """Nothing to change on the objects: the loader reads the choice (``data/loader.py``)."""


def words(value: Value) -> str:
    return f"{value} loader worker{'s' * (value != 1)}"
