"""Where pushes are summed: the accumulator, and a wider copy of parts that would be rounded.

    accumulator    float32   |  bfloat16  |  buffers: float32  |  int64    the layout's offsets
    wide                     |  float32      |  float64           |        sums of these alone
    scratch                                                the old content of one chunk of these

A sum of K pushes of bfloat16 in bfloat16 is rounded K times to 8 bits; here it is rounded once,
when the update puts its mean into the accumulator. So is the mean of each buffer: equal values in
all workers, such as a table or a counter in floats, stay unchanged. Models without either have no
wide part and no extra cost; if only buffers are wide, there is no extra pass over gradients.

A pass changes the whole sum in chunks, each of which is saved before it is changed, so that another
member can go on where one has died. This module must not know jobs, members or optimizers.
"""

import cmath
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .clip import Clip
from .control import CHUNK, CHUNK_UNDO, PASS, VERSION, Control
from .layout import Layout

CHUNK_BYTES = 256 * 1024
"""Half of a small second-level cache, so that the undo copy of a chunk fits, too."""
HALVES = frozenset((torch.bfloat16, torch.float16))
_CARRIED = {
    torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64,
}  # fmt: skip
"""For floats the next wider type, in which the mean of equal values is exact (float64 has none);
for integers a type that gloo and torch can compare."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A contiguous range of one dtype in a block or slot."""

    dtype: torch.dtype
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(self.dtype)


def wide_bytes(layout: Layout) -> int:
    """Memory of the wide part and its scratch, in whole lines; 0 if nothing would be rounded."""
    return sum(2 * run.num_bytes for run in _rounded(layout)) + _scratch_bytes(layout)


def _scratch_bytes(layout: Layout) -> int:
    return 2 * min(CHUNK_BYTES, max((run.num_bytes for run in _rounded(layout)), default=0))


def _rounded(layout: Layout) -> Iterator[Stretch]:
    """The ranges that are summed in a wider dtype, of twice the size."""
    for run in layout.parameters.runs():
        if run[0] in HALVES:
            yield Stretch(*run)
    for run in layout.buffers.runs():
        if has_mean(run[0]) and carried(run[0]) is not run[0]:
            yield Stretch(*run)


def has_mean(dtype: torch.dtype) -> bool:
    """Whether buffers of this type are averaged; of counters the maximum is taken."""
    return dtype.is_floating_point or dtype.is_complex


