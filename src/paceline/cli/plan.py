"""``paceline plan``: which protocol and which K, predicted from a profile and raced."""

import json as json_format
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(plan)


def plan(
    task: str,
    /,
    *,
    workers: int,
    profile: Path | None = None,
    protocols: str | None = None,
    delay: list[str] | None = None,
    slow: list[str] | None = None,
    mini_batch_size: int | None = None,
    lr: float | None = None,
    init: str | None = None,
    seed: int = 0,
    seconds: float = 60.0,
    target_accuracy: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Advise a protocol for a number of workers: measure here, predict, race, say why.

    Parameters
    ----------
    task
        A built-in task or package.module:attribute.
    workers
        How many there will be, each on a core or a machine of its own.
    profile
        A recorded run to take the times from [default: a run of 20 s now].
    protocols
        Only these: full-sync,k-sync:6,async [default: the family, K on a grid].
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
        Also predict when this test accuracy (0 to 1) is reached.
    json
        One JSON object.
    """
    from ..advice import Question, advise
    from ..report.ranking import render_advice

    start_s = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start_s:5.0f} s  {text}", file=sys.stderr, flush=True)

    asked = Question(
        task=task, workers=workers, profile=profile, delay=tuple(delay or ()),
        protocols=tuple(protocols.split(",")) if protocols else None, slow=tuple(slow or ()),
        mini_batch_size=mini_batch_size, lr=lr, init=init, seed=seed, race_s=seconds,
        target_accuracy=target_accuracy,
    )  # fmt: skip
    advice = advise(asked, say)
    if json:
        print(json_format.dumps(advice.to_json(), allow_nan=False))
    else:
        print("\n".join(render_advice(advice)))
