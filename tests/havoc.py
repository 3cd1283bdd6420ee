"""Processes that end at random moments of quick runs: plan -> run -> judge, all from one seed.

    draw(seed) -> Plan -> carry_out -> Outcome -> complaints

    python havoc.py --first 0 --runs 100        seeds 0..99; what went wrong is printed

A moment is a line of Paceline's code that a worker comes to, so each gap between two lines is as
likely as any other, however short it is; or so many seconds after its worker is prepared, when
processes mostly wait. Between lines workers may dawdle at random, so that they meet in orders that
an idle machine would never show. What is judged: the run ends within a limit and in words; each
sample of each epoch is in exactly one update; the weights are those that the trace's updates make
(counted.py); no process is left. This module must not know what is inside a run.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.engines.cradle import warm
from paceline.errors import PacelineError
from paceline.events import Apply
from paceline.trace import FILE_NAME, has_begun
from runs import Run, leases_of, run_script

SCRIPT = Path(__file__).parent / "counted.py"
LIMIT_S = 30.0
CLOSE = 1e-9
PROTOCOLS = (
    "full-sync", "full-sync", "local-sgd:4", "local-sgd:4", "k-sync:2", "k-batch-sync:2",
    "k-batch-async:3", "k-async:2", "async", "stale-synchronous:1",
)  # fmt: skip
BETWEEN = ("evaluate", "once", "sum", "checkpoint")
MOST_LINES = 4_000
"""An epoch: a worker comes to 3000 to 4000."""
MOST_S = 0.3
"""An epoch."""
MOST_DAWDLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A signal to one worker, at a line of its own (from 1) or at a moment of the clock.

    Attributes:
        line: counted in each life of the worker; 0: ``at_s`` says when.
        at_s: seconds after the worker's first life was prepared.
    """

    worker: int
    signal: int = signal.SIGKILL
    line: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run and what happens to it.

    Attributes:
        between: what the script does between epochs; ``checkpoint``: one is due each epoch.
        dawdle: how likely a worker sleeps for some milliseconds at a line.
    """

    seed: int
    protocol: str = "full-sync"
    workers: int = 4
    samples: int = 241
    batch: int = 48
    epochs: int = 3
    respawn: bool = False
    path: str = "auto"
    between: tuple[str, ...] = ()
    dawdle: float = 0.0
    strikes: tuple[Strike, ...] = ()

    def write(self) -> str:
        """As one argument of the script."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Plan":
        fields = json.loads(text)
        fields["strikes"] = tuple(Strike(**one) for one in fields["strikes"])
        return cls(**{**fields, "between": tuple(fields["between"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a plan.

    Attributes:
        run: the run that ended; None: it did not.
        error: why it did not: that it was over the limit, or what was raised.
        struck: where each strike that happened met its worker.
        finals: the weights of each worker that came to the end of its script.
        has_begun: whether its first version was laid out; before, a death is its end.
    """

    run: Run | None
    error: str
    struck: tuple[str, ...]
    finals: tuple[Path, ...] = ()
    has_begun: bool = True


class TooLong(BaseException):
    """The run is over its limit."""


def draw(seed: int, protocols: tuple[str, ...] = PROTOCOLS) -> Plan:
    """The plan of this seed; at least one worker is never struck."""
    rng = random.Random(seed)
    workers = rng.choice((2, 3, 4, 4, 4))
    batch = rng.choice((24, 48))
    epochs = rng.randint(1, 3)
    strikes = []
    for _ in range(rng.randint(1, min(3, workers - 1))):
        worker = rng.randrange(workers)
        if rng.random() < 0.7:
            strikes.append(Strike(worker=worker, line=rng.randint(1, epochs * MOST_LINES)))
        else:
            strikes.append(Strike(worker=worker, at_s=rng.uniform(0.0, epochs * MOST_S)))
    return Plan(
        seed=seed,
        protocol=rng.choice(protocols),
        workers=workers,
        samples=batch * rng.randint(2, 5) + rng.randint(0, batch - 1),
        batch=batch,
        epochs=epochs,
        respawn=rng.random() < 0.4,
        path=rng.choice(("auto", "auto", "store")),
        between=tuple(one for one in BETWEEN if rng.random() < 0.25),
        dawdle=rng.choice((0.0, rng.uniform(0.0, MOST_DAWDLE))),
        strikes=tuple(strikes),
    )


# -- run ----------------------------------------------------------------------------------------


def carry_out(plan: Plan, folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Do it, in this process; its workers are others."""
    run, error = None, ""
    done = threading.Event()
    striker = threading.Thread(target=_strike_by_the_clock, args=(plan, folder, done))
    striker.start()
    try:
        with _within(limit_s):
            run = run_script(
                SCRIPT, folder, plan.write(), str(folder),
                workers=plan.workers, protocol=plan.protocol, path=plan.path,
                respawn=plan.respawn,
                checkpoint_every="1 epoch" if "checkpoint" in plan.between else "never",
            )  # fmt: skip
    except TooLong:
        error = f"it did not end within {limit_s:g} s\n{_last_lines(folder)}"
    except PacelineError as refusal:
        error = f"{type(refusal).__name__}: {refusal}"
    except BaseException:
        error = traceback.format_exc()
    finally:
        done.set()
        striker.join()
    struck = tuple(f"{one.name} {one.read_text()}" for one in sorted(folder.glob("struck-*")))
    return Outcome(
        run=run, error=error, struck=struck, finals=tuple(sorted(folder.glob("final-*.pt"))),
        has_begun=has_begun(folder / "run" / FILE_NAME),
    )  # fmt: skip


def _strike_by_the_clock(plan: Plan, folder: Path, done: threading.Event) -> None:
    """Signals from outside, to the newest life of a worker."""
    numbered = [(one, i) for i, one in enumerate(plan.strikes) if not one.line]
    begun: dict[int, float] = {}
    while numbered and not done.wait(0.002):
        now_s = time.monotonic()
        for strike, i in list(numbered):
            place = folder / f"pid-{strike.worker}"
            if strike.worker not in begun and place.exists():
                begun[strike.worker] = now_s
            if now_s < begun.get(strike.worker, now_s) + strike.at_s or not place.exists():
                continue
            numbered.remove((strike, i))
            with contextlib.suppress(ValueError, ProcessLookupError):  # it is being written; gone
                os.kill(int(place.read_text()), strike.signal)
                (folder / f"struck-{i}").write_text(f"at {strike.at_s:.3f} s")


@contextlib.contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise TooLong in the main thread when this takes longer; workers say first where they are."""

    def over(number: int, frame: object) -> None:
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if "nursery" in " ".join(one.cmdline()) and one.ppid() != os.getpid():
                    one.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        raise TooLong

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _last_lines(folder: Path) -> str:
    """Where each worker stood."""
    lines = []
    for log in sorted((folder / "run" / "logs").glob("*.log")):
        text = log.read_text().splitlines()
        lines += [f"  {log.name}:", *(f"    {one}" for one in text[-60:])]
    return "\n".join(lines)


# -- judge --------------------------------------------------------------------------------------


def judge(plan: Plan, outcome: Outcome) -> list[str]:
    """What is wrong with it; nothing where all is as it should be."""
    run = outcome.run
    if run is None:
        is_early = "ended: killed by signal" in outcome.error and not outcome.has_begun
        return [] if is_early else [outcome.error]
    complaints = []
    once = [Counter(range(plan.samples))] * plan.epochs
    if (used := run.used()) != once:
        for epoch, (found, wanted) in enumerate(zip(used, once, strict=False)):
            wrong = {i: found[i] for i in wanted | found if found[i] != 1}
            complaints += [f"epoch {epoch}: samples used otherwise than once: {wrong}"] * bool(
                wrong
            )
        complaints += [f"{len(used)} epochs of {plan.epochs}"] * (len(used) != len(once))
    if not outcome.finals:
        complaints.append("no worker came to the end of its script")
    wanted_weights = expected(run, plan.samples)
    for final in outcome.finals:
        off = (torch.load(final)["weight"] - wanted_weights).abs()
        if float(off.max()) > CLOSE:
            places = off.gt(CLOSE).nonzero().flatten().tolist()
            complaints.append(
                f"{final.name}: {len(places)} weights are not what the updates make, from "
                f"{places[0]} to {places[-1]}, by up to {float(off.max()):.4g}"
            )
    return complaints


def expected(run: Run, num_samples: int) -> torch.Tensor:
    """The weights that the updates of the trace make."""
    weights = torch.zeros(num_samples, dtype=torch.float64)
    orders = run.every_order()
    leases = leases_of(orders)
    for order in orders:
        if isinstance(order, Apply):
            for ticket, weight in zip(order.tickets, order.weights, strict=True):
                for lease in leases[ticket[:2]]:
                    weights[lease.start : lease.stop] -= weight / lease.num_samples
    return weights


def trial(seed: int, folder: Path, **options: Any) -> tuple[Plan, Outcome, list[str]]:
    """One seed from its plan to its complaints."""
    plan = draw(seed, **options)
    outcome = carry_out(plan, folder)
    return plan, outcome, judge(plan, outcome)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--protocol", action="append")
    arguments = parser.parse_args()
    protocols = tuple(arguments.protocol or PROTOCOLS)
    num_bad, num_struck = 0, 0
    with warm():
        for seed in range(arguments.first, arguments.first + arguments.runs):
            folder = Path(tempfile.mkdtemp(prefix="havoc-"))
            plan, outcome, complaints = trial(seed, folder, protocols=protocols)
            num_struck += len(outcome.struck)
            if complaints:
                num_bad += 1
                print(plan, *outcome.struck, *complaints, f"see {folder}", sep="\n  ", flush=True)
            else:
                shutil.rmtree(folder)
    print(f"{arguments.runs} runs, {num_struck} strikes, {num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
