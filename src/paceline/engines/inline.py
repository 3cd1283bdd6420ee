"""The inline engine: the whole run in one process, one member at a time; for tests and debuggers.

Members are threads that pass a baton, so only one runs at any moment and the engine chooses the
order of events: pushes arrive in the order in which their work was granted, or in a given order
(``arrivals``), so a recorded run can be repeated. All other code is the same as in a live run.
Above 300 lines because a member and the engine that passes it the baton are read together. This
module must not know protocols.
"""

import functools
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ..context import Context
from ..errors import ConfigError
from ..events import Grant, Ticket
from ..exchange import make_averaging
from ..exchange.base import Perished, Stopped, Superseded
from ..exchange.member import MemoryCarrier
from ..exchange.through_store import StoreExchange
from ..script import worker
from ..store.control import JOBS, VERSION, Control, control_bytes
from ..store.memory import PrivateMemory
from ..system.interpreter import kept_interpreter
from ..tuning.allocator import kept_process
from ..wire.messages import FromMember, Push, ToMember
from .base import Engine, Event, MemberSpec, MemberStalled, ProcessLeft, StoreView, Traits
from .local import process


class _MemberThread(threading.Thread):
    """One member; runs only while it holds the baton."""

    def __init__(self, engine: "InlineEngine", spec: MemberSpec) -> None:
        super().__init__(name=f"paceline-worker-{spec.seat}", daemon=True)
        self.spec = spec
        self.inbox: deque[ToMember] = deque()
        self.serial = -1
        self.granted = 0
        """Its last grant's number among all grants of the run."""
        self.waits_for_push: Push | None = None
        self.waits_for_word = False
        self.sleeps_until_s = math.inf
        """When its injected delay is over; inf if it has none."""
        self.is_over = False
        self.is_halted = False
        self.is_stalled = False
        self.ending = "exit 0"
        self.has_begun = False
        self._engine = engine
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)

    # -- the engine's side ----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        if self.is_over or self.is_halted or self.waits_for_push is not None:
            return False
        return not self.has_begun or bool(self.inbox) or self.waits_for_word

    def go_on(self) -> None:
        """Run this member until it waits for something."""
        if not self.has_begun:
            self.has_begun = True
            self.start()
        else:
            self._go.release()
        self._back.acquire()

    # -- the member's side: its channel ------------------------------------------------------------

    def run(self) -> None:
        try:
            context = Context.read(self.spec.context)
            exchange = StoreExchange(
                self, MemoryCarrier(self._engine.member_control(self), self._engine.arena),
                seat=self.spec.seat, member=self.spec.member,
                averaging=functools.partial(make_averaging, "peers", ""),
            )  # fmt: skip
            worker.start_context(exchange, context)
            program = pickle.loads(self._engine.program)
            process.perform(lambda: process.run_program(program, context), self, self.spec)
        except Perished:
            self.ending = "killed by signal 9"
        finally:
            self.is_over = True
            self._back.release()

    def send(self, message: FromMember) -> None:
        if isinstance(message, Push):
            self.waits_for_push = message
            self.yield_baton()
            self.waits_for_push = None
            if self._engine.is_cancelled(self, message):
                raise Superseded
        self._engine.pending_events.append((self.spec.member, message))

    def hold(self, message: FromMember) -> None:
        self._engine.pending_events.append((self.spec.member, message))

    def die(self) -> None:
        raise Perished

    def halt(self) -> None:
        """Wait until no other member can continue and the stall has been reported."""
        self.is_halted = True
        while self.is_halted:
            self.yield_baton()

    def receive(self, is_blocking: bool = True) -> list[ToMember]:
        while is_blocking and not self.inbox:
            self.yield_baton()
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def yield_baton(self) -> None:
        """Give the baton back until the engine hands it over again."""
        self._back.release()
        self._go.acquire()
        if self._engine.is_closed:
            raise Stopped


class _InlineControl(Control):
    """The control words in one process: a member passes the baton where it would wait."""

    def __init__(
        self,
        memory: PrivateMemory,
        num_seats: int,
        thread: _MemberThread,
        pulled: Callable[[], int],
    ) -> None:
        super().__init__(memory, num_seats)
        self._thread = thread
        self._pulled = pulled

    def wait_while(
        self,
        index: int,
        is_early: Callable[[int], bool],
        timeout_s: float,
        *,
        is_soon: bool = True,
        asleep: int | None = None,
    ) -> bool:
        if is_early(self[index]) and timeout_s > 0.0:
            self._thread.waits_for_word = True
            if not is_soon:
                self._thread.sleeps_until_s = time.perf_counter() + timeout_s
            self._thread.yield_baton()
            self._thread.waits_for_word, self._thread.sleeps_until_s = False, math.inf
        return not is_early(self[index])

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return super().wait_for_version(max(version, self._pulled()), timeout_s)


