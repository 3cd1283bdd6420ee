"""A simulated run with faults: the fault plan of a live run in virtual time.

    push is there -> a fault in this step? -> dead, silent, late, lost -> Left, Stalled, Late

A member silent for longer than the run's patience has stalled, as in a live run. Members share no
memory here, so a replaced one that returns pushes once more, too late, and ends. This module
must not know tensors.
"""

from dataclasses import dataclass
from typing import Any

from paceline.conditions.faults import Fault, FaultPlan, Kind, WorkerFaults
from paceline.conditions.world import Conditions, Finisher
from paceline.core.ledger import Ledger
from paceline.errors import ConfigError
from paceline.events import Cancel, Pushed, Stalled, Ticket
from paceline.protocols.base import SyncProtocol
from paceline.simulation.agenda import NOBODY, AgendaChange, Strike
from paceline.simulation.engine import SimulatedRun

_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """This work is overdue by the patience of the run."""

    ticket: Ticket
    is_lost: bool


@dataclass(frozen=True, slots=True)
class Return:
    """A stopped worker continues this work."""

    ticket: Ticket


class FaultyRun(SimulatedRun):
    """One run in virtual time, with faults.

    Args:
        faults: of workers; a machine's have no meaning here.
        silence_s: how long silence lasts before it counts.
        new_life_s: time until a new worker replaces a dead one; None: never.
    """

    def __init__(
        self,
        protocol: SyncProtocol,
        ledger: Ledger,
        conditions: Conditions,
        faults: FaultPlan,
        *,
        silence_s: float,
        new_life_s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(protocol, ledger, conditions, **options)
        if outer := [one for one in faults.faults if one.worker is None]:
            raise ConfigError(
                f"fault {str(outer[0])!r}: a simulated run has no files, disk or "
                "launcher; order it for a live run"
            )
        self.happened: list[Fault] = []
        self._silence_s = silence_s
        self._new_life_s = new_life_s
        self._faults = [
            WorkerFaults(faults.of_worker(one)) for one in range(conditions.num_workers)
        ]
        self._halted: dict[int, Ticket] = {}
        """Who stands still, and over which work."""
        self._until_s = [0.0] * conditions.num_workers
        """By worker: until when it stands still, whatever it is granted meanwhile."""
        self._late: dict[Ticket, Pushed] = {}
        agenda = self._agenda
        agenda.by_worker = [self._slowed(i, one) for i, one in enumerate(agenda.by_worker)]
        for fault in faults.faults:
            if fault.at_s is not None and fault.kind in (Kind.KILL, Kind.STOP):
                agenda.enter(fault.at_s, Strike(NOBODY, fault))

    def _slowed(self, worker: int, finish: Finisher) -> Finisher:
        def finish_s(start_s: float) -> float:
            start_s = max(start_s, self._until_s[worker])
            return start_s + (finish(start_s) - start_s) * self._faults[worker].factor(start_s)

        return finish_s

    # -- faults ---------------------------------------------------------------------------------

    def _pushed(self, ticket: Ticket, at_s: float) -> None:
        member = ticket.member
        if self._halted.get(member) == ticket:
            del self._halted[member]  # late, but in time
        else:
            for fault in self._faults[self._agenda.worker_of[member]].due(ticket.version, at_s):
                self._note(fault, at_s)
                if self._befall(fault, ticket, at_s):
                    return
        super()._pushed(ticket, at_s)

    def _befall(self, fault: Fault, ticket: Ticket, at_s: float) -> bool:
        """Apply the fault to this work; return whether its push does not arrive now."""
        if fault.kind in (Kind.KILL, Kind.RAISE):
            self._die(ticket.member, at_s, fault.kind.name.lower())
            return True
        if fault.kind is Kind.SLOW:
            return False
        self._halt(ticket, at_s, _NEVER_S if fault.kind is Kind.DROP else fault.for_s)
        return True

    def _halt(self, ticket: Ticket, at_s: float, for_s: float) -> None:
        agenda = self._agenda
        self._halted[ticket.member] = ticket
        if for_s > self._silence_s:
            silence = SilentWorker(ticket, is_lost=for_s == _NEVER_S)
            agenda.enter(at_s + self._silence_s, Strike(NOBODY, silence))
        if for_s < _NEVER_S:
            self._until_s[agenda.worker_of[ticket.member]] = at_s + for_s
            agenda.enter(at_s + for_s, ticket)
            agenda.enter(at_s + for_s, Strike(NOBODY, Return(ticket)))

    def _struck(self, what: object, at_s: float) -> None:
        if isinstance(what, SilentWorker):
            self._fell_silent(what, at_s)
        elif isinstance(what, Return):
            self._returned(what.ticket, at_s)
        else:
            assert isinstance(what, Fault)
            self._from_outside(what, at_s)

    def _from_outside(self, fault: Fault, at_s: float) -> None:
        assert fault.worker is not None
        member = self._agenda.member_of.get(fault.worker)
        if member is None:
            return  # it is dead already
        ticket = self._agenda.current[member]
        if fault.kind is Kind.KILL:
            self._note(fault, at_s)
            self._die(member, at_s, "killed")
        elif ticket is not None and member not in self._halted:
            self._note(fault, at_s)  # its result stays in the heap and arrives no earlier
            self._agenda.withdraw(ticket)
            self._halt(ticket, at_s, fault.for_s)

    # -- consequences ---------------------------------------------------------------------------

    def _fell_silent(self, silence: SilentWorker, at_s: float) -> None:
        ticket = silence.ticket
        member = ticket.member
        if self._halted.get(member) != ticket or self._agenda.current[member] != ticket:
            return
        if self._trace is not None:
            self._trace.stalled(at_s, member)
        num_samples = sum(lease.num_samples for lease in self._leases[ticket])
        fact = Stalled(member, at_s)
        orders = self.coordinator.hear(fact)
        if Cancel(member) in orders:
            self._late[ticket] = Pushed(ticket, num_samples, float("nan"), True, at_s)
        self._carry_out(orders, fact)
        if silence.is_lost:
            self._die(member, at_s, "silent")

    def _returned(self, ticket: Ticket, at_s: float) -> None:
        """A replaced member pushes once more, too late, and ends."""
        late = self._late.pop(ticket, None)
        member = ticket.member
        if self._agenda.member_of.get(self._agenda.worker_of[member]) != member or late is None:
            return
        fact = late._replace(at_s=at_s)
        if self._trace is not None:
            self._trace.pushed(fact, 0.0, 0.0, 0.0)
        self._carry_out(self.coordinator.hear(fact), fact)
        self._die(member, at_s, "replaced")

    def _die(self, member: int, at_s: float, reason: str) -> None:
        worker = self._agenda.worker_of[member]
        self._halted.pop(member, None)
        self._until_s[worker] = 0.0
        self._changed(AgendaChange(NOBODY, worker, False), at_s, reason)
        if self._new_life_s is not None:
            self._agenda.enter(at_s + self._new_life_s, AgendaChange(NOBODY, worker, True))

    def _note(self, fault: Fault, at_s: float) -> None:
        self.happened.append(fault)
        if self._trace is not None:
            self._trace.fault(at_s, str(fault))
