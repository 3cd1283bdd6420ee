"""Candidate: how many threads a worker computes with.

More threads than cores wait for each other, and small operations cost more to share than to do;
so fewer are tried, and all cores where torch was started with fewer.
"""

from collections.abc import Sequence

import torch

from ..speed import Speed, Value
from .candidate import Objects, TrialSubject

name = "threads"
needs_feed = False
needs_whole_batch = False
keeps_bits = True  # the trace has their number, and a replay takes as many


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    if not subject.is_on_cpu:
        return ()
    now = torch.get_num_threads()
    fair = max(1, subject.num_cores // subject.num_workers)
    return [one for one in dict.fromkeys((fair, fair // 2, 1)) if one >= 1 and one != now]


def apply(objects: Objects, value: Value) -> None:
    if value:
        torch.set_num_threads(int(value))


def words(value: Value) -> str:
    return f"{value} thread{'s' * (value != 1)}"
