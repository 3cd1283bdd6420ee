"""Trials: several runs of the same members, one after another, inside one script.

    the outer run     TrialBegins (each) -> all there? -> OpenTrial ... TrialOver (each)
    the trial         Describe -> ... epochs ... -> TrialEnds (each)    a controller of its own

    script     ---- with pace.trial("a"): ---------- with pace.trial("b"): -------- end
    outer run  waits |                    | waits    |                    | waits
    trials           [ a: plan ... summary ]         [ b: plan ... summary ]

During a trial the outer run handles no events: deaths and ends of scripts are reported to it
afterwards. This module must not know folders, reports, or what a trial does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..engines.base import ProcessLeft
from ..errors import ConfigError
from ..wire.messages import Done, TrialBegins, TrialOver
from .departures import Departures
from .state import RunState


@dataclass(slots=True, kw_only=True)
class TrialOutcome:
    """What the run around a trial needs to know of it.

    Attributes:
        left: members that are gone -> how they ended.
        ended: members whose scripts are over.
        failure, kind: a script's failure, as in `TrialFails`; empty: none failed.
        is_given_up: whether the user's stop has waited long enough for the remaining members.
    """

    left: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failure: str = ""
    kind: str = ""
    is_given_up: bool = False

    def note(self, member: int, message: object) -> None:
        """Note an event of a member, if it matters here."""
        if isinstance(message, ProcessLeft):
            self.left[member] = message.reason
        elif isinstance(message, Done):
            self.ended.add(member)


Seats: TypeAlias = Mapping[int, tuple[int, int]]
"""Member -> (seat, pid)."""
CarryOut: TypeAlias = Callable[[str, Seats, str], TrialOutcome]
"""Runs the trial of this name; a text says why it is to stop as soon as it has begun."""


class TrialBook:
    """The trials of one run, seen from the outer run.

    Args:
        carry_out: runs a trial; None: this run can have none.

    Attributes:
        num_begun: trials begun so far.
    """

    def __init__(self, run: RunState, departures: Departures, carry_out: CarryOut | None) -> None:
        self._run, self._departures, self._carry_out = run, departures, carry_out
        self._names: dict[int, str] = {}
        """Members that wait for a trial -> its name."""
        self.num_begun = 0

    def __contains__(self, member: int) -> bool:
        return member in self._names

    def begins(self, member: int, message: TrialBegins) -> None:
        """A member's script has reached a trial.

        Raises:
            ConfigError: others wait for another trial, or this run can have none.
        """
        settings = self._run.settings
        if self._carry_out is None:
            raise ConfigError(
                "pace.trial() does not work here: start the script by paceline launch"
            )
        for flag, is_given in (("resume", settings.resume), ("respawn", settings.respawn)):
            if is_given:
                raise ConfigError(
                    f"--{flag} is for a script that trains once, and this one has pace.trial(): a "
                    "worker that starts later has no part in the trials before; leave it out"
                )
        for other, name in self._names.items():
            if name != message.name:
                roster = self._run.roster
                raise ConfigError(
                    f"worker {roster[other].seat} waits in pace.trial({name!r}), and worker "
                    f"{roster[member].seat} enters pace.trial({message.name!r}): enter the same "
                    "trials in all workers, in the same order"
                )
        self._names[member] = message.name

    def left(self, member: int) -> None:
        """A member is gone: it is not waited for."""
        self._names.pop(member, None)

    def refuse_half(self, num_described: int) -> None:
        """Raise ConfigError if some wait for a trial that others will never reach."""
        if not self._names:
            return
        roster = self._run.roster
        waiting, name = next(iter(self._names.items()))
        over = [entry.seat for entry in roster.members.values() if entry.is_over]
        if over or num_described:
            who = "another worker calls prepare()"
            if over:
                who = f"worker {over[0]}'s script ended"
            raise ConfigError(
                f"{who} without pace.trial({name!r}), in which worker {roster[waiting].seat} "
                "waits: enter the same trials in all workers, in the same order"
            )

    def carry_out_if_due(self, stopped: str) -> TrialOutcome | None:
        """Run a trial once all members have reached it; returns its outcome, None: not due.

        Args:
            stopped: why nothing is trained any more; empty: trials train.
        """
        live = [entry for entry in self._run.roster.live if not entry.is_done]
        if not live or any(entry.number not in self._names for entry in live):
            return None
        assert self._carry_out is not None
        name = self._names[live[0].number]
        self._names.clear()
        self.num_begun += 1
        seats = {entry.number: (entry.seat, entry.pid) for entry in live}
        outcome = self._carry_out(name, seats, stopped)
        self._take_over(outcome)
        return outcome

    def _take_over(self, outcome: TrialOutcome) -> None:
        """Let the remaining members continue after the trial."""
        run, roster = self._run, self._run.roster
        for member, reason in outcome.left.items():
            roster[member].is_alive, roster[member].end = False, reason
        for member in outcome.ended:
            roster[member].is_done = roster[member].is_over = True
        self._departures.find_main()
        if run.settings.dry_run:
            return
        for entry in roster.live:
            if not entry.is_done:
                is_main = self._departures.is_main(entry.number)
                over = TrialOver(outcome.failure, outcome.kind, is_main)
                run.dispatch.tell(entry.number, over)
