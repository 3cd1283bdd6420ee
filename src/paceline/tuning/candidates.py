"""The table of candidates, in the order in which they are tried.

What changes how memory lies or how many compute comes before what is compiled for it.
"""

import typing

from . import ahead, allocator, channels_last, compilation, kernels, loading, precision, threads
from .candidate import Candidate

CANDIDATES: tuple[Candidate, ...] = typing.cast(
    tuple[Candidate, ...],
    (threads, allocator, kernels, precision, channels_last, compilation, loading, ahead),
)
"""Each is a module with the names of the contract."""
