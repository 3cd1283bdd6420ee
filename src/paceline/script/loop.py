"""A script's loop over its prepared loader, and its current work.

    next_lease -> the loop's batch -> differentiated -> [ weigh, skip ] -> close: pushed, if due
        |                                  |
        left early: leave,                 now another worker's: superseded
        finish_leaving

This module must not know who iterates, what an optimizer's step does, nor how an exchange carries
a push. Above 300 lines, since what a loop does with a batch, and what leaving it does with the
rest, are read together.
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
    """A further loader, which follows the passes of the loop."""

    def begin_pass(self, epoch: int, batches: Batches) -> None:
        """Start a pass of these batches."""

    def took(self, held: Held) -> None:
        """Note the loop's new mini-batch."""

    def reserve(self, leases: Sequence[Lease]) -> None:
        """Prepare for the leases that come next."""

    def end_pass(self) -> None:
        """End a pass, which is over or was left."""


class TrainingLoop:
    """One member's loop over its prepared loader, and its current work.

    Args:
        leased: makes a lease's batch, from the user's loader.
        is_difference: whether the user's optimizer steps here, and a push is a difference.

    Attributes:
        is_iterating: whether the script is inside the loop.
        iteration: the newest iteration of the loader's own loop.
        num_nested: iterations inside its own loop that are not over.
        has_nested: whether the loader was iterated inside its own loop since the last batch.
        is_failing: whether an exception of the script's own has left a step block.
        was_called_off: whether the newest step was already another worker's when it was made.
        local_loss: of the last step of an optimizer that steps here.
        push_steps: pushes the steps of several optimizers when their block ends.
        entered, ended: called when a loop has begun, and when it has no more batches.
        accumulation: collects the steps of one update; None: each step is an update.
        beside: further loaders, each with a batch for each mini-batch.
        modes: of the model's layers, where a step may be left between two; None: none is.
        is_released: whether its trial is over: its loaders are the user's own again.
        version_stepped: after this worker's last push that left nothing accumulated.
        batch, given_back: with one worker, the last batch, and those that it has skipped.
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
        self.version_stepped = 0
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
        """The thread that waits for a mini-batch now, and the one inside a step block."""
        self._has_accumulated = False
        """Whether ``.grad`` was set when the last block ended; a gradient may be zero."""

    @property
    def is_alone(self) -> bool:
        """Whether this is plain PyTorch: one worker in its own process."""
        return self._member is None

    # -- mini-batches ---------------------------------------------------------------------------

    def batches_alone(self) -> Iterator[Any]:
        """The user's loader, on this worker's device; skipped batches are repeated."""
        loader = self.leased.loader
        if isinstance(loader.sampler, Numbers):  # a DataLoader takes 70 us for each
            plain: Iterator[Any] = iter(loader.sampler)
        elif isinstance(loader.dataset, OfRange):  # and draws a seed for its workers
            plain = iter(loader.dataset.numbers)
        else:
            plain = plain_batches(loader, self.device, self._speed)
        return _with_given_back(plain, self.given_back)

    def next_lease(self) -> Lease | None:
        """The next mini-batch of this worker; None: the epoch is over.

        Inside a step block it is a further mini-batch of that block.

        Raises:
            ConfigError: another thread is in the block; or see ``Exchange``.
        """
        thread = threading.get_ident()
        if self._stepping not in (0, thread):
            self._error = _of_another_thread()  # the thread in the block raises it, too
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
                for loader in self.beside:
                    assert holding.current is not None
                    loader.took(holding.current)
                return lease
            is_short = is_inside or holding.has_accumulated or self._is_difference
            if is_short and (more := member.extend()) is not None:
                self._refuse_by_fragments()
                holding.add(more)
                continue
            if is_inside:  # its block has yet to step
                self._has_left = True
                return None
            self._push_what_is_done()
        holding.follow(None)
        return None

    def open(self, version: int) -> None:
        """Begin a pass at this version."""
        self.entered()
        self.is_iterating, self.version_stepped = True, version
        self.holding.open()

    def _refuse_by_fragments(self) -> None:
        """Raise ConfigError where an update takes more mini-batches than configured."""
        if self._member is not None and self._member.is_by_fragments:
            raise ConfigError(
                "several mini-batches are accumulated for a step, but --fragments makes workers "
                "count their updates by mini-batches and would miss the last of an epoch, which "
                "has all fragments; use --accumulate N instead, or leave out --fragments and "
                "--overlap"
            )

    @property
    def lookahead(self) -> int:
        """Leases that are fetched ahead."""
        num_each = 1 if self.accumulation is None else self.accumulation.num_batches
        return -(-self.leased.lookahead // num_each)

    def _reserve(self, leases: Sequence[Lease]) -> None:
        accumulation = self.accumulation
        if accumulation is not None:
            leases = [part for lease in leases for part in accumulation.cut(lease)]
        self.leased.reserve(leases)
        for loader in self.beside:
            loader.reserve(leases)

    def batches_of(self, lease: Lease) -> Iterator[Any]:
        """The batches of the current lease: one, or several with accumulation."""
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
                    f"a step block took a second batch, but with accumulate "
                    f"{accumulation.num_batches} each has one: leave out next() or the flag"
                )
            self._refuse_side_by_side()
            if parts and not self.leased.has(parts[0]):
                parts = []  # the stream ends here
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
        """The batch of this lease; reports how long the worker waited for it."""
        start_s = time.perf_counter()
        batch = leased.fetch(lease)
        if self._member is not None:
            self._member.waited_for_input(time.perf_counter() - start_s)
        return batch

    def _refuse_side_by_side(self) -> None:
        """Raise ConfigError where the loader is iterated twice at once: zip(loader, loader)."""
        if self.num_nested:
            raise ConfigError(
                "the prepared loader is iterated a second time beside its own loop, where it would "
                "give every worker all samples; give the second iteration its own DataLoader"
            )

    # -- steps ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin a step block.

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
        """End a step block, also one that is left early."""
        self._stepping = 0
        self.exchange.is_in_step = False

    def differentiated(self) -> None:
        """Note the start of a backward pass, and whether accumulated gradients are gone by now."""
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
                "step.skip() gives back a whole mini-batch, and with accumulate "
                f"{self.accumulation.num_batches} this is a part of one: use continue instead"
            )
        if self._member is not None and self._member.is_by_fragments:
            raise ConfigError(
                "step.skip() gives back a mini-batch, and under --fragments all workers count "
                "mini-batches to push the same fragment: use continue instead, or leave out "
                "--fragments and --overlap"
            )
        if any(isinstance(loader, KeptPart) for loader in self.beside):
            raise ConfigError(
                "step.skip() gives a mini-batch to another worker, which prepare(sticky=True) "
                "forbids; skip the step with continue"
            )
        self._forget()
        self._gradients.scaling.reset()
        if self._member is None:
            self.given_back.append(self.batch)
            return
        self._member.give_back()
        self._gradients.scaling.follow()

    def _forget(self) -> None:
        """Drop the current work."""
        self.holding.forget()
        self._gradients.drop()

    # -- pushes, and the loop's end -------------------------------------------------------------

    def close(self) -> None:
        """End the work on the current batch: its block has ended, or the next one is requested."""
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
        """Push, wait for the release, pull; False: the work was called off first."""
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
        if work.weight or not work.kept:
            self.version_stepped = self._member.version
        return True

    def _follow(self, grant: Grant | None) -> None:
        if not self.holding.follow(grant):
            self._gradients.drop()

    def superseded(self) -> None:
        """Drop work that is now another worker's, and wait for the next."""
        self.was_called_off = True
        self._forget()
        self._gradients.scaling.reset()
        self.exchange.superseded()
        self._gradients.scaling.follow()

    def leave(self) -> None:
        """Leave the loop before the epoch's end."""
        self._has_left = True
        self.drop_rest()
        if self.is_failing:
            return  # the worker ends, and waits for nobody
        try:
            self.finish_leaving()
        except Stopped:
            pass
        except (ConfigError, WorkerError) as error:
            self._error = error  # a generator cannot raise it while it is closed

    def drop_rest(self) -> None:
        """Drop what was set aside for an update whose last batch did not come."""
        if self.accumulation is not None and not self.is_failing:
            if self.accumulation.is_pending and self._member is not None:
                self.holding.zeroed()
            self.accumulation.drop()

    def end_iteration(self) -> None:
        """End an iterator that was not exhausted: the script has no more epochs."""
        if self.is_alone:
            return
        iteration = None if self.iteration is None else self.iteration()
        if self.is_iterating and iteration is not None:
            iteration.close()
        self.finish_leaving()

    def abandon(self) -> None:
        """Drop all current work: an exception has left the loop and its trial."""
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
        """Raise the error met when the loop was left, where it could not be raised."""
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
        member.out_of_loop()


def _of_another_thread() -> ConfigError:
    return ConfigError(
        "the prepared loader is iterated by another thread than the one that makes the steps (a "
        "prefetcher, a queue), so mini-batches are taken during steps on earlier ones; loop over "
        "the loader itself, and let it fetch ahead: DataLoader(..., num_workers=1)"
    )


def _nothing() -> None:
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch of a loader that is iterated beside the run."""
    return batch if device.type == "cpu" else move(batch, device, is_pinned=False)


def _with_given_back(batches: Iterator[Any], given_back: list[Any]) -> Iterator[Any]:
    """The batches; one that is given back is repeated after the next one, or at the end."""
    for batch in batches:
        waiting = given_back[:]
        given_back.clear()
        yield batch
        yield from waiting
    while given_back:
        yield given_back.pop(0)
