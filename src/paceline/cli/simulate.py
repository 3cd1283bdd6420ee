"""``paceline simulate``: a protocol in virtual time, before any worker is paid for."""

import json as json_format
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

_EVERY_S = 2.0
_DEFAULT_UPDATES = 10_000


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(simulate)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorldFlags:
    """What the workers are put through.

    Parameters
    ----------
    delay
        Time of a step: 20ms, exp:20ms, 10ms+exp:5ms, pareto:2,10ms, lognormal:0.5,10ms,
        weibull:1.5,10ms, list:8ms,9ms,30ms; 1=exp:20ms for worker 1 alone.
    slow
        A slow worker: 1=5x always; 1=5x@60s/10s for 10 s about every 60 s; *=5x@60s/10s all.
    away
        A worker that is not there: 3=10s..60s, 3=..10s (starts late), 3=60s.. (for good).
    link
        Latency and rate of each worker's link: 1ms,100MB/s.
    server
        Rate of the server's link, shared by all workers: 1GB/s.
    bytes
        Bytes of a push, and of a pull: 500kB.
    seed
        Of all draws.
    """

    delay: list[str] | None = None
    slow: list[str] | None = None
    away: list[str] | None = None
    link: str | None = None
    server: str | None = None
    bytes: str | None = None
    seed: int = 0


NO_FLAGS = WorldFlags()


def simulate(
    *,
    workers: int = 1,
    protocol: str = "full-sync",
    world: WorldFlags = NO_FLAGS,
    updates: int = _DEFAULT_UPDATES,
    run_dir: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Simulate a protocol in virtual time and report, beside theory.

    Parameters
    ----------
    workers
        Simulated workers; thousands are fine.
    protocol
        As for train: full-sync, k-sync:K, k-batch-sync:K, async, k-async:K, ...
    updates
        Stop after so many updates.
    run_dir
        Write the trace of a whole run here, for paceline report.
    json
        One JSON object.
    """
    from ..report.forecast import render_forecast
    from ..simulation import World, forecast

    given = World(
        delay=tuple(world.delay or ()), slow=tuple(world.slow or ()), away=tuple(world.away or ()),
        link=world.link, server=world.server, num_bytes=world.bytes, seed=world.seed,
    )  # fmt: skip
    found = forecast(
        protocol, workers, given, updates, run_dir=run_dir, on_progress=_Progress(updates)
    )
    if json:
        print(json_format.dumps(found.to_json(), allow_nan=False))
    else:
        print("\n".join(render_forecast(found)))


class _Progress:
    """A line on standard error every two seconds, so that results stay clean."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates = num_updates
        self._start_s = time.perf_counter()
        self._next_s = self._start_s + _EVERY_S

    def __call__(self, done: int) -> None:
        now_s = time.perf_counter()
        if now_s < self._next_s or not done:
            return
        self._next_s = now_s + _EVERY_S
        left_s = (now_s - self._start_s) * (self._num_updates / done - 1.0)
        print(
            f"{done:,} of {self._num_updates:,} updates, {left_s:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
