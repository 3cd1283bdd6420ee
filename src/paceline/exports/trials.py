"""The inputs that a file is proved on: other ones than its example, and altered ones.

    other       the rows after those of the example
    negative    the same, its floats negated
    smallest    the same, its integers all the smallest one
    largest     the same, its integers all the largest one

A trace keeps the side of a branch that its example took; altered inputs take the other side more
often than further samples do. Integers stay in the range that was seen, because they may be rows
of a table. This module must not know what runs on the inputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]


def trials_of(make: Callable[[int], Inputs], example: Inputs, batch: int) -> list[Inputs]:
    """Return the other inputs, then the altered ones, each of ``batch`` rows.

    Args:
        make: makes inputs of any number of rows, as it made the example.
        example: what the file was written with.
        batch: >= 1.
    """
    num_example = len(example[0])
    made = make(num_example + batch)
    other = tuple(value[num_example:] for value in made)
    trials = [other]
    if not all(map(_is_whole, other)):
        trials.append(tuple(value if _is_whole(value) else -value for value in other))
    if any(map(_is_whole, other)):
        trials.append(tuple(map(_at_smallest, other, made)))
        trials.append(tuple(map(_at_largest, other, made)))
    return trials


def are_known(trials: Sequence[Inputs], example: Inputs) -> bool:
    """Whether each row of the trials is one of the example's."""
    return all(
        any(torch.equal(row, known) for known in rows)
        for trial in trials
        for values, rows in zip(trial, example, strict=True)
        for row in values
    )


def _at_smallest(value: Tensor, seen: Tensor) -> Tensor:
    return torch.full_like(value, seen.min().item()) if _is_whole(value) else value


def _at_largest(value: Tensor, seen: Tensor) -> Tensor:
    return torch.full_like(value, seen.max().item()) if _is_whole(value) else value


def _is_whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())
