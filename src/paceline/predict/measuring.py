"""The short live runs that ``plan`` makes here where it is given no profile.

    profile     as many workers as have a core each: what a step takes, and the exchange beside it
    crowd       all workers on the cores that they will share: how much longer that takes than the
                simulator makes of the profile

More workers than cores find the caches cold whenever they come back to a core, and somebody has to
switch them: eight workers on two cores need about a quarter more time for the same gradients. That
cannot be read from a run of two, so it is measured. This module must not know what is asked.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..compute.cores import num_cores
from ..conditions.delays import NO_DELAY
from ..conditions.world import Conditions
from ..config import resolve
from ..engines.timing import TimingRun
from ..events import Apply, EpochEnd
from ..launcher import launch_run
from ..program import TaskProgram
from ..protocols import parse
from ..records import Ordered
from ..report.live import QuietObserver
from ..trace import FILE_NAME, read_trace
from .profiles import Profile

PROTOCOL = "k-batch-async:2"
"""Nobody waits for anybody, and versions are made of more than one push."""
_FEWEST_UPDATES = 20
_FORECAST_UPDATES = 2_000
_MOST_A_CORE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is run: a task on this machine, without stragglers.

    Args:
        lr, init: None: the task's.
    """

    task: str
    mini_batch_size: int
    lr: float | None
    init: str | None
    seed: int

    def run(self, workers: int, seconds: float, name: str) -> Path:
        """Train for so long; the folder where the run lies."""
        flags: dict[str, Any] = {
            "workers": workers, "protocol": PROTOCOL, "path": "store", "seconds": seconds,
            "mini_batch_size": self.mini_batch_size, "seed": self.seed, "lr": self.lr,
            "init": self.init, "nonfinite": "skip",
            "name": f"{name}-{self.task}-{time.strftime('%Y%m%d-%H%M%S')}",
        }  # fmt: skip
        given = {key: value for key, value in flags.items() if value is not None}
        settings = resolve(given, env={}, is_call=True).settings
        summary = launch_run(TaskProgram(task=self.task), settings, QuietObserver())
        assert summary is not None  # it is no dry run
        return Path(summary.run_dir)


def most_alone(workers: int) -> int:
    """Of so many workers those that have a core each; two where there are fewer cores."""
    return min(workers, max(2, num_cores()))


def most_crowded(workers: int, cores: int) -> int:
    """Of so many workers those that are tried on these cores: more of them are no worse a crowd."""
    return min(workers, _MOST_A_CORE * cores)


def crowding(place: Path, profile: Profile, workers: int, cores: int) -> float | None:
    """How many times as long the steps of a run took as the simulator makes of the profile.

    Args:
        place: where the run of so many workers on so many cores lies.

    Returns:
        None where it made too few updates to tell.
    """
    gaps_s = _gaps_s(place)
    kept_s = gaps_s[len(gaps_s) // 5 :]  # the first steps fill caches, with fewer workers there
    if len(kept_s) < _FEWEST_UPDATES:
        return None
    conditions = Conditions(delays=(NO_DELAY,) * workers, machine=profile.machine(workers, cores))
    counts = TimingRun(parse(PROTOCOL, workers), conditions).run(_FORECAST_UPDATES)
    return fmean(kept_s) / counts.mean_update_s()


def _gaps_s(place: Path) -> list[float]:
    """Seconds between updates, those between epochs left out."""
    gaps_s: list[float] = []
    last_s = math.nan
    for one in read_trace(place / FILE_NAME):
        if isinstance(one, Ordered) and isinstance(one.order, EpochEnd):
            last_s = math.nan
        elif isinstance(one, Ordered) and isinstance(one.order, Apply):
            if not math.isnan(last_s):
                gaps_s.append(one.t_s - last_s)
            last_s = one.t_s
    return gaps_s
