"""``paceline ps`` and ``paceline clean``: training processes, what they hold, and their end."""

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..errors import ConfigError
from .flags import Json, say, show

if TYPE_CHECKING:
    from ..processes.ending import Leftover
    from ..processes.snapshot import ProcessSnapshot
    from ..processes.table import Cleaned
    from ..processes.targets import Ends

LOOK_S, LOOK_TO_END_S = 0.5, 2.0
"""Seconds between two looks, to tell idle processes from busy ones; longer before ending them."""
_MOST_S = 3600.0


def ps(*, look_s: float = LOOK_S, json: Json = False) -> None:
    """List your training processes, what they hold, whether their parents live, and ghosts.

    Exit code 0 even if there are ghosts.

    Parameters
    ----------
    look_s
        How many seconds to watch the processes; one that uses nothing in that time is idle.
    """
    from ..machine.source import MachineSource
    from ..processes.devices import busy_devices, device_memory
    from ..processes.judgement import judge
    from ..processes.reading import look
    from ..processes.table import Listing, render_listed

    snapshot = look(for_s=_seconds(look_s, "--look-s"))
    source = MachineSource()
    listed = Listing(
        judged=tuple(judge(snapshot, look_s)), busy=tuple(busy_devices(snapshot, source)),
        device_bytes=device_memory(snapshot, source), unread=snapshot.unread,
    )  # fmt: skip
    show(json, listed.to_json, lambda: render_listed(listed))


def clean(
    *pids: int,
    yes: Annotated[
        bool, Parameter(negative=(), help="End them; without this flag they are only listed.")
    ] = False,
    wait_s: float = 10.0,
    look_s: float = LOOK_TO_END_S,
    json: Json = False,
) -> None:
    """End training processes that were left behind, and free what they hold.

    Without --yes they are only listed. Never ended: processes that are not part of a training, of
    another user or container, and this command's own parents. A script or a notebook is ended only
    if its process is named.
    Exit code 1 if a process or resource that should have gone is still there.

    Example: paceline clean
    Example: paceline clean 4711 --yes

    Parameters
    ----------
    pids
        Only these processes, and all that belong to them [default: all ghosts].
    wait_s
        How many seconds to wait between TERM and KILL.
    look_s
        How many seconds to watch the processes before they are ended.
    """
    from ..processes.ending import left_before
    from ..processes.reading import look
    from ..processes.table import render_cleaned
    from ..processes.targets import choose

    wait_s = _seconds(wait_s, "--wait-s")
    snapshot = look(for_s=_seconds(look_s, "--look-s"))
    ends = choose(snapshot, pids, look_s)
    before = () if pids else tuple(left_before(snapshot))
    has_work = bool(ends.targets or before)
    cleaned = (
        _act(ends, wait_s, before) if yes and has_work else _shown(snapshot, ends, before, yes)
    )
    show(json, cleaned.to_json, lambda: render_cleaned(cleaned))
    if not cleaned.is_clean:
        sys.exit(1)


def _shown(
    snapshot: "ProcessSnapshot", ends: "Ends", before: "tuple[Leftover, ...]", was_asked: bool
) -> "Cleaned":
    """What would be ended and freed; nothing is touched."""
    from ..processes.ending import left_by
    from ..processes.table import Cleaned

    left = left_by([process for process, _ in ends.targets], snapshot)
    return Cleaned(ends=ends, has_acted=was_asked, leftovers=(*left, *before))


def _act(ends: "Ends", wait_s: float, before: "tuple[Leftover, ...]") -> "Cleaned":
    """End them, free what they leave, and check which ports are still taken."""
    from ..processes.ending import end, left_by, remove
    from ..processes.reading import look
    from ..processes.table import Cleaned

    targets = [process for process, _ in ends.targets]
    ended = end(targets, wait_s, say)
    over_pids = {process.pid for process in ended if process.is_over}
    now = look()
    left = left_by([target for target in targets if target.pid in over_pids], now)
    taken = {port for process in now.processes for port in process.ports}
    return Cleaned(
        ends=ends, has_acted=True, ended=tuple(ended),
        leftovers=tuple(remove([*left, *before])),
        kept_ports=tuple(sorted({port for target in targets for port in target.ports} & taken)),
    )  # fmt: skip


def _seconds(value: float, flag: str) -> float:
    """The value of a flag in seconds, checked.

    Raises:
        ConfigError: it is negative or more than an hour.
    """
    if not 0 <= value <= _MOST_S:
        raise ConfigError(f"{flag} must be between 0 and {_MOST_S:.0f} seconds, got {value}")
    return value
