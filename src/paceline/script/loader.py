"""The batches of a script's loop: what ``prepare`` returns for its loader.

    several workers   exchange.grant() -> leases -> leased.fetch(lease) -> the loop's batch
    one worker        the user's own loader, batch for batch
    up to a version   pass after pass, over a loader or over numbers instead of one

Inside its own loop, and where no gradients are made, it is the user's own loader, too: an
evaluation over it, ``next(iter(loader))`` or ``list(loader)`` take nothing from the run there.
This module must not know what a step does with a batch, nor how an exchange carries a push. Above
300 lines, since a pass and the loop that counts passes are read together.
"""

import weakref
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ..context import Context
from ..core.batches import Batches, Ends
from ..data.loader import NOTHING, refuse_state
from ..data.numbers import Numbers
from ..data.order import length_of
from ..errors import ConfigError
from ..events import Lease
from ..exchange.base import Exchange, Shape
from ..exchange.through_store import StoreExchange
from ..fields import count, integer
from ..passes import Passes, is_far
from ..replica.seeding import kept_random_state, seed_all, step_seed
from .accumulation import samples_in
from .loop import TrainingLoop, to_device
from .schedules import Schedules


class OfLoader:
    """Stands for a loader of the user's: other attributes are read from it and set on it.

    Attributes:
        plain: the user's loader.
        OWN: names without an underscore that are kept here.
    """

    OWN: ClassVar[frozenset[str]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.OWN:
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in self.OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.plain, name, value)


