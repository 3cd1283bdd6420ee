"""A script's loop over its prepared loader, and the work that it has in hand meanwhile.

    next_lease -> the loop's batch -> differentiated -> [ weigh, skip ] -> close: pushed, if due
        |                                  |
        left early: leave,                 another's by now: superseded
        finish_leaving

This module must not know who iterates, what an optimizer's step does, nor how an exchange carries
a push. Above 300 lines, since what a loop does with a batch, and a left one with the rest, is one
story.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..core.batches import Batches
from ..data.feed import move, plain_batches
from ..data.loader import NOTHING, LeasedLoader
from ..data.numbers import Numbers, OfRange
from ..errors import ConfigError, WorkerError
from ..events import Grant, Lease
from ..exchange.base import Exchange, Stopped, Superseded, Work
from ..replica.layers import Modes
from ..speed import Speed
from .accumulation import Accumulation, samples_in
from .gradients import LocalGradients
from .holding import Held, Holding, KeptPart


class Beside(Protocol):
    """What goes along with the passes of the loop: a further loader."""

    def begin_pass(self, epoch: int, batches: Batches) -> None:
        """A pass begins, of these batches."""

    def took(self, held: Held) -> None:
        """The loop has this mini-batch now."""

    def reserve(self, leases: Sequence[Lease]) -> None:
        """These come next."""

    def end_pass(self) -> None:
        """The pass is over, or was left."""


class TrainingLoop:
    """One member's loop over its prepared loader, and the work that it has in hand.

    Args:
        leased: makes a lease's batch; the user's loader is in it.
        is_difference: the user's optimizer steps here, and a push is a difference.

    Attributes:
        is_iterating: whether the script is inside the loop.
        iteration: of the loader's own loop, the newest.
        num_nested: iterations inside its own loop that are not over.
        has_nested: whether the loader was iterated inside its own loop since the last batch.
        is_failing: whether an exception of the script's own has left a step block.
        was_called_off: whether the newest step was another's by the time that it was to be made.
        local_loss: of the last step of an optimizer that steps here.
        push_steps: of several optimizers, what a block pushes when it ends.
        entered, ended: do what is to be done when a loop has begun, and when it has no more.
        accumulation: of an update that several steps of the loop make; None: each makes one.
        beside: further loaders, each with a batch for each mini-batch.
        modes: of the model's layers, where a step may be left between them; None: none is.
        is_released: whether its trial is over: its loaders are the user's own again.
        batch, given_back: of the only worker, the last one, and those that it left undone.
    """

    def __init__(
        self,
        exchange: Exchange,
        leased: LeasedLoader,
        gradients: LocalGradients,
        speed: Speed,
        *,
        is_difference: bool,
    ) -> None:
        self.exchange = exchange
        self._member = exchange.shared
        self.leased = leased
        self._gradients = gradients
        self.device = gradients.device
        self._speed = speed
        self._is_difference = is_difference
        self.holding = Holding(is_local=is_difference)
        self.is_iterating = self.has_nested = self.is_failing = self.was_called_off = False
        self.iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self.num_nested = 0
        self.local_loss = math.nan
        self.push_steps: Callable[[], None] = _nothing
        self.entered: Callable[[], None] = _nothing
        self.ended: Callable[[int], None] = lambda epoch: None
        self.accumulation: Accumulation | None = None
        self.beside: list[Beside] = []
        self.modes: Modes | None = None
        self.batch: Any = None
        self.given_back: list[Any] = []
        self._has_left = self.is_released = False
        self._error: ConfigError | WorkerError | None = None
        self._asking = self._stepping = 0
        """The thread that waits for a mini-batch now, and the one that is in a step block."""
        self._has_accumulated = False
        """Whether something lay in ``.grad`` when the last block ended; a gradient may be zero."""

    @property
    def is_alone(self) -> bool:
        """Whether this is plain PyTorch: one worker in its own process."""
        return self._member is None

    # -- mini-batches ---------------------------------------------------------------------------

    def batches_alone(self) -> Iterator[Any]:
        """The user's loader, on this worker's device; what was given back comes once more."""
        loader = self.leased.loader
        if isinstance(loader.sampler, Numbers):  # a DataLoader takes 70 us for each
            plain: Iterator[Any] = iter(loader.sampler)
        elif isinstance(loader.dataset, OfRange):  # and draws a seed for its workers
            plain = iter(loader.dataset.numbers)
        else:
            plain = plain_batches(loader, self.device, self._speed)
        return _with_those_given_back(plain, self.given_back)

    def next_lease(self) -> Lease | None:
        """The next mini-batch of this worker; None: the epoch is over.

        Asked for inside a step block, it is one more of that block.

        Raises:
            ConfigError: by another thread than is in the block, or see ``Exchange``.
        """
        thread = threading.get_ident()
        if self._stepping not in (0, thread):
            self._error = _of_another_thread()  # whoever is in the block raises it, too
            raise self._error
        self._asking = thread
        try:
            return self._take_next()
        finally:
            self._asking = 0

    def _take_next(self) -> Lease | None:
        member, holding = self._member, self.holding
        assert member is not None
        self._refuse_side_by_side()
        self.is_failing = False
        is_inside = member.is_in_step
        if not is_inside:
            self.close()
        while (grant := member.grant()) is not None:
            self._follow(grant)
            if depth := self.lookahead:
                self._reserve(member.upcoming(depth))
            if (lease := holding.take()) is not None:
                member.has_pushed = False
                for one in self.beside:
                    assert holding.current is not None
                    one.took(holding.current)
                return lease
            is_short = is_inside or holding.has_accumulated or self._is_difference
            if is_short and (more := member.extend()) is not None:
                self._refuse_by_fragments()
                holding.add(more)
                continue
            if is_inside:  # its block is still to step
                self._has_left = True
                return None
            self._push_what_is_done()
        holding.follow(None)
        return None

    def _refuse_by_fragments(self) -> None:
        """Raise ConfigError where an update takes more mini-batches than it was said to."""
        if self._member is not None and self._member.is_by_fragments:
            raise ConfigError(
                "several mini-batches are accumulated for a step, and under --fragments all "
                "workers count their updates by mini-batches: the last of an epoch, which is of "
                "all fragments, would be missed; leave it to --accumulate N, or leave out "
                "--fragments and --overlap"
            )

    @property
    def lookahead(self) -> int:
        """Leases that are fetched ahead."""
        num_each = 1 if self.accumulation is None else self.accumulation.num_batches
        return -(-self.leased.lookahead // num_each)

    def _reserve(self, leases: Sequence[Lease]) -> None:
        accumulation = self.accumulation
        if accumulation is not None:
            leases = [part for one in leases for part in accumulation.cut(one)]
        self.leased.reserve(leases)
        for one in self.beside:
            one.reserve(leases)

    def batches_of(self, lease: Lease) -> Iterator[Any]:
        """What comes to the loop of the lease that it has now: all at once, or batch by batch."""
        accumulation, held = self.accumulation, self.holding.current
        assert held is not None
        if accumulation is None:
            if (batch := self.fetch_from(self.leased, lease)) is not NOTHING:
                held.num_samples = self.leased.num_samples_of(lease)
                if self.leased.gives_batches:
                    held.weight = max(1, samples_in(batch))
                yield batch
            return
        parts, num_samples = accumulation.cut(lease), 0
        while parts and not held.is_called_off:
            part, *parts = parts
            if self.exchange.is_in_step:
                raise ConfigError(
                    f"a step block took a second batch, and with accumulate "
                    f"{accumulation.num_batches} each has one: leave next() or the flag out"
                )
            self._refuse_side_by_side()
            if parts and not self.leased.has(parts[0]):
                parts = []  # a stream ends there
            if (batch := self.fetch_from(self.leased, part)) is NOTHING:
                return
            num_samples += (weight := self.leased.num_samples_of(part))
            held.num_samples = num_samples
            if self.leased.gives_batches:
                weight = max(1, samples_in(batch))
            accumulation.begin(weight, is_last=not parts)
            yield batch
            if not held.is_called_off:
                accumulation.end()

    def fetch_from(self, leased: LeasedLoader, lease: Lease) -> Any:
        """The batch of this lease; how long it took to be there is told."""
        start_s = time.perf_counter()
        batch = leased.fetch(lease)
        if self._member is not None:
            self._member.waited_for_input(time.perf_counter() - start_s)
        return batch

    def _refuse_side_by_side(self) -> None:
        """Raise ConfigError where the loader is iterated twice at once: zip(loader, loader)."""
        if self.num_nested:
            raise ConfigError(
                "the prepared loader is iterated a second time beside its own loop, and there it "
                "gives every worker all samples; give the second stream a DataLoader of its own"
            )

    # -- what is done with them -----------------------------------------------------------------

    def enter(self) -> None:
        """A step block begins.

        Raises:
            ConfigError: another thread takes a mini-batch meanwhile.
        """
        thread = threading.get_ident()
        if self._asking not in (0, thread):
            raise _of_another_thread()
        self._stepping = thread
        exchange = self.exchange
        exchange.is_in_step, exchange.has_pushed = True, False
        if self.modes is not None:
            self.modes.note()

    def exit(self) -> None:
        """It ends, or is left."""
        self._stepping = 0
        self.exchange.is_in_step = False

    def differentiated(self) -> None:
        """A backward pass begins; what was accumulated may be gone: there is nothing now."""
        holding, was_there = self.holding, self._has_accumulated
        if holding.has_accumulated and was_there and not self._gradients.are_there():
            holding.zeroed()
        holding.differentiated()
        if self.accumulation is not None:
            self.accumulation.differentiated()

    def weigh(self, weight: float) -> None:
        """See ``Step.weight``."""
        if not (weight >= 0.0 and math.isfinite(weight)):
            raise ConfigError(f"step.weight must be >= 0 and finite, got {weight}")
        if self.accumulation is not None:
            self.accumulation.weigh(weight)
            return
        current = self.holding.current
        if current is not None:
            if current.is_used and not self._is_difference:
                raise ConfigError("step.weight was set after optimizer.step(); set it before")
            current.weight = float(weight)

    def skip(self) -> None:
        """See ``Step.skip``."""
        if self.accumulation is not None:
            raise ConfigError(
                "step.skip() gives a mini-batch back, and with accumulate "
                f"{self.accumulation.num_batches} it is a part of one: leave it by continue"
            )
        if self._member is not None and self._member.is_by_fragments:
            raise ConfigError(
                "step.skip() gives a mini-batch back, and under --fragments all workers push the "
                "same fragment, which they count by their mini-batches: leave it by continue, or "
                "leave out --fragments and --overlap"
            )
        if any(isinstance(one, KeptPart) for one in self.beside):
            raise ConfigError(
                "step.skip() gives a mini-batch to another worker, and prepare(sticky=True) says "
                "that none may have it; leave it without a step: continue"
            )
        self._forget()
        if self._member is None:
            self.given_back.append(self.batch)
            return
        self._member.give_back()
        self._gradients.scaling.follow()

    def _forget(self) -> None:
        """The work does not count."""
        self.holding.forget()
        self._gradients.drop()

    # -- pushes, and the loop's end -------------------------------------------------------------

    def close(self) -> None:
        """A step block has ended, or the next batch is asked for: the work on this one is done."""
        if self._member is None or not (self.accumulation is None or self.accumulation.is_last):
            return
        try:
            self.push_steps()
        except Superseded:
            self.superseded()
        is_due = self.holding.close()
        if self.holding.has_accumulated:
            self._has_accumulated = self._gradients.are_there()
        if is_due:
            self._push_what_is_done()
        elif self.holding.is_owed and self._member.grant() is not None:  # else the run has ended
            self.push(Work())

    def _push_what_is_done(self) -> None:
        work = self.holding.work()
        work.loss, self.local_loss = self.local_loss, math.nan
        self.push(work)

    def push(self, work: Work) -> bool:
        """Push, wait for the release, pull; False: the work was called off before."""
        assert self._member is not None
        try:
            self._member.push(work)
        except Superseded:
            if self._member.is_in_step:
                raise
            self.superseded()
            return False
        self._member.has_pushed = True
        self.holding.pushed(work)
        self._follow(self._member.grant())
        return True

    def _follow(self, grant: Grant | None) -> None:
        if not self.holding.follow(grant):
            self._gradients.drop()

    def superseded(self) -> None:
        """The work in flight is another's: forget it and wait for what comes next."""
        self.was_called_off = True
        self._forget()
        self._gradients.scaling.reset()
        self.exchange.superseded()
        self._gradients.scaling.follow()

    def leave(self) -> None:
        """The loop was left before the epoch's end."""
        self._has_left = True
        self.drop_rest()
        if self.is_failing:
            return  # the worker ends, and nobody is waited for
        try:
            self.finish_leaving()
        except Stopped:
            pass
        except (ConfigError, WorkerError) as error:
            self._error = error  # a generator that is closed cannot raise it

    def drop_rest(self) -> None:
        """The loop was left before its update was full: what was set aside for it is dropped."""
        if self.accumulation is not None and not self.is_failing:
            if self.accumulation.is_pending and self._member is not None:
                self.holding.zeroed()
            self.accumulation.drop()

    def end_iteration(self) -> None:
        """The script has no more epochs: an iterator that it did not come to the end of ends."""
        if self.is_alone:
            return
        iteration = None if self.iteration is None else self.iteration()
        if self.is_iterating and iteration is not None:
            iteration.close()
        self.finish_leaving()

    def abandon(self) -> None:
        """An exception has left it, and the trial with it: what is at work counts for nothing."""
        member, self.is_failing = self._member, True
        iteration = None if self.iteration is None else self.iteration()
        if self.is_iterating and iteration is not None:
            iteration.close()
        if member is None:
            return
        self._has_left, self._error = False, None
        self._forget()
        if member.grant() is not None:
            member.leave_epoch((), is_look=False)
        self.holding.follow(None)

    def check_leaving(self) -> None:
        """Raise what was met when the loop was left, where it could not be raised."""
        if self._error is not None:
            raise self._error

    def finish_leaving(self) -> None:
        """End the epoch for all workers, if this one has left it."""
        member, holding = self._member, self.holding
        self.check_leaving()
        if member is None or not self._has_left:
            return
        self._has_left = False
        self.close()
        if member.grant() is not None and holding.work().weight:
            self._push_what_is_done()
        if member.grant() is not None:
            rest = holding.work()
            member.leave_epoch(rest.kept, is_look=not holding.has_worked)
            holding.pushed(rest)
        holding.follow(None)


def _of_another_thread() -> ConfigError:
    return ConfigError(
        "the prepared loader is iterated by another thread than makes the steps (a prefetcher, a "
        "queue), so mini-batches are taken while steps on those before are under way; loop over "
        "the loader itself, and leave fetching ahead to it: DataLoader(..., num_workers=1)"
    )


def _nothing() -> None:
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch of a loader that is iterated beside the run."""
    return batch if device.type == "cpu" else move(batch, device, is_pinned=False)


def _with_those_given_back(batches: Iterator[Any], given_back: list[Any]) -> Iterator[Any]:
    """Each once more after the batch that follows it, or at the end."""
    for batch in batches:
        waiting = given_back[:]
        given_back.clear()
        yield batch
        yield from waiting
    while given_back:
        yield given_back.pop(0)
