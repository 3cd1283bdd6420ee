"""``paceline.connect``: how this script was started, and its part in the run.

    by paceline launch or train    its process was made a member before the script started
    by torchrun, srun, mpirun      it becomes one here (ranks.py)
    by python                      it is alone

Only a rank imports ranks.py. This module must not know what a member is.
"""

import os

from ..engines.torchrun.world import find_left_alone, find_rank
from ..errors import ConfigError
from ..script import worker
from ..script.worker import Pace

_RESUME = "PACELINE_RESUME"


def connect() -> Pace:
    """Find out how this script was started and take part in its run.

    Started by ``paceline launch`` or ``train``, by ``torchrun``, ``srun`` or ``mpirun``, it is one
    of several workers; started by ``python`` it is the only one, at no cost. A second call returns
    the same object.

    Raises:
        ConfigError: the script was started by another launcher with several processes; or it is
            alone, and the environment asks to resume a run, or all others of its run are lost.
        LinkError: one of several cannot reach the others.
    """
    if not worker.is_started():
        if (left := find_left_alone(os.environ)) is not None:
            from .ranks import refuse_left_alone

            refuse_left_alone(left)
        if (rank := find_rank(os.environ)) is not None:
            from .ranks import join_once

            join_once(rank)
        elif os.environ.get(_RESUME):
            raise ConfigError(
                f"{_RESUME} is set, but this process is alone and belongs to no run; to resume "
                f"with one worker: paceline launch --workers 1 --resume {os.environ[_RESUME]} "
                "SCRIPT"
            )
    return worker.current_pace()