class InlineEngine(Engine):
    """Runs all members in this process.

    Args:
        num_seats: the number of workers.
        arrivals: the pushes of a recorded run in the order of their arrival, each with the version
            that it was computed from; None for the order of their grants.
    """

    traits = Traits(name="inline", cancels=True, loses_members=False, has_store=True, is_spmd=False)

    def __init__(self, num_seats: int, arrivals: Sequence[Ticket] | None = None) -> None:
        self._page = PrivateMemory(control_bytes(num_seats))
        self.arena = PrivateMemory()
        self._num_seats = num_seats
        self.program = b""
        self._control = Control(self._page, num_seats)
        self._threads: dict[int, _MemberThread] = {}
        self._arrivals = None if arrivals is None else deque(arrivals)
        self._pulled = {ticket[:2]: ticket.version for ticket in arrivals or ()}
        self._ready_pushes: deque[int] = deque()
        self._num_grants = 0
        self.pending_events: list[Event] = []
        self.is_closed = False
        self._surroundings = ExitStack()

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        self.program = program
        self._surroundings.enter_context(kept_process())
        self._surroundings.enter_context(kept_interpreter())
        for spec in specs:
            self._threads[spec.member] = _MemberThread(self, spec)
        return {spec.member: (spec.seat, 0) for spec in specs}

    def member_control(self, thread: _MemberThread) -> Control:
        pulled = functools.partial(self.version_pulled, thread)
        return _InlineControl(self._page, self._num_seats, thread, pulled)

    def version_pulled(self, thread: _MemberThread) -> int:
        """Return the version that this work was computed from in the recorded run; 0: any."""
        return self._pulled.get((thread.spec.member, thread.serial), 0)

    def is_cancelled(self, thread: _MemberThread, push: Push) -> bool:
        """Return whether this member's push was cancelled while it waited."""
        return self._control[self._control.cancelled[thread.spec.seat]] > push.serial

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Run every ready member until it waits; then deliver the next push."""
        progress = -1
        while progress != (progress := self._progress()):
            for thread in self._threads.values():
                if thread.is_ready:
                    self._run_until_it_waits(thread)
                    if self.pending_events:
                        return self._take()
        for member, thread in self._threads.items():
            push = thread.waits_for_push
            if push is not None and self.is_cancelled(thread, push):
                self._ready_pushes = deque(
                    number for number in self._ready_pushes if number != member
                )
                self._run_until_it_waits(thread)
                return self._take()
        if not self._ready_pushes and (halted := self._halted()) is not None:
            if not halted.is_stalled:
                halted.is_stalled = True
                return [(halted.spec.member, MemberStalled())]
            halted.is_halted = halted.is_stalled = False
            self._run_until_it_waits(halted)
            return self._take()
        if self._is_sleeper_next():
            sleeper = min(self._threads.values(), key=lambda thread: thread.sleeps_until_s)
            time.sleep(max(0.0, sleeper.sleeps_until_s - time.perf_counter()))
            self._run_until_it_waits(sleeper)
            return self._take()
        thread = self._next_arrival()
        self._run_until_it_waits(thread)
        return self._take()

    def _progress(self) -> int:
        """Return a count of all that members may wait for: versions, jobs, barriers."""
        control = self._control
        return control[VERSION] + control[JOBS] + sum(control[index] for index in control.arrived)

    def _is_sleeper_next(self) -> bool:
        """Return whether no member can continue before a delay is over."""
        if all(thread.sleeps_until_s == math.inf for thread in self._threads.values()):
            return False
        return not self._ready_pushes or bool(
            self._arrivals and self._arrivals[0].member not in self._ready_pushes
        )

    def _halted(self) -> _MemberThread | None:
        """Return the first halted member."""
        threads = self._threads.values()
        return next((thread for thread in threads if thread.is_halted and not thread.is_over), None)

    def _run_until_it_waits(self, thread: _MemberThread) -> None:
        thread.go_on()
        if thread.waits_for_push is not None and thread.spec.member not in self._ready_pushes:
            self._ready_pushes.append(thread.spec.member)
        if thread.is_over:
            self.pending_events.append((thread.spec.member, ProcessLeft(thread.ending)))

    def _take(self) -> list[Event]:
        events, self.pending_events = self.pending_events, []
        return events

    def _next_arrival(self) -> _MemberThread:
        if not self._ready_pushes:
            raise ConfigError(
                "deadlock: every worker waits for another one; call pace.sum(), pace.evaluate() "
                "and the like in all workers"
            )
        if self._arrivals:
            member = self._arrivals.popleft().member
            if member not in self._ready_pushes:
                raise ConfigError(
                    f"the recorded order of pushes does not fit this run: worker {member} has no "
                    "push to deliver next"
                )
            self._ready_pushes.remove(member)
            return self._threads[member]
        first = min(self._ready_pushes, key=lambda member: self._threads[member].granted)
        self._ready_pushes.remove(first)
        return self._threads[first]

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        for member, message in messages:
            thread = self._threads[member]
            if isinstance(message, Grant):
                self._num_grants += 1
                thread.serial, thread.granted = message.ticket.serial, self._num_grants
            thread.inbox.append(message)

    def cancel(self, member: int, serial: int) -> None:
        self._control[self._control.cancelled[self._threads[member].spec.seat]] = serial + 1

    def lay_out(self, num_bytes: int) -> StoreView:
        self.arena.grow(num_bytes)
        return StoreView(self.arena, self._control)

    def clear(self) -> None:
        if self._arrivals is not None:
            super().clear()
        gone = [thread.spec.seat for thread in self._threads.values() if thread.is_over]
        self._control.clear(gone)

    def close(self) -> None:
        self.is_closed = True
        for thread in self._threads.values():
            while thread.has_begun and not thread.is_over:
                thread.go_on()
        self._surroundings.close()
