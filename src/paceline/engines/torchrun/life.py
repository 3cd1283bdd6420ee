"""One rank from ``connect`` to the end of its process.

    connect -> place -> Hello | Meet -> group | Begin -> exchange -> script -> Done | RunOver -> end
                                                         raises -> Failed    |

A rank ends when its script ends (it then waits until all have ended), when its script raises (the
controller prints the reason once and ends all ranks), or when `RunOver` arrives while it does
something else. Nobody waits for a process that hangs in a collective: it exits from there. Above
300 lines, since a rank's start and all its ends are read together. This module must not know what
runs.
"""

import atexit
import hashlib
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import NoReturn

import psutil
import torch

from ...context import Context
from ...errors import ConfigError, LinkError, PacelineError
from ...exchange import Route
from ...exchange.averaging import Averaging
from ...exchange.base import ScriptHooks
from ...exchange.compressed import CompressedGradient
from ...exchange.mapped import address_of
from ...exchange.model_copy import ModelCopy
from ...exchange.priced import price_between
from ...exchange.rounds import Barrier
from ...exchange.through_store import StoreExchange
from ...plan import CompressionPrice
from ...replica.seeding import GENERATORS
from ...script import worker
from ...spread.averaging import SplitAveraging
from ...spread.group import Ranks
from ...store.memory import SharedMemory
from ...system.signals import REASONS, hear_alone
from ...wire.messages import Done, Failed, Note, Whose
from ..base import MemberSpec
from ..local import process
from .averaging import RankAveraging
from .buckets import make_buckets
from .group import MachineKeepalives, RankGroup, RankPart, why_unreachable
from .member import LINE_BYTES, RankCarrier
from .place import MeetingPlace
from .post import (
    DOWN,
    Begin,
    Bye,
    CallOff,
    Down,
    EndAsked,
    Hello,
    Lost,
    Meet,
    RunOver,
    StoreChannel,
)
from .world import RankOfWorld, boot_of_machine, environment_anew

ANEW = -1
"""The exit code of a process that restarts."""
_OVER_S = 60.0
"""Time for the end of the run to reach a rank whose script failed."""
_JOIN_S = 5.0
_TASK_END_S = 3.0
"""Time for a task to end once the run is over; after that it waits for others, or computes."""


