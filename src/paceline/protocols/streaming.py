"""Which part of what local steps have changed is exchanged when: fragments, and their overlap.

    --fragments 3      H = 6: a worker exchanges a fragment every H/F = 2 steps, each every H

    step         1 2|3 4|5 6|7 8|9        fragment 0  . . x . . x .
    exchanged      0   1   2   0          fragment 1  . . . x . .         x: the mean of all workers
                                          fragment 2  . . . . x .         .: its own steps

    --overlap 1        the exchange begins at x, and what comes of it is merged O steps later:

    compute      1 2|3|4|5|6              Delta_f = w_f - w_f,i          at the boundary, sent
    link           [0] [1] [2]            w_f <- outer(w_f, mean Delta_f)    O steps later, then
                    ^   ^   ^  merged     w_f,i <- (w_f,i + w_f) / 2         for each worker i

An exchange moves 1/F of the bytes, and with O > 0 while workers compute. Update number v is of
fragment v mod F, which all know without a message. The global copy w, with the outer optimizer's
state, is one for all; what workers do goes on from it, so Delta is held against w and not against
what was merged. The last update of an epoch is of all fragments, and is taken over at once and
whole: then all workers hold w, and code between epochs sees equal parameters. A version inside an
epoch (what is evaluated there, and what a run saves that ends there) is w, each fragment as it was
exchanged last; what workers have changed since is their own. A checkpoint has that, too. A worker
that dies takes along what it had not exchanged: at most H steps of each fragment.

Source: A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
2025, algorithm 2 (tau is O, alpha is 1/2 as in its experiments, and 0 where O is 0: a worker takes
over what came). Changed: fragments are whole parameters that lie side by side, so that one is sent
as it lies, as a single message; the paper takes layers in strides, which scored a little better
there; and the end of an epoch brings all together. This module must not know tensors.
"""

from dataclasses import dataclass

from ..errors import ConfigError

SPELLING = "fragments:F[,O]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """In how many parts an exchange is made, and how long it may take.

    Attributes:
        num_fragments: F; 1: all at once.
        overlap_steps: O, local steps from the boundary until what came of it is merged.
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
    """What ``fragments:F`` or ``fragments:F,O`` means.

    Raises:
        ConfigError: it is neither, or a number is out of its range.

    Example:
        >>> parse_streaming("fragments:4,2").overlap_steps
        2
    """
    name, _, rest = text.strip().partition(":")
    try:
        numbers = [int(one) for one in rest.split(",")]
    except ValueError:
        numbers = []
    if name != "fragments" or not 1 <= len(numbers) <= 2:
        raise ConfigError(f"{SPELLING} takes one or two whole numbers, got {text!r}")
    return Streaming(num_fragments=numbers[0], overlap_steps=(*numbers, 0)[1])


def steps_between(streaming: Streaming, protocol: str, num_steps: int, num_workers: int) -> int:
    """Local steps between two exchanges, of a protocol that has H = ``num_steps``.

    Raises:
        ConfigError: H is no multiple of F, O not below H/F, or nobody is there to exchange with.
    """
    count, overlap = streaming.num_fragments, streaming.overlap_steps
    if num_workers < 2:
        raise ConfigError(
            f"{streaming} needs workers that exchange with each other, and there is one; leave "
            "--fragments and --overlap out, or use --workers 2"
        )
    if num_steps % count:
        fits = [str(one) for one in range(2, num_steps + 1) if num_steps % one == 0]
        others = f"--fragments {' or '.join(fits)}, or " if fits else ""
        more = -(-num_steps // count) * count
        raise ConfigError(
            f"the {num_steps} local steps of {protocol} cannot be shared by {count} fragments, of "
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