def carried(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which buffers of this type are averaged, or compared."""
    return _CARRIED.get(dtype, dtype)


class Sums:
    """The memory of one sum, and its operations.

    Args:
        slots: slot 0 is the accumulator, the others hold pushes.
        wide: ``(wide_bytes(layout),)`` uint8.
        blocks: of the store; the one that holds no version saves the old content of a chunk.
        is_mended: whether others can take a pass over; if not, nothing is saved.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[Tensor],
        wide: Tensor,
        blocks: Sequence[Tensor],
        control: Control,
        *,
        is_mended: bool,
    ) -> None:
        self._layout, self._slots, self._blocks = layout, slots, blocks
        self._control, self._is_mended = control, is_mended
        self._gradients_stop = layout.parameters.stop
        sections = (layout.parameters, layout.buffers)
        self._runs = [Stretch(*run) for section in sections for run in section.runs()]
        self._chunks = [chunk for run in self._runs for chunk in split(run)]
        self._scratch = wide[len(wide) - _scratch_bytes(layout) :]
        self._wide: list[tuple[Stretch, Tensor]] = []
        self._gradients: dict[int, list[Tensor]] = {}
        self._parts: dict[tuple[int, int], Tensor] = {}
        start = 0
        for run in _rounded(layout):
            stop = start + 2 * run.num_bytes
            self._wide.append((run, wide[start:stop].view(carried(run.dtype))))
            start = stop
        self._rounded = [run for run, _ in self._wide]
        self._rounded_chunks = [chunk for run in self._rounded for chunk in split(run)]

    @property
    def are_wide(self) -> bool:
        """Whether an update must round some sums."""
        return bool(self._wide)

    def gradients(self, slot: int) -> list[Tensor]:
        """The gradients of a slot (0: their sums), one flat tensor for each dtype."""
        views = self._gradients.get(slot)
        if views is None:
            runs = [Stretch(*run) for run in self._layout.parameters.runs()]
            views = [run.of(self._slots[slot]) if slot else self._of(run) for run in runs]
            self._gradients[slot] = views
        return views

    def add(self, number: int, slot: int, factors: tuple[float, float], *, is_first: bool) -> None:
        """Pass ``number``: add a slot to the sum, or begin a new one; counters: the maximum.

        Args:
            factors: of gradients, and of buffers.
        """

        def add_chunk(run: Stretch) -> None:
            into, value = self._part(0, run), self._part(slot, run)
            factor = factors[0 if run.start < self._gradients_stop else 1]
            if not has_mean(run.dtype):
                into.copy_(value if is_first else highest((into, value)))
            elif is_first and into.dtype is not value.dtype:
                into.copy_(value).mul_(factor)
            elif is_first:
                torch.mul(value, factor, out=into)
            else:
                into.add_(value, alpha=factor)

        self._over_chunks(number, add_chunk, is_sum=True)

    def scale(self, number: int, slot: int, factors: tuple[float, float], clip: Clip) -> None:
        """Pass ``number``: set the accumulator to a slot (0: the sums) times ``factors``, clipped.

        Args:
            factors: of gradients, and of buffers.
        """
        total = self._slots[0]

        def scale_chunk(run: Stretch) -> None:
            into, value = run.of(total), self._part(slot, run)
            if has_mean(run.dtype):
                is_gradient = run.start < self._gradients_stop
                torch.mul(value, factors[0 if is_gradient else 1], out=into)
                if is_gradient and clip.has_value:
                    into.clamp_(-clip.max_value, clip.max_value)
            elif slot:
                into.copy_(value)

        is_rounding = not slot and factors == (1.0, 1.0) and not clip.has_value
        self._over_chunks(number, scale_chunk, is_rounding=is_rounding)

    def _part(self, slot: int, run: Stretch) -> Tensor:
        """A range of a slot (0: of the sums); views are cached if they are few (not mended)."""
        part = None if self._is_mended else self._parts.get((slot, run.start))
        if part is None:
            part = run.of(self._slots[slot]) if slot else self._of(run)
            if not self._is_mended:
                self._parts[slot, run.start] = part
        return part

    def _of(self, run: Stretch) -> Tensor:
        """The sums of a range, from the wide part if it has one."""
        for whole, wide in self._wide:
            if whole.start <= run.start < whole.stop:
                first, size = run.start - whole.start, run.dtype.itemsize
                return wide[first // size : (first + run.num_bytes) // size]
        return run.of(self._slots[0])

    # -- passes ---------------------------------------------------------------------------------

    def _over_chunks(
        self,
        number: int,
        change: Callable[[Stretch], None],
        *,
        is_sum: bool = False,
        is_rounding: bool = False,
    ) -> None:
        """Change the accumulator chunk by chunk, so that another member can finish after a death.

        Before a chunk is changed its old content is copied to the block that holds no version; the
        member that takes the pass over restores it and goes on from there.

        Args:
            is_sum: the sums are changed, else what the update will read.
            is_rounding: only ranges with a wide part are changed.
        """
        if not self._is_mended:  # no pass is ever interrupted
            for run in self._rounded if is_rounding else self._runs:
                change(run)
            return
        control, chunks = self._control, self._rounded_chunks if is_rounding else self._chunks
        if control[PASS] != number:
            control[CHUNK], control[CHUNK_UNDO] = 0, 0
            control[PASS] = number
        elif control[CHUNK_UNDO] == control[CHUNK] + 1:
            live, kept = self._undo(chunks[control[CHUNK]], is_sum)
            live.copy_(kept)
        for i in range(control[CHUNK], len(chunks)):
            run = chunks[i]
            live, kept = self._undo(run, is_sum)
            kept.copy_(live)
            control[CHUNK_UNDO] = i + 1
            change(run)
            control[CHUNK] = i + 1

    def _undo(self, run: Stretch, is_sum: bool) -> tuple[Tensor, Tensor]:
        """A chunk, and the memory for its old content, of the same dtype."""
        block = self._blocks[1 - (self._control[VERSION] & 1)]
        if not is_sum:
            return run.of(self._slots[0]), run.of(block)
        live = self._of(run)
        if live.dtype is not run.dtype:
            return live, self._scratch[: live.nbytes].view(live.dtype)
        return live, run.of(block)


def highest(parts: Sequence[Tensor]) -> Tensor:
    """The maximum of counters; torch compares only some dtypes."""
    dtype = carried(parts[0].dtype)
    return reduce(torch.maximum, [part.to(dtype) for part in parts]).to(parts[0].dtype)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums over a tensor are computed."""
    return torch.float32 if tensor.dtype in HALVES else tensor.dtype


def split(run: Stretch) -> list[Stretch]:
    """Chunks of a run."""
    return [
        Stretch(run.dtype, start, min(start + CHUNK_BYTES, run.stop))
        for start in range(run.start, run.stop, CHUNK_BYTES)
    ]


def are_finite(sums: Sequence[Tensor]) -> bool:
    """Whether no summand of these sums is inf or nan."""
    return all(cmath.isfinite(total.item()) for total in sums)


def norm_of(runs: Sequence[Tensor]) -> float:
    """The norm of all ranges together."""
    return math.hypot(*(float(torch.linalg.vector_norm(run, dtype=wide(run))) for run in runs))
