"""Gradients in buckets: what of the mean over ranks is summed at once.

    layout     | layer 1 | layer 2 | layer 3 |
    buckets    |   bucket 1   | bucket 0     |     the last layers' gradients are there first

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020, sections 3.2 and 4.2 (buckets, their order and sizes). This module must not know who sums.
"""

from typing import NamedTuple

import torch

from ...exchange.compressed import Span
from ...exchange.route import BUCKET_BYTES, CPU_BUCKET_BYTES, FIRST_BUCKET_BYTES
from ...store.layout import Section


class Bucket(NamedTuple):
    """A part of the gradients, whose sum is begun at once.

    Attributes:
        numbers: of the parameters in it.
    """

    span: Span
    numbers: tuple[int, ...]


def make_buckets(section: Section, device: torch.device) -> list[Bucket]:
    """The gradients in buckets, the last parameters' first: theirs are there first.

    Args:
        device: where they lie, which says what is between them.
    """
    most_bytes = CPU_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES
    buckets: list[Bucket] = []
    numbered = list(enumerate(section.places))
    for dtype, start, stop in reversed(list(section.runs())):
        inside = [(n, one) for n, one in numbered if start <= one.offset < stop]
        end, numbers = stop, list[int]()
        for number, place in reversed(inside):
            numbers.append(number)
            most = most_bytes if buckets else FIRST_BUCKET_BYTES
            if end - place.offset >= most or place.offset == start:
                buckets.append(Bucket(Span(place.offset, end, dtype), tuple(numbers)))
                end, numbers = place.offset, []
    return buckets
