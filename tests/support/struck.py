"""Workers killed one after another from outside while a run continues.

    script  a step is done -> FOLDER/lives/SEAT-PID        a step begins: it waits for the kills
    test    two that live have made a step -> SIGKILL to one of them -> FOLDER/kills/PID

The script's steps wait until as many are killed as belong to where it is, so the kills are spread
over the run however quick the machine is. It must not know what is trained.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.005
_MOST_WAIT_S = 0.5
"""For a kill: who died last may need a step of the others to come back."""
_MOST_DAWDLE_S = 0.02


def wait_for_kills(folder: Path, share: float) -> None:
    """Wait in a step for all kills of this share of the run; nothing if no test kills."""
    file = folder / "num-kills"
    if not file.exists():
        return
    wanted, end_s = min(1.0, 1.2 * share) * int(file.read_text()), time.monotonic() + _MOST_WAIT_S
    while len(os.listdir(folder / "kills")) < int(wanted) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def has_stepped(folder: Path, worker: int) -> None:
    """Record a step."""
    if (folder / "lives").exists():
        (folder / "lives" / f"{worker}-{os.getpid()}").touch()


@contextmanager
def kills(folder: Path, count: int, seed: int) -> Iterator[list[int]]:
    """Inside, this number of workers of a run is killed; yields the seats of those killed."""
    for name in ("lives", "kills"):
        (folder / name).mkdir()
    (folder / "num-kills").write_text(str(count))
    is_over, seats = threading.Event(), list[int]()

    def strike() -> None:
        rng = random.Random(seed)
        while len(seats) < count and not is_over.wait(_LOOK_S):
            living = [one for one in (folder / "lives").iterdir() if _lives(one, folder)]
            if len({one.name.partition("-")[0] for one in living}) < 2:
                continue
            seat, pid = map(int, rng.choice(sorted(living)).name.split("-"))
            time.sleep(rng.uniform(0.0, _MOST_DAWDLE_S))
            os.kill(pid, signal.SIGKILL)
            seats.append(seat)
            (folder / "kills" / str(pid)).touch()

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        yield seats
    finally:
        is_over.set()
        striker.join()


def _lives(life: Path, folder: Path) -> bool:
    pid = life.name.partition("-")[2]
    return not (folder / "kills" / pid).exists() and Path(f"/proc/{pid}").exists()
