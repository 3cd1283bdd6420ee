"""Candidate: weights of convolutions with their channels last in memory.

Kernels of cuDNN and oneDNN take images as (N, H, W, C); in that order they need no reordering.
It has been measured at +48 %, at nothing and, with grouped convolutions, at a fraction of the
speed, so only a trial can tell. Shapes stay, strides change: the store lays parameters out with
the strides that they have (``store/layout.py``).

Source: PyTorch tutorials, "Channels Last Memory Format in PyTorch".
"""

from collections.abc import Sequence

import torch

from ..speed import Speed, Value
from .candidate import Objects, TrialSubject

name = "channels_last"
needs_feed = False
needs_whole_batch = False
keeps_bits = False


def options(subject: TrialSubject, speed: Speed) -> Sequence[Value]:
    parameters = subject.objects.model.parameters()
    has_planes = any(one.ndim == 4 and one.shape[2:] != (1, 1) for one in parameters)
    return (True,) if has_planes and not speed.channels_last else ()


def apply(objects: Objects, value: Value) -> None:
    if value:
        objects.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def words(value: Value) -> str:
    return "channels last"
