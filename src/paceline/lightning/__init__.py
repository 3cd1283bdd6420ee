"""Lightning's Trainer under any protocol: ``Trainer(strategy=PacelineStrategy("k-async:2"))``.

    strategy   the Trainer's strategy: ranks, steps, sums, checkpoints
    loops      its loops over epochs and batches, where batches are leases
    batches    the batches of one worker, which learns that an epoch is over when it is
    starting   ``python train.py`` starts the run; what is not supported is refused

Importing this module imports Lightning; nothing else in Paceline does.
"""

from .strategy import PacelineStrategy

__all__ = ["PacelineStrategy"]
