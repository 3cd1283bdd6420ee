"""Which data set a run uses: the one wished for, or the one that ships in its place.

Chosen once, before workers start, because it may fetch; workers look again and fetch nothing. It
must not know how samples are read, and imports no torch: the launcher chooses before it starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ..errors import ConfigError
from .catalogue import DataSet, find, locate
from .fetch import Say, fetch
from .sources import Outside

STAND_IN = "digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The data set to use, and one line that says so if it is not the one that was wished for."""

    name: str
    note: str = ""


def choose(
    name: str,
    *,
    fetch_missing: bool,
    env: Mapping[str, str] | None = None,
    outside: Outside | None = None,
    say: Say = lambda line: None,
) -> Choice:
    """``name`` if it is here or can be fetched, else the digits that ship with the package.

    Files that are here but damaged are never passed over in silence: they are fetched anew if
    that is allowed, and else an error.

    Raises:
        ConfigError: ``name`` is unknown; or it is here, damaged, and was not or cannot be fetched.
    """
    data_set = find(name)
    was_missing = locate(data_set, env) is None
    if not fetch_missing:
        if was_missing:
            return _stand_in(data_set, f"is not here (`paceline data get {name}` fetches it)")
        return Choice(name=name)
    try:
        fetch(name, env=env, outside=outside, say=say)
    except ConfigError as error:
        if not was_missing:
            raise
        say(str(error))
        return _stand_in(data_set, f"could not be fetched (`paceline data get {name}` says why)")
    return Choice(name=name)


def _stand_in(data_set: DataSet, reason: str) -> Choice:
    other = find(STAND_IN)
    note = (
        f"{data_set.title} {reason}: training on {other.title} instead, "
        f"{other.num_train:,} + {other.num_test:,} real images that ship with paceline"
    )
    return Choice(name=STAND_IN, note=note)


Chooser: TypeAlias = Callable[[str], Choice]

# Looks only at what is here.
choose_here: Chooser = partial(choose, fetch_missing=False)
