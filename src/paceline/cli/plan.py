"""``paceline plan``: which protocol and which K, predicted from a profile and raced."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from .flags import Json, say, show

if TYPE_CHECKING:
    from ..predict.advice import Question


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is asked.

    Parameters
    ----------
    workers
        How many there will be.
    cores
        That they share on one machine [default: each has a core or a machine of its own].
    profile
        A recorded run to take the times from [default: a run of 20 s now].
    protocols
        Only these: full-sync,k-sync:6,async [default: the family, K on a grid].
    staleness
        What a stale gradient is worth, as for train; or of one protocol alone: async+inverse.
    delay
        A straggler beside what was measured: exp:20ms, 1=exp:20ms.
    slow
        A slow worker: 1=5x.
    mini_batch_size
        Samples a worker takes at once [default: the task's batch shared by all workers].
    lr
        Learning rate [default: the task's].
    init
        Weights at the start.
    seed
        Of the data's order, the weights and the stragglers.
    seconds
        About how long the race may take here.
    target_accuracy
        Advise who is first at this test accuracy (0 to 1), and say when.
    target_loss
        The same for a training loss.
    """

    workers: int
    cores: int | None = None
    profile: Path | None = None
    protocols: str | None = None
    staleness: str = "none"
    delay: list[str] | None = None
    slow: list[str] | None = None
    mini_batch_size: int | None = None
    lr: float | None = None
    init: str | None = None
    seed: int = 0
    seconds: float = 60.0
    target_accuracy: float | None = None
    target_loss: float | None = None


def plan(task: str, /, *, asked: PlanFlags, json: Json = False) -> None:
    """Advise a protocol for a number of workers: measure here, predict, race, say why.

    Parameters
    ----------
    task
        A built-in task or package.module:attribute.
    """
    from ..predict.advice import advise
    from ..report.ranking import render_advice

    start_s = time.perf_counter()

    def say_when(text: str) -> None:
        say(f"{time.perf_counter() - start_s:5.0f} s  {text}")

    advice = advise(_question(task, asked), say_when)
    show(json, advice.to_json, lambda: render_advice(advice))


def _question(task: str, asked: PlanFlags) -> "Question":
    from ..predict.advice import Question
    from ..predict.pursuit import Goal

    goal = None
    if asked.target_accuracy is not None or asked.target_loss is not None:
        goal = Goal(accuracy=asked.target_accuracy, loss=asked.target_loss)
    protocols = None if asked.protocols is None else tuple(asked.protocols.split(","))
    return Question(
        task=task, workers=asked.workers, cores=asked.cores, profile=asked.profile,
        protocols=protocols, delay=tuple(asked.delay or ()), slow=tuple(asked.slow or ()),
        lr=asked.lr, init=asked.init, mini_batch_size=asked.mini_batch_size, seed=asked.seed,
        race_s=asked.seconds, staleness=asked.staleness, goal=goal,
    )  # fmt: skip
