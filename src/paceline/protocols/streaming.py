"""Fragments and overlap: which part of local changes is exchanged when.

    --fragments 3      H = 6: a worker exchanges a fragment every H/F = 2 steps, each every H

    step         1 2|3 4|5 6|7 8|9        fragment 0  . . x . . x .
    exchanged      0   1   2   0          fragment 1  . . . x . .         x: the mean of all workers
                                          fragment 2  . . . . x .         .: its own steps

    --overlap 1        the exchange begins at x, and its result is merged O steps later:

    compute      1 2|3|4|5|6              Delta_f = w_f - w_f,i          at the boundary, sent
    link           [0] [1] [2]            w_f <- outer(w_f, mean Delta_f)    O steps later, then
                    ^   ^   ^  merged     w_f,i <- (w_f,i + w_f) / 2         for each worker i

An exchange moves 1/F of the bytes, and with O > 0 while workers compute. Update number v is of
fragment v mod F, which all know without a message. All workers share the global copy w and the
outer optimizer's state, so Delta is relative to w and not to the merged values. The last update of
an epoch covers all fragments and replaces them at once: then all workers hold w, and code between
epochs sees equal parameters. A version inside an epoch (as evaluated there, or saved by a run that
ends there) is w, with each fragment as last exchanged; later changes belong to each worker, and
checkpoints store them too. A worker that dies loses what it had not exchanged: at most H steps of
each fragment.

Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
2025, algorithm 2 (tau is O, alpha is 1/2 as in its experiments, and 0 if O is 0: a worker takes
the result as it is). Changed: fragments are adjacent whole parameters, so that one is sent as a
single message without copying; the paper takes layers in strides, which scored a little better
there; and the end of an epoch exchanges all fragments. This module must not know tensors.
"""

from dataclasses import dataclass

from ..errors import ConfigError

SPELLING = "fragments:F[,O]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """In how many parts an exchange is made, and how long it may take.

    Attributes:
        num_fragments: F; 1: all at once.
        overlap_steps: O, local steps from the boundary until the result is merged.
    """

    num_fragments: int = 1
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if self.num_fragments < 1:
            raise ConfigError(f"fragments must be >= 1, got {self.num_fragments}")
        if self.overlap_steps < 0:
            raise ConfigError(f"overlap must be >= 0, got {self.overlap_steps}")

    def __str__(self) -> str:
        overlap = f",{self.overlap_steps}" if self.overlap_steps else ""
        return f"fragments:{self.num_fragments}{overlap}"


AT_ONCE = Streaming()


def parse_streaming(text: str) -> Streaming:
    """Return what ``fragments:F`` or ``fragments:F,O`` means.

    Raises:
        ConfigError: it is neither, or a number is out of range.

    Example:
        >>> parse_streaming("fragments:4,2").overlap_steps
        2
    """
    name, _, rest = text.strip().partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if name != "fragments" or not 1 <= len(numbers) <= 2:
        raise ConfigError(f"{SPELLING} takes one or two whole numbers, got {text!r}")
    return Streaming(num_fragments=numbers[0], overlap_steps=(*numbers, 0)[1])


def steps_between(streaming: Streaming, protocol: str, num_steps: int, num_workers: int) -> int:
    """Return the local steps between two exchanges, for a protocol with H = ``num_steps``.

    Raises:
        ConfigError: H is not a multiple of F, O is not below H/F, or there is only one worker.
    """
    count, overlap = streaming.num_fragments, streaming.overlap_steps
    if num_workers < 2:
        raise ConfigError(
            f"{streaming} needs workers that exchange with each other, but there is only one; "
            "leave --fragments and --overlap out, or use --workers 2"
        )
    if num_steps % count:
        fits = [str(f) for f in range(2, num_steps + 1) if num_steps % f == 0]
        others = f"--fragments {' or '.join(fits)}, or " if fits else ""
        more = -(-num_steps // count) * count
        raise ConfigError(
            f"the {num_steps} local steps of {protocol} cannot be divided by {count} fragments, of "
            f"which one is exchanged every H/F steps; use {others}--protocol local-sgd:{more}"
        )
    between = num_steps // count
    if overlap >= between:
        raise ConfigError(
            f"overlap must be below the {between} local steps between two exchanges of {protocol} "
            f"in {count} fragment{'s' * (count > 1)}, got {overlap}; use --overlap {between - 1} "
            f"or --protocol local-sgd:{count * (overlap + 1)}"
        )
    return between
