"""Lightning's Trainer under any protocol: ``Trainer(strategy=PacelineStrategy("k-async:2"))``.

    strategy   what the Trainer asks its strategy for: ranks, steps, sums, checkpoints
    loops      its loops over epochs and batches, where batches are leases
    batches    the batches of one worker, who learns that an epoch is over when it is
    starting   ``python train.py`` begins the run; what cannot be carried is refused

Importing this module imports Lightning; nothing else in Paceline does.
"""

from .strategy import PacelineStrategy

__all__ = ["PacelineStrategy"]
