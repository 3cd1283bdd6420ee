"""The largest batch that fits: doubled until memory ends, then halved in between.

    fits     1 2 4 8 16 32          48 56
    does not               64           60        -> 56, when 60 is within 5 % of it

Every batch that is said to fit has been trained with, and the one above it was tried and did not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from ..errors import WorkerError
from .apart import Apart

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What was found.

    Args:
        fits: the largest batch that was trained with; 0: not even one sample.
        ends: the smallest one that was tried and did not fit; None: the search's end was reached.
        tried: all, in the order tried.
    """

    fits: int
    ends: int | None
    tried: tuple[int, ...]


def largest_batch(does_fit: Callable[[int], bool], most: int) -> Largest:
    """Find it by trying.

    Args:
        does_fit: trains with so many samples and says whether memory sufficed.
        most: where to stop, >= 1.

    Example:
        >>> found = largest_batch(lambda batch: batch <= 1000, most=100_000)
        >>> found.fits <= 1000 < found.ends <= 1.05 * found.fits + 1
        True
    """
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return does_fit(batch)

    low, high = 0, None
    batch = 1
    while high is None and low < most:
        batch = min(batch, most)
        if fits(batch):
            low, batch = batch, 2 * batch
        else:
            high = batch
    while high is not None and high - low > max(1, TOLERANCE * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return Largest(fits=low, ends=high, tried=tuple(tried))


def do_fit_together(arguments: Mapping[str, object], batch: int, count: int) -> bool:
    """Whether so many workers train with such a batch at the same time.

    Args:
        arguments: what each `stepping.Stepper` is made with.
    """
    seats = [Apart("paceline.bench.stepping:Stepper", arguments) for _ in range(count)]
    try:
        for seat in seats:
            seat.begin("measure", batch_size=batch, seconds=0.0, blocks=1)
        return all("ended" not in seat.end() for seat in seats)
    except WorkerError:
        if not any(seat.has_ended for seat in seats):
            raise
        return False
    finally:
        for seat in seats:
            seat.close()


class Trials:
    """Trains with one batch after the other.

    Args:
        arguments: what `stepping.Stepper` is made with.
        say: is told of each trial.
    """

    def __init__(self, arguments: Mapping[str, object], say: Callable[[str], None]) -> None:
        self._arguments = arguments
        self._say = say
        self._seat: Apart | None = None

    def does_fit(self, batch: int) -> bool:
        """Whether it was trained with.

        Raises:
            ConfigError: the task cannot be trained so at all.
        """
        if self._seat is None:
            self._seat = Apart("paceline.bench.stepping:Stepper", self._arguments)
        try:
            answer = self._seat.ask("measure", batch_size=batch, seconds=0.0, blocks=1)
        except WorkerError as error:
            if not self._seat.has_ended:
                raise
            answer = {
                "ended": f"memory ended in the middle: {error}"
            }  # where nothing could be said
        self._say(f"batch {batch:,}: {answer.get('ended', 'fits')}")
        if "ended" in answer:
            self.close()
        return "ended" not in answer

    def close(self) -> None:
        """End the process."""
        if self._seat is not None:
            self._seat.close()
        self._seat = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
