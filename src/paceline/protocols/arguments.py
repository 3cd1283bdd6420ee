"""The numbers after a protocol's name, ``k-sync:3``: their spelling and their range.

This module must not know protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..fields import NameNumber, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument(NameNumber):
    """A number in ``name:number`` of a protocol, and the values it may have."""

    example: int = 2
    is_at_most_workers: bool = False
    instead: str = ""  # what to use for more than the workers allow


def check_arguments(
    name: str, arguments: Sequence[Argument], values: Sequence[int], num_workers: int
) -> None:
    """Raise ConfigError if a number is out of its argument's range."""
    spelled, got = written(name, [arg.symbol for arg in arguments]), written(name, values)
    for place, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        symbol, minimum = argument.symbol, argument.minimum
        least, most = (
            written(name, [*values[:place], bound, *values[place + 1 :]])
            for bound in (minimum, num_workers)
        )
        if value < minimum:
            raise ConfigError(
                f"{spelled} needs {symbol} >= {minimum} ({argument.meaning}), got {got}; "
                f"try {least}"
            )
        if argument.is_at_most_workers and value > num_workers:
            raise ConfigError(
                f"{spelled} needs {symbol} <= {num_workers}, the number of workers, got {got}; "
                f"try {most}, or {argument.instead}:{value}, where one worker may push more than "
                "once per update"
            )
