"""What a trial needs from other workers: a name, a common begin and end, and the error of another.

    check_name    a folder of its own, not used before
    open_trial    all workers enter it; each gets an exchange and a context for it
    close_trial   all have left it; an error here ends it in all of them
    error_like    what the others raise then

`Pace.trial` in worker.py is the block itself: it keeps what is outside and restores it. This module
must not know how objects are prepared or made plain again.
"""

import json
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..context import Context
from ..errors import ConfigError, FileError, PacelineError, WorkerError
from ..exchange.base import Exchange, Stopped
from ..exchange.solo import SoloExchange
from ..exchange.through_store import StoreExchange
from ..wire.messages import TrialOver
from .prepared import Prepared

_NAME = re.compile(r"[A-Za-z0-9_][\w.,=+@-]{0,99}")
"""Names of trials, which are folder names, too."""

RUN_FILES = frozenset((
    "best.json", "best.safetensors", "checkpoints", "curve.svg", "lock", "logs", "metrics.csv",
    "mlflow-run.txt", "model.safetensors", "summary.json", "tensorboard", "trace.jsonl",
    "trials.json", "wandb", "wandb-run.txt",
))  # fmt: skip
"""What a run writes into its own folder, where the folders of its trials are."""


def check_name(name: object, earlier: Sequence[str]) -> str:
    """Return the name of a trial. ConfigError: it cannot name a folder, or is used.

    Args:
        earlier: names of the trials that the script has entered.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"pace.trial({name!r:.120}): the name must fit a folder: letters, digits and "
            "_ . , = + @ -, at most 100: pace.trial(f'lr-{lr}')"
        )
    if name.lower() in RUN_FILES:  # some file systems do not tell cases apart
        raise ConfigError(
            f"pace.trial({name!r}): the run itself writes {name.lower()} into its folder; "
            "give the trial another name, or none: pace.trial()"
        )
    if name.lower() in {other.lower() for other in earlier}:
        raise ConfigError(
            f"pace.trial({name!r}) was entered before, be it in other letters' case; give each "
            "trial a name of its own, or none: pace.trial()"
        )
    return name


def open_trial(outside: Exchange, context: Context, name: str) -> tuple[Exchange, Context]:
    """Wait for all workers; return this one's exchange and context in the trial.

    Args:
        outside: this worker's exchange with the run, whose context is ``context``.
    """
    if (member := outside.shared) is not None:
        exchange, text = member.begin_trial(name)
        shared = Context.read(json.loads(text))
        return exchange, replace(shared, is_own_process=context.is_own_process)
    alone = SoloExchange()
    if outside.is_stopped:
        alone.ask_to_stop()
    return alone, replace(context, run_dir=str(Path(context.run_dir or ".") / name))


def close_trial(
    exchange: Exchange, prepared: Prepared | None, error: BaseException | None
) -> TrialOver:
    """Wait until all workers have left the trial; return how it ended.

    Args:
        exchange: this worker's in the trial.
        error: what left the block here.

    Raises:
        Stopped: this worker failed and could not leave the others, so the run ends.
    """
    if (member := exchange.shared) is None:
        return TrialOver("", "", is_main=True)
    if isinstance(error, Exception) and not member.is_cut_short:
        _fail_trial(member, prepared, error)
    return member.end_trial()


def _fail_trial(member: StoreExchange, prepared: Prepared | None, error: Exception) -> None:
    text, kind = _failure_text(error, member.seat), type(error)
    member.fail_trial(text, f"{kind.__module__}:{kind.__qualname__}")
    try:
        if prepared is not None:
            prepared.loop.abandon()
    except Stopped:
        return  # the run was ending anyway
    except Exception:  # whatever leaving raises, the failure itself is what counts
        member.fail(text, is_yours=isinstance(error, ConfigError))
        raise Stopped from error


def _failure_text(error: Exception, seat: int) -> str:
    """Why a trial failed, and where in the script."""
    if isinstance(error, PacelineError):
        return str(error)
    package = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if package not in frame.filename
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    first = str(error).strip().partition("\n")[0]
    return f"worker {seat} failed in it{where}: {type(error).__name__}: {first:.300}"


def error_like(over: TrialOver, name: str) -> Exception:
    """The exception that ends a trial here after another worker failed in it.

    Its class is the other worker's, if it is known here and can be made from a text.
    """
    module, _, path = over.kind.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if kind is FileError:  # it names a file, and the text already does
        kind = ConfigError
    text = f"trial {name!r} is over in all workers: {over.text}"
    if isinstance(kind, type) and issubclass(kind, Exception):
        own: Any = next(one for one in kind.__mro__ if one.__module__ == "builtins")
        with suppress(Exception):  # its class needs more than a text, to be made or to be printed
            error: Exception = own.__new__(kind)
            error.args = (text,)
            if str(error) in (text, repr(text)):  # a KeyError prints the latter
                return error
    return WorkerError(text)