class PreparedLoader(OfLoader):
    """Iterates over the mini-batches that this worker is granted, epoch by epoch.

    ``len`` is the number of batches in an epoch, which without ``accumulate`` is that of updates.

    Args:
        num_batches: in an epoch of the user's own loader, as it is now.
    """

    OWN = frozenset(
        ("passes", "plain", "most_batches", "asked_epochs", "has_opened", "last_uneven")
    )

    def __init__(
        self,
        loop: TrainingLoop,
        schedules: Schedules,
        shape: Shape,
        num_batches: int,
        passes: Passes,
    ) -> None:
        self._loop = loop
        self._schedules = schedules
        self._shape = shape
        self._num_batches = num_batches
        self.passes = passes
        self.plain = loop.leased.loader
        """The loader that was prepared, to look at a batch outside the loop."""
        self.most_batches: int | None = None
        """Of a pass, where the script counts updates."""
        self.asked_epochs: int | None = None
        """The number of epochs that the command line asks for."""
        self._knows_place = False
        """Whether the script knew where it resumes before this pass began."""
        self.has_opened = False
        """Whether this worker has made a pass in its life."""
        self.last_uneven = -1
        """The last pass that was left early, or had an unusual number of batches."""

        self._cut_as = _cuts(self.plain)
        vars(self)["batch_size"] = shape.batch_size // self._num_each * loop.leased.samples_each

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in ("state_dict", "load_state_dict") and not self._loop.is_alone:
            return partial(refuse_state, name)
        return value

    @property
    def is_released(self) -> bool:
        """Whether its trial is over."""
        return self._loop.is_released

    @property
    def is_stream(self) -> bool:
        """Whether the length of a pass is unknown."""
        return isinstance(self.plain.dataset, IterableDataset)

    @property
    def has_numbers(self) -> bool:
        """Whether the script has no loader, and these are the numbers of its draws."""
        return isinstance(self.plain.sampler, Numbers)

    @property
    def has_own_batches(self) -> bool:
        """Whether the user's batch sampler decides where batches end."""
        return self._loop.leased.order.has_own_batches

    @property
    def usual_batches(self) -> Batches:
        """The batches of a whole pass, where the user's batch sampler does not make them."""
        return self._shape.batches()

    def __len__(self) -> int:
        is_alone = self._loop.is_alone
        if self.is_stream or (is_alone and not self.has_numbers):
            return len(self.plain)  # with one worker, it may change from pass to pass
        if self.has_own_batches or is_alone:
            return self._num_batches
        if self._loop.accumulation is not None:
            return -(-self._shape.num_samples * self._num_each // self._shape.batch_size)
        return self.usual_batches.num_batches

    @property
    def _num_each(self) -> int:
        """Batches in an update."""
        accumulation = self._loop.accumulation
        return 1 if accumulation is None else accumulation.num_batches

    @property
    def num_updates(self) -> int:
        """Updates in a whole pass, or local steps of each member."""
        num_batches = self._num_batches if self._loop.is_alone else len(self)
        return -(-num_batches // self._num_each)

    def __iter__(self) -> Iterator[Any]:
        loop, iterations = self._loop, list[weakref.ref[Generator[Any, None, None]]]()
        is_beside = loop.is_released or loop.is_iterating or not torch.is_grad_enabled()
        # Torch draws its workers' seed here, not with the first batch.
        opened = loop.batches_alone() if loop.is_alone and not is_beside else None
        iteration = self._batches(iterations, opened)
        iterations.append(weakref.ref(iteration))
        return iteration

    def _batches(
        self,
        iterations: list[weakref.ref[Generator[Any, None, None]]],
        opened: Iterator[Any] | None,
    ) -> Generator[Any, None, None]:
        loop = self._loop
        if loop.is_released:
            yield from (to_device(batch, loop.device) for batch in self.plain)
            return
        if not loop.is_iterating:
            loop.iteration = iterations[0]
        if loop.is_iterating or not torch.is_grad_enabled():
            yield from self._nested(opened)
        elif loop.is_alone:
            yield from self._alone(loop.batches_alone() if opened is None else opened)
        else:
            yield from self._epoch()

    def _nested(self, opened: Iterator[Any] | None = None) -> Iterator[Any]:
        """The user's own loader; ``opened``: an iterator over it, if there is one already."""
        loop = self._loop
        loop.num_nested += 1
        try:
            for batch in self.plain if opened is None else opened:
                loop.has_nested = True
                yield to_device(batch, loop.device)
        finally:
            loop.num_nested -= 1

    def _look_again(self) -> Iterator[Any]:
        """Batches to look at, of an earlier pass; every random state is left as it was."""
        with kept_random_state():
            yield from self._nested()

    def _alone(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The user's loader, batch by batch."""
        loop = self._loop
        self.passes.take()
        loop.is_iterating = True
        most = None if self.most_batches is None else self.most_batches * self._num_each
        try:
            for batch in self._marked(islice(batches, most), most):
                if loop.exchange.is_stopped:
                    loop.exchange.is_cut_short = True
                    return
                loop.batch = batch
                yield batch
        finally:
            loop.drop_rest()
            loop.is_iterating = False
            loop.given_back.clear()

    def _marked(self, batches: Iterator[Any], most: int | None) -> Iterator[Any]:
        """The same batches; ``accumulation`` is told which is the last of its update.

        One batch is fetched ahead where the number of batches is unknown.

        Raises:
            ConfigError: the loader gave another number of batches than its ``__len__`` says, and
                so an update is left without its last batch.
        """
        accumulation = self._loop.accumulation
        if accumulation is None:
            yield from batches
            return
        is_drawn = self.is_stream or self.has_numbers
        said = None if is_drawn else length_of(self.plain.batch_sampler)
        num_batches = said if said is None or most is None else min(said, most)
        sampler: Any = self.plain.batch_sampler
        is_torchs = not is_drawn and type(sampler) is BatchSampler
        total, number = length_of(sampler.sampler) if is_torchs else None, 0
        for number, (batch, is_end) in enumerate(_with_ends(batches, num_batches), 1):
            is_last = is_end or number % accumulation.num_batches == 0
            accumulation.begin(self._num_samples(batch, number, total), is_last=is_last)
            yield batch
            accumulation.end()
        if accumulation.is_pending:
            raise ConfigError(
                f"accumulate {accumulation.num_batches}: the loader's batch sampler says that an "
                f"epoch has {said:,} batches (__len__) and gave {number:,}, so the last batch of "
                "the last update was not known as such; let both say the same"
            )

    def _num_samples(self, batch: Any, number: int, total: int | None) -> int:
        """Samples of batch ``number``, from 1, of ``total`` in a pass; None: counted in it."""
        if total is None:
            return samples_in(batch)
        size: int = self.plain.batch_sampler.batch_size  # type: ignore[union-attr]  # it is torch's own
        rest = total - (number - 1) * size
        return min(size, rest) if rest > 0 else size

    def _cut(self, ends: list[int] | None) -> Ends | None:
        """Where the batches of a pass end, cut to the number that is wanted; None: a whole pass."""
        self._refuse_other_cuts()
        most, num = self.most_batches, len(self._loop.leased.order.indices)
        if ends is not None:
            return ends[:most]
        if self._loop.accumulation is not None and self.plain.drop_last:
            num -= num % (self._shape.batch_size // self._num_each)
        end = num if most is None else min(num, most * self._shape.batch_size)
        return None if end == self._shape.num_samples else end

    def _epoch(self) -> Iterator[Any]:
        loop, schedules, passes = self._loop, self._schedules, self.passes
        leased, exchange = loop.leased, loop.exchange.shared
        assert exchange is not None
        loop.finish_leaving()
        epoch = passes.take()
        if passes.is_behind(epoch):
            if passes.was_look(epoch):
                yield from self._look_again()
            return
        schedules.open()
        ends = self._cut(leased.order.draw(epoch))
        leased.order.check()
        self._ends = ends
        self._begin_pass(epoch, ends)
        if not exchange.open_epoch(epoch, ends):
            return
        schedules.opened()
        version, num_given = exchange.version, 0
        loop.open(version)
        try:
            if exchange.grant() is None and passes.was_look(epoch):  # before the run was resumed
                yield from self._look_again()
            while (lease := self._next_lease()) is not None:
                for batch in loop.batches_of(lease):
                    loop.has_nested = False
                    num_given += 1
                    yield batch
            schedules.check()
            self._look_for_steps(exchange, version, num_given)
            self._refuse_left_out(exchange)
            exchange.out_of_loop()
        except GeneratorExit:
            self._left(epoch)
            raise
        finally:
            self._end_pass()
            if exchange.grant() is None:
                schedules.end()  # so that every worker shows the same rate now
                loop.ended(epoch)

    def _next_lease(self) -> Lease | None:
        """The next mini-batch of this worker; None: the pass is over."""
        if self._loop.holding.has_worked and (error := self._own_count()) is not None:
            raise error
        return self._loop.next_lease()

    def _own_count(self) -> ConfigError | None:
        """The error of training in this pass, where the script alone counts its passes; or None."""
        if self.most_batches is not None or self.has_numbers:
            return None
        return self.passes.own_count(self.asked_epochs, knows=self._knows_place)

    def _refuse_other_cuts(self) -> None:
        if _cuts(self.plain) != self._cut_as:
            raise ConfigError(
                "loader.batch_sampler got another batch_size or drop_last after prepare(): a run "
                "has one batch size; train with larger batches in a run of their own, with "
                "pace.trial('large'):"
            )

    def _look_for_steps(self, exchange: StoreExchange, version: int, num_given: int) -> None:
        """Check a whole pass without a step: each worker has had only its part of the samples.

        Args:
            version: at the start of the pass; num_given: batches that came to the loop.

        Raises:
            ConfigError: no worker has made a step in it.
        """
        is_cut = self.most_batches is not None or self.has_numbers or exchange.is_stopped
        is_whole = exchange.num_workers > 1 and num_given > 0 and not is_cut
        if not is_whole or not self._loop.holding.only_looked:
            return
        if exchange.version == version:
            raise ConfigError(
                "a whole pass over the prepared loader made no step, and each worker had only its "
                "part of the samples; to go through all of them in each worker write: "
                "for batch in loader.plain, or loop under torch.no_grad()"
            )
        if num_given > 1:
            exchange.say(
                f"worker {exchange.seat} went through its part of a pass over the prepared loader "
                "without a step, while others trained in it: no update used these samples; to look "
                "at all samples: for batch in loader.plain"
            )

    def _refuse_left_out(self, exchange: StoreExchange) -> None:
        """Raise ConfigError if others stepped on the last batch, and this worker had none of it."""
        is_together = self._schedules.place.is_lockstep and not self._schedules.place.is_local
        has_rest = is_together and self._loop.holding.has_accumulated
        if not has_rest or exchange.version == self._loop.version_stepped or self.is_stream:
            return
        batches, current = self._shape.batches(self._ends), self._loop.holding.current
        last, own = batches.num_batches - 1, -1
        if current is not None:
            own = batches.batch_at(current.lease.start)
        start, end = batches.bounds(last)
        if own < last and end - start < exchange.num_workers:
            raise ConfigError(
                "the script accumulated gradients over several mini-batches, and stepped on the "
                f"last one of an epoch, which had too few samples for all {exchange.num_workers} "
                f"workers: what worker {exchange.seat} had accumulated would be in no update of "
                "this epoch; use DataLoader(..., drop_last=True) or --accumulate N"
            )

    def _left(self, epoch: int) -> None:
        """Record that the loop was left early."""
        if not self._loop.holding.has_worked:
            self.passes.looked(epoch)
        self.last_uneven = epoch
        self._loop.leave()

    def _end_pass(self) -> None:
        self._loop.is_iterating = False
        self._loop.leased.end_epoch()
        for loader in self._loop.beside:
            loader.end_pass()

    def _begin_pass(self, epoch: int, ends: Ends | None) -> None:
        """Start the pass in the further loaders, too."""
        self._knows_place = self._loop.exchange.has_told_place
        if self._loop.beside:
            batches = self._shape.batches(ends)
            if batches.num_batches != len(self):
                self.last_uneven = epoch
            for loader in self._loop.beside:
                loader.begin_pass(epoch, batches)
        self.has_opened = True


def _cuts(loader: Any) -> tuple[int, bool] | None:
    """``batch_size, drop_last`` of torch's own batch sampler; None: there is another, or none."""
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        return None
    return sampler.batch_size, sampler.drop_last


def _with_ends(batches: Iterator[Any], num_batches: int | None) -> Iterator[tuple[Any, bool]]:
    """Each with whether it is the last; ``num_batches`` None: found by fetching one ahead."""
    if num_batches is not None:
        for number, batch in enumerate(batches, 1):
            yield batch, number == num_batches
        return
    batch = next(batches, NOTHING)
    while batch is not NOTHING:
        following = next(batches, NOTHING)
        yield batch, following is NOTHING
        batch = following


class _Extent(NamedTuple):
    """The batches of a pass, ``first`` to ``stop``; ``number``: the pass's."""

    number: int
    first: int
    stop: int


class UpdateLoop:
    """The loop of a script that counts updates: passes over its loader, or over numbers.

    The length of a pass follows from what the script asked for and from the pass's number, not
    from this worker's position, so a worker that joins later goes as far as the others. Only a
    pass that makes up for missing updates depends on the version before it; a checkpoint holds
    its length.

    Args:
        numbers: of the draws of a script without a loader; None: it has a loader.
        counts_blocks: whether it counts blocks, of a batch each, since each step of several
            optimizers is an update.

    Attributes:
        turn: the update that the newest number contributes to.
    """

    def __init__(
        self,
        loader: PreparedLoader,
        numbers: Numbers | None,
        exchange: Exchange,
        context: Context,
        *,
        counts_blocks: bool = False,
    ) -> None:
        self._loader = loader
        self._numbers = numbers
        self._exchange = exchange
        self._seed = context.seed
        self._num_steps = 1 if context.is_adaptive else context.num_steps  # 1: the fewest
        self._last = _Extent(-1, 0, 0)
        self._counts_blocks = counts_blocks
        self._end = 0
        """Where the numbers, or blocks, of all passes so far end, in batches."""
        self._ended: list[int] = []
        """Where earlier loops of the script ended, in mini-batches."""
        self.has_begun = False
        self._was_left = False
        self.turn = 0

    def remember(self) -> list[int]:
        """The current pass, for a checkpoint."""
        return list(self._last)

    def go_on(self, state: list[int]) -> int:
        """Restore what ``remember`` returned; the last pass that counted updates, -1: none."""
        number, first, stop = state
        self._last = _Extent(integer(number), count(first), count(stop))
        self._end = self._end_of(self._last)
        return self._last.number

    def _end_of(self, extent: _Extent) -> int:
        if self._counts_blocks and self._numbers is None and not self._loader.is_stream:
            return extent.first + min(extent.stop, self._loader.num_updates)
        return extent.stop

    def _is_missing(self, updates: int) -> bool:
        """Whether another pass is needed."""
        if not self._counts_blocks:
            return self._exchange.version < updates
        is_in_pass = self._loader.passes.next == self._last.number  # of a resumed run
        return is_in_pass or self._end < self._num_steps * updates

    def each(self, updates: int) -> Iterator[Any]:
        """The numbers or batches of all passes up to this version.

        Where ``updates`` sets no end, a worker that leaves the loop ends the run for all.

        Raises:
            ConfigError: this worker has left such a loop before, or a whole pass makes no update.
        """
        if self._was_left:
            raise ConfigError(
                "leaving the loop over pace.updates() ended the run, and here is another; give "
                "each the version that it ends with: pace.updates(n)"
            )
        self.has_begun, is_first = True, True
        while self._is_missing(updates) and not self._exchange.is_stopped:
            before, num_drawn = self._exchange.version, 0
            self._last = self._next(updates)
            self._end = self._end_of(self._last)
            for item in self._pass(self._last):
                num_drawn += 1
                try:
                    yield item
                except GeneratorExit:
                    self._leave(updates)
                    raise
            if self._exchange.is_cut_short:
                return
            if self._exchange.version == before and (num_drawn or not is_first):
                raise ConfigError(
                    f"pace.updates({updates}): a whole pass made no update: each mini-batch "
                    "needs an optimizer.step() in pace.step()"
                )
            is_first = False
        self._end = max(self._end, self._num_steps * updates)
        if not is_far(updates):
            self._ended.append(self._num_steps * updates)

    def _leave(self, updates: int) -> None:
        """End the run, before the others are told that the pass is over."""
        if is_far(updates):
            self._was_left = True
            self._exchange.ask_to_stop()

    def _next(self, updates: int) -> _Extent:
        """The batches of the next pass."""
        loader, until = self._loader, self._num_steps * updates
        missing = until - self._num_steps * self._exchange.version
        number = loader.passes.next
        if number == self._last.number:  # the run is resumed in the middle of it
            return self._last
        if self._numbers is not None:
            first = self._end
            return _Extent(number, first, until if until > first else first + missing)
        if self._counts_blocks:
            return _Extent(number, self._end, until - self._end)
        if loader.is_stream:
            return _Extent(number, 0, missing)
        passes, start = self._before()
        ahead = until - start - (loader.passes.num_trained - passes) * loader.num_updates
        return _Extent(number, 0, ahead if ahead > 0 else missing)

    def _before(self) -> tuple[int, int]:
        """The passes that earlier loops took, of which each cut its last, and where they ended."""
        passes, start = 0, 0
        for end in self._ended:
            if end > start:
                passes, start = passes - (start - end) // self._loader.num_updates, end
        return passes, start

    def _pass(self, extent: _Extent) -> Iterator[Any]:
        loader, numbers = self._loader, self._numbers
        if numbers is not None:
            numbers.first, numbers.stop = extent.first, extent.stop
            for number in loader:
                seed_all(step_seed(self._seed, 0, number))
                self.turn = number // numbers.size // self._num_steps
                yield number
            return
        loader.most_batches = extent.stop
        try:
            yield from loader
        finally:
            loader.most_batches = None
