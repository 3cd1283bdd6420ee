"""``paceline verify``: check that N workers compute what one process does."""

import sys

from ..errors import ConfigError
from .flags import Json, say, show


def verify(task: str, /, *args: str, workers: str = "1,2,3,4", json: Json = False) -> None:
    """Check on your own model that N workers compute what one does; if not, name the cause.

    Compares a few updates of one process and of N workers, with batches that N divides and that it
    does not, in float64 and float32. Exit code 0 if all rows are equal, else 1.

    Example: paceline verify lenet -n 1,2,3,4
    Example: paceline verify train.py -n 2,3 -- --the-scripts-own 3

    Parameters
    ----------
    task
        A built-in task, package.module:task, or a script (train.py) with Paceline's lines.
    args
        The script's own arguments, after --.
    workers
        Numbers of workers, separated by commas; also -n.
    """
    from ..verification.verdict import render_verified
    from ..verification.verify import verify as run_all

    result = run_all(task, _numbers(workers), args, say)
    show(json, result.to_json, lambda: render_verified(result))
    if not result.is_equal:
        sys.exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise ConfigError(f"-n must be whole numbers such as 1,2,4, got {text!r}")
    return tuple(dict.fromkeys(numbers))
