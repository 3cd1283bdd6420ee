"""A session through the store: every order comes from the coordinator, every protocol runs.

    send push -> [ jobs: add, finish ] -> grant -> wait for its version -> pull

Members execute the updates that the coordinator decides; a member that waits for its grant does
the jobs that arrive meanwhile. This module must not know protocols, processes or the loop.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..compute.replica import Hyper, Replica
from ..events import Grant, Lease, Ticket
from ..store.control import BY_VERSION, LAYOUT, NORM, Control
from ..store.memory import Memory
from ..store.scale import LossScale
from ..store.shared import SharedStore
from ..store.update import Updater
from .base import (
    FOUND_INF,
    NOT_FINITE,
    OK,
    Census,
    Clock,
    Session,
    Shape,
    Stopped,
    Superseded,
    Totals,
    Work,
    not_finite,
)
from .duties import JOBS, POLL_S, Duties
from .lane import Lane, Message


class MediatedSession(Session):
    """One member that talks to a coordinator over a lane.

    Args:
        lane: both ways to the coordinator.
        control: the run's words.
        arena: the store's memory, still empty; sized when the layout is known.
        seat, member: the worker's place, and this life on it.
        num_workers: seats of the run.
    """

    def __init__(
        self, lane: Lane, control: Control, arena: Memory, *, seat: int, member: int
    ) -> None:
        self._lane = lane
        self._control = control
        self._arena = arena
        self.seat = seat
        self.member = member
        self._cancelled = control.cancelled[seat]
        self.num_workers = control.num_seats
        self._is_main = seat == 0
        self._epoch = 0
        self._batch_ends: Sequence[int] | None = None
        self._queue: deque[Message] = deque()
        self._duties = Duties(control, lambda version: self.advance_schedule(version))
        self._clock = Clock()
        self._grant: Grant | None = None
        self._stopped = False
        self._serial = -1
        self._version = 0
        self._hyper: Hyper = ()
        self._hyper_digest = 0
        self.advance_schedule: Callable[[int], bool] = lambda version: False
        """Bring prepared schedulers to this version; whether there are any."""

    # -- before the first step ------------------------------------------------------------------

    def attach(
        self, replica: Replica, rule: Optimizer, shape: Shape, description: dict[str, object]
    ) -> None:
        """Describe the model, wait for the store's memory, and fill or read it.

        Args:
            rule: the optimizer that the store applies: the user's, or plain averaging.
        """
        self._replica = replica
        self._rule = rule
        self._shape = shape
        self._lane.send(("describe", json.dumps(description)))
        message = self._expect("laid")
        is_first, self.num_steps, self._is_difference = message[2:5]
        self._nonfinite_is_error = message[5]
        self.store = SharedStore(replica.layout, self._arena.tensor(), self._control)
        self._updaters = [
            Updater(rule, replica.parameters, replica.layout, one) for one in self.store.blocks
        ]
        self._duties.begin(self.store, self._updaters, rule)
        if is_first:
            replica.write_to(self.store.blocks[self.store.current])
            self._updaters[self.store.current].write_state(rule, replica.parameters)
            self._control.set_and_wake(LAYOUT, 1)
        while not self._control.wait_while(LAYOUT, lambda value: value == 0, POLL_S):
            self._take_jobs()
        self._live_alone()

    def _live_alone(self) -> None:
        """The model on private memory with the newest version, gradients into this seat's slot."""
        self._home = self._replica.live_alone()
        self._base = torch.empty_like(self._home) if self._is_difference else None
        self._pull(0)
        if not self._is_difference:
            self._replica.push_into(self.store.slot(self.seat), self.check)

    # -- the verbs ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, batch_ends: Sequence[int] | None) -> bool:
        if self._stopped:
            return False
        self._epoch, self._batch_ends, self._told = epoch, batch_ends, 0
        self._lane.send(("arrive", epoch, list(batch_ends) if batch_ends is not None else None))
        message = self._next()
        if message[0] != "open":
            return False
        self._opened(message)
        return True

    def _opened(self, message: Message) -> None:
        self._await_grant()

    def grant(self) -> Grant | None:
        return self._grant

    def push(self, work: Work) -> None:
        start = time.perf_counter()
        clock = self._clock
        clock.compute_s = start - clock.begun_s
        fault = self._fill_slot(work)
        hyper = 0 if self.advance_schedule(self._version) else self._digest_hyper()
        clocks = (clock.compute_s, clock.wait_s, clock.push_s)
        self._lane.send(
            ("push", self._serial, self._version, work.num_samples, work.loss, fault, clocks,
             hyper, work.max_norm)
        )  # fmt: skip
        clock.wait_s = 0.0
        self._await_grant()
        clock.push_s = time.perf_counter() - start - clock.wait_s
        if work.max_norm:
            self.last_norm = self._control.double(NORM)

    def _fill_slot(self, work: Work) -> int:
        """Put what is pushed into this seat's slot; what is wrong with it."""
        store, replica = self.store, self._replica
        slot, present = store.slot(self.seat), store.present(self.seat)
        if self._base is not None:
            for run in replica.layout.parameters.runs():
                dtype, start, stop = run
                torch.sub(
                    self._base[start:stop].view(dtype),
                    self._home[start:stop].view(dtype),
                    out=slot[start:stop].view(dtype),
                ) if slot.device == self._home.device else slot[start:stop].view(dtype).copy_(
                    self._base[start:stop].view(dtype) - self._home[start:stop].view(dtype)
                )
            replica.layout.buffers.of(slot).copy_(replica.layout.buffers.of(self._home))
            present[:] = b"\1" * len(present)
        else:
            if work.inv_scale != 1.0:
                replica.scale_gradients(work.inv_scale)
            replica.collect(present)
        if work.found_inf:
            return FOUND_INF
        if store.is_finite(self.seat):
            return OK
        if self._nonfinite_is_error:
            self._fail_not_finite(work.loss)
        return NOT_FINITE

    def _fail_not_finite(self, loss: float) -> None:
        name = self.store.not_finite(self.seat)
        raise not_finite(self.seat, name, self._serial, self._version, loss)

    def extend(self) -> Lease | None:
        self._lane.send(("extend", self._serial))
        others = []
        while (message := self._next())[0] != "extended":
            others.append(message)  # the work was superseded: what comes next is here already
        self._queue.extendleft(reversed(others))
        return None if message[1] is None else Lease(*message[1])

    def give_back(self) -> None:
        self._lane.send(("giveback", self._serial))
        self._await_grant()

    def check(self) -> None:
        if self.is_in_step and self._control[self._cancelled] > self._serial:
            raise Superseded

    def superseded(self) -> None:
        left_s = time.perf_counter()
        self._lane.hold(("superseded", self._serial, left_s - self._clock.begun_s, left_s))
        self._await_grant()
        self._clock.push_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Wait on this seat's cancelled word, so that a cancellation ends it at once."""
        control, serial = self._control, self._serial
        index = control.cancelled[self.seat]
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            if control.wait_while(index, lambda value: value <= serial, left_s, is_soon=False):
                raise Superseded

    def upcoming(self, depth: int) -> Sequence[Lease]:
        """The coordinator knows the depth and keeps so many."""
        grant = self._grant
        return self._news((*grant.leases, *grant.upcoming)) if grant is not None else ()

    def schedule_by_version(self, set_it: bool) -> bool:
        if set_it:
            self._control[BY_VERSION] = 1
        return bool(self._control[BY_VERSION])

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Clones of the optimizer's whole state at the newest version, by the user's parameters."""
        rows = self._updaters[self.store.current].read_state()
        held = [one for group in self._rule.param_groups for one in group["params"]]
        return {one: row for one, row in zip(held, rows, strict=True) if row}

    def ask_to_stop(self) -> None:
        self._lane.send(("stop",))

    @property
    def is_main(self) -> bool:
        if not self._is_main:
            self._hear(is_blocking=False)  # the one before may have died
        return self._is_main

    @property
    def is_stopped(self) -> bool:
        if not self._stopped:
            self._hear(is_blocking=False)
            self._stopped = any(message[0] == "stop" for message in self._queue)
        return self._stopped

    @property
    def version(self) -> int:
        return self._version

    @property
    def scale(self) -> LossScale | None:
        return self.store.scale

    def offer_scale(self, scale: LossScale) -> None:
        """The scale of this member's own GradScaler: the run's, if it has none yet."""
        self.store.scales.offer(self.seat, scale)

    def census(self, num_samples: int, batch_size: int) -> Census:
        self._lane.send(("count", num_samples, batch_size))
        return _LaneCensus(self)

    def sum(self, values: Sequence[float]) -> list[float]:
        self._lane.send(("sum", [float(value) for value in values]))
        return list(self._expect("summed")[1])

    def log(self, values: dict[str, float]) -> None:
        self._lane.send(("log", values))

    def close(self) -> None:
        self._lane.send(("done",))

    # -- hearing --------------------------------------------------------------------------------

    def _await_grant(self) -> None:
        """Wait for the next grant, or the end of the epoch or the run, and pull its version."""
        message = self._next()
        kind = message[0]
        if kind == "grant":
            _, serial, version, leases, upcoming = message
            self._settle(lambda: self._control.wait_for_version(version, POLL_S))
            ticket = Ticket(self.member, serial, version)
            self._serial = serial
            self._pull(version)
            self._grant = Grant(
                ticket, tuple(Lease(*one) for one in leases), tuple(Lease(*one) for one in upcoming)
            )
        else:
            version = message[2] if kind == "end" else message[1]
            self._settle(lambda: self._control.wait_for_version(version, POLL_S))
            self._pull(version)
            self._grant = None
            self._stopped = kind == "stop"
        self._clock.begun_s = time.perf_counter()

    def _pull(self, version: int) -> None:
        self._version = self.store.pull(version, self._home)
        if self._base is not None:
            self._base.copy_(self._home)

    def _expect(self, kind: str) -> Message:
        message = self._next()
        while message[0] == "stop" and kind in _ANSWERS:
            message = self._next()  # the run ends at the next epoch; what was asked is answered
        if message[0] != kind:
            raise Stopped
        return message

    def _next(self) -> Message:
        """The next message that is not a job; jobs that came before it are done first."""
        while True:
            while self._duties:
                self._settle(self._duties.wait)
                self._duties.do_due()
            if self._queue:
                message = self._queue.popleft()
                self._stopped |= message[0] == "stop"
                return message
            start = time.perf_counter()
            self._hear()
            self._clock.wait_s += time.perf_counter() - start

    def _hear(self, is_blocking: bool = True) -> None:
        """Take in what has come: jobs by their number, all else in order."""
        for message in self._lane.receive(is_blocking):
            if message[0] in JOBS:
                self._duties.take(message)
            elif message[0] == "main":
                self._is_main = True
            else:
                self._queue.append(message)

    def _take_jobs(self) -> None:
        """Do the jobs whose turn it is, leave every other message for later."""
        self._hear(is_blocking=False)
        self._duties.do_due()

    def _settle(self, is_there: Callable[[], bool]) -> None:
        """Wait until ``is_there``, doing jobs that are handed over meanwhile."""
        start = time.perf_counter()
        while not is_there():
            self._take_jobs()
        self._clock.wait_s += time.perf_counter() - start

    def _digest_hyper(self) -> int:
        """A number that is equal for two members exactly when their optimizers' settings are."""
        hyper = self._replica.hyper()
        if hyper != self._hyper:
            self._hyper = hyper
            self._hyper_digest = zlib.crc32(repr(hyper).encode())
        return self._hyper_digest


_ANSWERS = frozenset(("range", "totals", "summed"))


class _LaneCensus(Census):
    """An evaluation whose ranges come from the coordinator."""

    def __init__(self, session: MediatedSession) -> None:
        self._session = session
        self._start = -1

    def next(self) -> tuple[int, int] | None:
        _, start, stop = self._session._expect("range")
        self._start = start
        return None if start < 0 else (start, stop)

    def report(self, totals: Totals) -> None:
        self._session._lane.send(("counted", self._start, totals))

    def totals(self) -> Totals:
        return {
            name: (pair[0], pair[1]) for name, pair in self._session._expect("totals")[1].items()
        }
