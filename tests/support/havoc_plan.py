"""Plans, from a seed, of runs whose processes are struck at random moments.

    draw(seed) -> Plan -> havoc_run.carry_out -> Outcome -> havoc_verdict.judge -> complaints

A run is a launcher in its own process, with a script whose weights count (counted.py). Its workers,
the launcher, the process that forks workers (the fork server) and the writer of checkpoints (the
writer) are struck by signals: at a line of Paceline's code that a worker executes, so each gap
between two lines is equally likely, however short; or some time after a cue, a place in the script
that a worker has reached. Between lines workers may be delayed, so that they meet in orders that an
idle machine would never show. This module must not know what is inside a run.
"""

import json
import random
from dataclasses import asdict, dataclass, replace

PROTOCOLS = ("full-sync", "local-sgd:4", "k-sync:2", "k-batch-async:3", "async")
OTHERS = ("k-batch-sync:2", "k-async:2", "stale-synchronous:1")
SIGNALS = ("KILL", "STOP", "TERM", "INT", "HUP", "SEGV")
TARGETS = ("worker", "worker", "launcher", "forkserver", "writer")
MOMENTS = ("before prepare", "training", "evaluation", "between epochs", "checkpoint", "end")
WEIGHTS = (1, 3, 3, 3, 3, 3)
"""Strikes of a plan: a process ended by the first one does not meet the others."""
BETWEEN = ("evaluate", "once", "sum")
EVERY = ("1 updates", "2 updates", "5 updates", "1 epoch", "5min")
MOST_STRIKES = 6
MOST_LINES = 4_000
"""Lines of an epoch: about as many as a worker executes."""
START_S, EPOCH_S, END_S, SOON_S = 4.0, 0.2, 0.6, 0.05
"""Maximum duration of the first lines, an epoch, the launcher's last lines, and all else."""
MOST_DAWDLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A signal to one process of a run, at one of its lines or some time after a cue.

    Attributes:
        target: ``worker 2``, ``launcher``, ``forkserver`` or ``writer``.
        signal: its name.
        moment: one of `MOMENTS`, or ``a line``; for tables.
        cue: what must happen first: ``start``, ``checkpoint`` (``checkpoint 3``: the third begins
            to be saved) or a place in the script.
        witness: the worker whose cue it is.
        line: of the worker itself, counted in each of its lives from 1; 0: the cue says when.
    """

    target: str
    signal: str = "KILL"
    moment: str = "a line"
    cue: str = ""
    witness: int = 0
    after_s: float = 0.0
    line: int = 0

    @property
    def kind(self) -> str:
        """``worker``, ``launcher``, ``forkserver`` or ``writer``."""
        return self.target.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run and its strikes.

    Attributes:
        pause_s: what a step sleeps.
        between: the action of the script between epochs.
        every: as ``--checkpoint-every``.
        loaders: worker processes of the script's loader.
        dawdle: probability that a worker sleeps for some milliseconds at a line.
    """

    seed: int
    protocol: str = "full-sync"
    workers: int = 4
    samples: int = 241
    batch: int = 48
    epochs: int = 3
    pause_s: float = 0.01
    respawn: bool = False
    path: str = "auto"
    every: str = "5min"
    between: tuple[str, ...] = ()
    dawdle: float = 0.0
    loaders: int = 0
    strikes: tuple[Strike, ...] = ()

    def write(self) -> str:
        """The plan as one argument of the script."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Plan":
        fields = json.loads(text)
        fields["strikes"] = tuple(Strike(**one) for one in fields["strikes"])
        return cls(**{**fields, "between": tuple(fields["between"])})


def draw(seed: int, protocols: tuple[str, ...] = PROTOCOLS, least: int = 1) -> Plan:
    """The plan of this seed, of ``least`` to `MOST_STRIKES` strikes."""
    rng = random.Random(seed)
    batch = rng.choice((24, 48))
    plan = Plan(
        seed=seed,
        protocol=rng.choice(protocols),
        workers=rng.choice((2, 3, 4, 4, 4)),
        samples=batch * rng.randint(2, 5) + rng.randint(0, batch - 1),
        batch=batch,
        epochs=rng.randint(1, 3),
        pause_s=rng.choice((0.0, 0.005, 0.02)),
        respawn=rng.random() < 0.5,
        path=rng.choice(("auto", "auto", "store")),
        every=rng.choice(EVERY),
        between=tuple(one for one in BETWEEN if rng.random() < 0.4),
        dawdle=rng.choice((0.0, 0.0, rng.uniform(0.0, MOST_DAWDLE))),
        loaders=rng.choice((0, 0, 0, 0, 1)),
    )
    number = rng.randint(least, MOST_STRIKES)
    return replace(plan, strikes=tuple(_strike(rng, plan) for _ in range(number)))


def _strike(rng: random.Random, plan: Plan) -> Strike:
    kind, signal, moment = (
        rng.choice(TARGETS),
        rng.choice(SIGNALS),
        rng.choices(MOMENTS, WEIGHTS)[0],
    )
    witness, epoch = rng.randrange(plan.workers), rng.randrange(plan.epochs)
    line = rng.randint(1, plan.epochs * MOST_LINES)
    if kind == "writer" and (plan.every == "5min" or moment == "before prepare"):
        kind = "worker"  # there is none
    target = f"worker {witness}" if kind == "worker" else kind
    if kind == "worker" and rng.random() < 0.4:
        return Strike(target=target, signal=signal, line=line)
    if moment == "evaluation" and "evaluate" not in plan.between:
        moment = "training"
    cue, most_s = {
        "before prepare": rng.choice((("start", START_S), ("early", SOON_S))),
        "training": (f"step-{epoch}", EPOCH_S),
        "evaluation": (f"evaluate-{epoch}", SOON_S),
        "between epochs": (f"between-{epoch}", SOON_S),
        "checkpoint": ("checkpoint", SOON_S),
        "end": ("end", END_S),
    }[moment]
    return Strike(
        target=target, signal=signal, moment=moment, cue=cue, witness=witness,
        after_s=rng.uniform(0.0, most_s),
    )  # fmt: skip
