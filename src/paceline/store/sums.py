"""Where pushes are summed: the accumulator, and beside it 32 bits for what comes in 16.

    accumulator    float32   |  bfloat16  |  float64     the layout's offsets, as a slot
    wide                     |  float32      |           only the sums of 16-bit numbers
    scratch                                              what one chunk of them was before

A sum of K pushes of bfloat16 in bfloat16 is rounded K times to 8 bits; here it is rounded once,
when the update takes its mean into the accumulator. Models without 16-bit numbers have no wide
part and pay nothing. This module must not know jobs, members or optimizers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout

CHUNK_BYTES = 256 * 1024
"""Half of a small second-level cache: the undo copy of a chunk stays in it."""
HALVES = frozenset((torch.bfloat16, torch.float16))


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of one dtype in a block or slot."""

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(self.dtype)


def wide_bytes(layout: Layout) -> int:
    """Memory of the wide part and its scratch, whole lines; 0 without 16-bit numbers."""
    halves = sum(run.stop - run.start for run in _halves(layout))
    return 2 * halves + 2 * CHUNK_BYTES if halves else 0


def _halves(layout: Layout) -> Iterator[Stretch]:
    for section in (layout.parameters, layout.buffers):
        for run in section.runs():
            if run[0] in HALVES:
                yield Stretch(*run)


class Sums:
    """The memory of one sum.

    Args:
        total: the accumulator, bytes.
        wide: ``(wide_bytes(layout),)`` uint8.
    """

    def __init__(self, layout: Layout, total: Tensor, wide: Tensor) -> None:
        self._total = total
        self._scratch = wide[max(0, len(wide) - 2 * CHUNK_BYTES) :]
        self._wide: list[tuple[Stretch, Tensor]] = []
        start = 0
        for run in _halves(layout):
            stop = start + 2 * (run.stop - run.start)
            self._wide.append((run, wide[start:stop].view(torch.float32)))
            start = stop

    @property
    def are_wide(self) -> bool:
        """Whether an update must round some of them."""
        return bool(self._wide)

    def of(self, run: Stretch) -> Tensor:
        """The sums of a run, in float32 where they come in 16 bits."""
        if run.dtype in HALVES:
            for whole, wide in self._wide:
                if whole.start <= run.start < whole.stop:
                    return wide[(run.start - whole.start) // 2 : (run.stop - whole.start) // 2]
        return run.of(self._total)

    def undo(self, run: Stretch, block: Tensor) -> Tensor:
        """Where the old sums of a run are kept meanwhile, of the same dtype.

        Args:
            block: that is no version now, at least as long as a slot.
        """
        if run.dtype in HALVES:
            return self._scratch[: 2 * (run.stop - run.start)].view(torch.float32)
        return run.of(block)


def wide(tensor: Tensor) -> torch.dtype:
    """In what sums over a tensor are computed."""
    return torch.float32 if tensor.dtype in HALVES else tensor.dtype


def split(run: Stretch) -> list[Stretch]:
    """Chunks of a run."""
    return [
        Stretch(run.dtype, start, min(start + CHUNK_BYTES, run.stop))
        for start in range(run.start, run.stop, CHUNK_BYTES)
    ]
