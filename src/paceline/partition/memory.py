"""What a worker holds of parameters in the steps of a run, by name, for copies and for shards.

P are the bytes of all parameters, k the optimizer's copies of them, n the workers, U the bytes of
the largest layer. A copy of each worker of one machine, in the memory that all of them see
(exchange/shares.py); pages count in each worker that looks at them:

    parameters         P              the block that all compute on
    optimizer state    k P / n        of the share that this worker steps
    undo               (1 + k) P / n  that share before the update, in case that somebody dies
    gradients          2 P            its own, its share of the others', and of the mean
    own parameters     P              where they lie between epochs
    under way          U              a layer's gradient, until it is where all see it

One worker alone keeps nothing to undo, and its gradient, P, is the mean.

Pieces (spread/units.py), where layers go through rooms that all of them share:

    pieces             (2 + k) P / n  parameters, gradients and state that this worker steps
    whole              1, 2: P        parameters; 1: P, gradients until backward() is over
    rooms              (2 + 1 / n) U  what is sent of a layer's gradient, what comes, the own piece
    under way          2: U, 3: 2 U   a layer's gradient; its parameters

A part of a pipeline holds (2 + k) times its parameters (placement.py). What is kept for the
backward pass comes on top, and so do buffers. This module must not know where this is measured.
"""


def copy_bytes(parameter_bytes: int, state_copies: int, num_workers: int, largest: int) -> float:
    """Of a worker that has a whole copy.

    Example:
        >>> copy_bytes(100, 1, 1, 10), copy_bytes(100, 1, 2, 10)
        (410.0, 560.0)
    """
    own, share = parameter_bytes, parameter_bytes / num_workers
    if num_workers == 1:
        return own + state_copies * own + own + own + largest
    return own + state_copies * share + (1 + state_copies) * share + 2 * own + own + largest


def shard_bytes(
    stage: int, parameter_bytes: int, state_copies: int, num_workers: int, largest: int
) -> float:
    """Of a worker that has pieces.

    Example:
        >>> [shard_bytes(stage, 100, 1, 2, 10) for stage in (1, 2, 3)]
        [375.0, 285.0, 195.0]
    """
    pieces = (2 + state_copies) * parameter_bytes / num_workers
    whole = {1: 2, 2: 1, 3: 0}[stage] * parameter_bytes
    rooms = (2 + 1 / num_workers) * largest
    return pieces + whole + rooms + (stage - 1) * largest