class RankLife:
    """This process as one rank; there is one object in a process.

    Args:
        rank: this process's rank, from the environment.

    Raises:
        LinkError: the meeting place cannot be reached.
    """

    def __init__(self, rank: RankOfWorld) -> None:
        self._pid = os.getpid()
        self._report_by_excepthook()
        self.place = MeetingPlace(rank)
        self.rank = rank = self.place.rank
        self._news: queue.SimpleQueue[Meet | Begin] = queue.SimpleQueue()
        self._over = threading.Event()
        self._code = 0
        self._is_leaving = self._has_failed = self._has_reported = self._runs_task = False
        self._has_ended = threading.Event()
        """Set when the script, or the task, has ended."""
        self.carrier: RankCarrier
        self._spec: MemberSpec | None = None
        self._exchange: StoreExchange | None = None
        self._group: RankGroup | None = None
        self.channel = StoreChannel(self.place, rank.rank, self._heard, self._unreachable)
        self._context: Context | None = None
        self.controller: threading.Thread | None = None
        """On the first rank: the thread that runs the controller."""

    # -- the beginning --------------------------------------------------------------------------

    def begin_to_talk(self) -> None:
        """Report the script's end, and signals, to the controller from now on.

        A batch system signals every process: the controller decides when the run ends.
        """
        atexit.register(self._leave)
        if threading.current_thread() is not threading.main_thread():
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self.channel.say(EndAsked(number))

        is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        hear_alone(
            (number for number in REASONS if number != signal.SIGHUP or not is_under_nohup), ask
        )

    def _report_by_excepthook(self) -> None:
        """Report the script's exceptions to the controller, which prints the reason once."""
        original_hook = sys.excepthook

        def report(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if os.getpid() != self._pid or not self._report_failure(error.with_traceback(trace)):
                original_hook(kind, error, trace)

        sys.excepthook = report

    def meet(self, settings: str) -> None:
        """Meet all other ranks, and make the groups.

        Args:
            settings: this rank's settings at its start, as JSON.
        """
        sample = SharedMemory.create(1)
        self.channel.say(Hello(
            socket.gethostname(), self._pid, settings, random_digests(), why_unreachable(),
            boot_of_machine(), address_of(sample), self.rank.is_restarted,
        ))  # fmt: skip
        message = self._news.get()
        assert isinstance(message, Meet)
        sample.close()
        self._seeds = message.seeds
        self._group = RankGroup(
            self.place, self.rank, self._lost, is_near=message.is_near,
            note=lambda text: self.channel.send(Note(text)), is_over=self._over.is_set,
        )  # fmt: skip
        if not message.is_near:
            self._keepalives = MachineKeepalives(
                self.place, self.rank, self._lost, self._unreachable
            )

    def begin(self) -> Context:
        """Become a member of the run, which ``worker.current_pace`` returns from now on."""
        message = self._news.get()
        assert isinstance(message, Begin)
        assert self._group is not None
        self._spec = spec = MemberSpec(**json.loads(message.spec))
        self._context = context = context_of(spec, self.rank)
        group, seat = self._group, spec.seat
        self.carrier = RankCarrier(spec.num_seats, seat, group, self.place.client())
        self._exchange = StoreExchange(
            self.channel, self.carrier, seat=seat, member=spec.member,
            averaging=partial(_averaging, group),
        )  # fmt: skip
        self._exchange.ranks = Ranks(
            everyone=group, part=partial(RankPart, group, self.place), near=group.near,
            words=partial(self.place.client, "asks"), share=group.begin_to_share,
        )  # fmt: skip
        if not context.dry_run:  # no other rank takes part in a dry run
            price = partial(_price, group, is_in_buckets=not context.is_difference)
            self._exchange.price = price
        if context.threads is not None:  # else torchrun's or the user's OMP_NUM_THREADS is in force
            torch.set_num_threads(context.threads)
        worker.start_context(self._exchange, context, seeds=self._seeds)
        return context

    _seeds: tuple[str, ...] = ()

    def may_begin_anew(self) -> None:
        """Allow all processes to restart in place, if they can do so without losing any work.

        This needs checkpoints, and a launcher that keeps the meeting place meanwhile. Each restart
        must gain twice as much as the one before, since predictions may never come true.
        """
        assert self._context is not None
        if self.rank.is_hosted and self._context.checkpoints and self._exchange is not None:
            began_s = self.rank.began_s or psutil.Process().create_time()
            factor = 2.0**self.rank.anew
            self._exchange.price_anew = lambda for_s: factor * (time.time() - for_s - began_s)

    def perform(self, run: Callable[[], None]) -> NoReturn:
        """Run this task in place of a script, then exit."""
        assert self._spec is not None
        assert self._exchange is not None
        self._is_leaving = self._runs_task = True
        code = process.perform(run, self.channel, self._spec)
        self._await_over(code)
        self._exit(code or self._code)

    # -- messages of the controller, in the listening thread --------------------------------------

    def _heard(self, message: Down) -> None:
        if isinstance(message, CallOff):
            control = self.carrier.control
            control.set_and_wake(control.cancelled[self.rank.rank], message.serial + 1)
        elif isinstance(message, RunOver):
            self._end_with(message)
        else:
            self._news.put(message)

    def _end_with(self, message: RunOver) -> None:
        self._code = message.code
        if message.said:
            say(message.said)
        self.channel.say(Bye())
        self.channel.flush(1.0)
        self._over.set()
        if self._is_at_work():
            self._exit(message.code)

    def _is_at_work(self) -> bool:
        """Return whether the script or task still waits or computes, which no one needs."""
        is_late = self._runs_task and not self._has_ended.wait(_TASK_END_S)
        return is_late or not self._is_leaving

    def _unreachable(self, why: str = "") -> None:
        """Print why no message can arrive any more, and end.

        Args:
            why: why this rank alone receives nothing; "" if the meeting place is gone, with rank 0,
                torchrun or their machine. That is printed once on each machine, since the first
                rank's machine may be gone, too.
        """
        if self._over.is_set():
            return
        is_first_here = self.rank.rank == 1 or (self.rank.rank and self.rank.local_rank == 0)
        if why or is_first_here:
            host = "torchrun" if self.rank.is_hosted else "worker 0"
            gone = (
                f"{host} ended, and {self.rank.place}, where all workers met, with it; restarted "
                "with PACELINE_RESUME=auto the run continues from its newest checkpoint"
            )
            say(f"error: worker {self.rank.rank}: {why}" if why else f"error: {gone}")
        self._code = self._code or 1
        self._over.set()
        if self._is_at_work():
            self._exit(1)

    def _lost(self, seat: int) -> None:
        """Report that the next rank has died; called in the watching thread."""
        if self._over.is_set():
            return
        if seat:
            self.channel.say(Lost(seat))
            return
        text = (
            "error: worker 0 ended: its process is gone, and the controller of the run with it; "
            "torchrun --max-restarts 3 restarts all workers from the newest checkpoint"
        )
        try:
            post = self.place.client()
        except LinkError:  # gone with the machine
            self._unreachable()
            return
        with suppress(RuntimeError):
            for rank in range(1, self.rank.size):
                printed = text if rank == self.rank.rank else ""
                post.queue_push(f"down/{rank}", DOWN.encode([RunOver(1, printed)]))

    # -- the end --------------------------------------------------------------------------------

    def _report_failure(self, error: BaseException) -> bool:
        """Report the script's failure; returns whether its reason is, or will be, printed."""
        if not hasattr(self, "channel"):  # no rank is connected yet
            say(f"error: {error}")
            return True
        self._is_leaving = self._has_failed = True
        if self._spec is not None and self._exchange is not None:
            self._has_reported = True
            code = process.tell_end(error, self.channel, self._spec, self._exchange)
            self._has_failed = code != 0
            return True
        if isinstance(error, PacelineError):
            whose = Whose.USER if isinstance(error, ConfigError) else Whose.WORKER
            self.channel.send(Failed(str(error), whose))
            return True
        self.channel.send(Failed(f"worker {self.rank.rank} failed before prepare(): {error!r}"))
        return False

    def _leave(self) -> None:
        """Leave the run at exit; also called in processes that the script forked."""
        if os.getpid() != self._pid:
            return
        self._is_leaving = True
        if not (self._has_failed or self._has_reported) and self._exchange is not None:
            self._finish(self._exchange)
        self._await_over(int(self._has_failed))
        self._await_threads()
        exits_here = self._has_failed or self._has_reported or self._code
        if exits_here or self._group is None or not self._group.leave():
            self._exit(self._code or int(self._has_failed))

    def _finish(self, exchange: StoreExchange) -> None:
        try:
            worker.finish()
        except BaseException as error:  # the user's code may raise anything, and the others wait
            self._report_failure(error)
            return
        if exchange.grant() is not None and not exchange.is_stopped:
            text = (
                f"worker {self.rank.rank}: the script ended in the middle of an epoch; leave the "
                "loop over the loader in all workers alike, or call pace.stop()"
            )
            self._has_failed = True
            self.channel.send(Failed(text))
            return
        self.channel.send(Done())

    def _await_over(self, code: int) -> None:
        """Wait until all ranks have ended; after a failure at most 60 s."""
        self._has_ended.set()
        self._over.wait(_OVER_S if code else None)

    def _await_threads(self) -> None:
        """Join the threads: Python aborts if one returns from torch's code during shutdown."""
        self.channel.join(_JOIN_S)
        if self._exchange is not None and self._exchange.hooks.spread is not None:
            self._exchange.hooks.spread.close()
        if self.controller is not None:
            self.controller.join(_JOIN_S)

    def _exit(self, code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if code == ANEW:
            begin_anew(self.rank.anew + 1)
        os._exit(code)


def context_of(spec: MemberSpec, rank: RankOfWorld) -> Context:
    """Return the controller's context with this rank's own values."""
    context = Context.read(spec.context)
    return replace(context, is_own_process=True, local_rank=rank.local_rank)


def begin_anew(times: int) -> NoReturn:
    """Restart this process in place; the process that started it does not notice.

    Args:
        times: restarts so far, this one included.
    """
    for number in range(3, max(map(int, os.listdir("/dev/fd"))) + 1):
        with suppress(OSError):  # not an open descriptor
            os.set_inheritable(number, False)
    os.environ |= environment_anew(times)
    os.environ.pop("PACELINE_STARTED_BY", None)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _averaging(
    group: RankGroup, copy: ModelCopy, barrier: Barrier, hooks: ScriptHooks, route: Route
) -> Averaging:
    """Return how updates are made: each rank updates the whole model, or its part."""
    if hooks.spread is not None:
        return SplitAveraging(hooks.spread, copy, barrier, hooks)
    return RankAveraging(group, copy, barrier, hooks, route)


def _price(
    group: RankGroup, compressed: CompressedGradient, *, is_in_buckets: bool
) -> CompressionPrice:
    """Measure the price of compressing the gradients, in the buckets that are used here."""
    if is_in_buckets:
        compressed.cut(
            [bucket.span for bucket in make_buckets(compressed.section, compressed.device)]
        )
    return price_between(group, compressed, line_bytes=LINE_BYTES)


def say(text: str) -> None:
    """Print to the user; a closed stream is ignored."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def random_digests() -> tuple[str, ...]:
    """Return digests of the random states of Python, NumPy and torch, and torch's seed."""
    states: list[object] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    states.append("" if numpy is None else [*map(str, numpy.random.get_state())])
    states.append(torch.get_rng_state().tolist())
    digests = [hashlib.sha256(repr(state).encode()).hexdigest()[:16] for state in states]
    return (*digests, str(torch.initial_seed()))


_NEAR = 1 << 32
"""Seeds at most this far apart were set by the script, as a seed plus the rank's number."""


def unseeded(digests: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the random generators that the script has not seeded before ``connect``.

    Unseeded generators differ between processes. Those that the script has seeded stay as they are.
    """
    differing = []
    for number, name in enumerate(GENERATORS):
        if len({member_digests[number] for member_digests in digests}) > 1:
            differing.append(name)
    seeds = [int(member_digests[-1]) for member_digests in digests]
    if max(seeds) - min(seeds) < _NEAR and "torch" in differing:
        differing.remove("torch")
    return tuple(differing)
