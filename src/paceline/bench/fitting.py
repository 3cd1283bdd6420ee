"""Whether a task trains with a batch in a stated memory: asked of processes that may run out of it.

A process that ran out is not asked again: what its allocators kept would make the next answer
smaller. This module must not know how the largest batch is searched for.
"""

from collections.abc import Callable, Mapping
from typing import Self

from ..errors import WorkerError
from .apart import Apart


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
