"""Count the bytes that a worker holds for parameters during a run, for copies and for shards.

P is the bytes of all parameters, k the optimizer's copies of them, n the number of workers, U the
bytes of the largest layer. With a full copy per worker on one machine, in memory that all workers
see (exchange/shares.py); a shared page counts in every worker that touches it:

    parameters         P              the block that all workers compute on
    optimizer state    k P / n        of the share that this worker steps
    undo               (1 + k) P / n  that share before the update, in case a worker dies
    gradients          2 P            its own, its share of the others', and of the mean
    own parameters     P              where they lie between epochs
    in flight          U              a layer's gradient, until it is where all workers see it

A single worker keeps nothing to undo, and its gradient, P, is the mean.

With shards (spread/units.py), where layers pass through buffers that all workers share:

    pieces             (2 + k) P / n  parameters, gradients and state that this worker steps
    whole              1, 2: P        parameters; 1: P, gradients until backward() is over
    buffers            (2 + 1 / n) U  a layer's gradient sent, received, and the worker's own piece
    in flight          2: U, 3: 2 U   a layer's gradient; 3: its parameters, too

A part of a pipeline holds (2 + k) times its parameters, and once more the largest of the layers
whose gradients are added late (placement.py); a worker with columns of layers, once more its
largest piece, a gradient in flight (prices.py). Activations kept for the backward pass and buffers
are not included. This module must not know where this is measured.
"""


def copy_bytes(parameter_bytes: int, state_copies: int, num_workers: int, largest: int) -> float:
    """Return the bytes that a worker with a whole copy of the model holds.

    Args:
        largest: bytes of the largest layer.

    Example:
        >>> copy_bytes(100, 1, 1, 10), copy_bytes(100, 1, 2, 10)
        (410, 560.0)
    """
    full, share = parameter_bytes, parameter_bytes / num_workers
    if num_workers == 1:
        return full + state_copies * full + full + full + largest
    return full + state_copies * share + (1 + state_copies) * share + 2 * full + full + largest


def shard_bytes(
    stage: int, parameter_bytes: int, state_copies: int, num_workers: int, largest: int
) -> float:
    """Return the bytes that a worker with shards of ZeRO stage 1, 2 or 3 holds.

    Args:
        largest: bytes of the largest layer.

    Example:
        >>> [shard_bytes(stage, 100, 1, 2, 10) for stage in (1, 2, 3)]
        [375.0, 285.0, 195.0]
    """
    pieces = (2 + state_copies) * parameter_bytes / num_workers
    whole = {1: 2, 2: 1, 3: 0}[stage] * parameter_bytes
    buffers = (2 + 1 / num_workers) * largest
    return pieces + whole + buffers + (stage - 1) * largest
