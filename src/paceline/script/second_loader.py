"""A further loader of a script: a batch of it for each batch of the prepared one.

    prepared loader   pass e, batch n   |--lease--|---------|      s: its batches since an iterator
    this loader       pass k, batch m   |--this---|---------|      was opened; k, m = divmod(s, its
                                                                   own batches)

A worker's batches follow from its lease alone, so they are the same whichever worker does a
mini-batch and however often, and all parts of a batch together are the batch. An iterator that is
opened where another has ended continues with the next pass, and so do those after it: a chain. What
cannot be placed so is refused by name. Above 300 lines because whether a batch belongs to a
mini-batch can only be checked where iterators, passes and mini-batches are all known. This module
must not know exchanges, protocols or who holds a lease.
"""

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..core.batches import Batches, share
from ..data.loader import LeasedLoader
from ..data.own_iteration import refuse_own_iteration
from ..errors import ConfigError
from ..events import Lease
from ..fields import integer
from ..replica.seeding import kept_random_state
from .holding import Held
from .loader import OfLoader, PreparedLoader
from .loop import TrainingLoop, to_device

_NEEDS_EACH = (
    "next() on the second loader must be called once for each mini-batch of the prepared loader, "
    "whose place determines its batch"
)


@dataclass(slots=True)
class _Chain:
    """Iterators that follow each other.

    Attributes:
        origin: the pass over the prepared loader whose first batch the first iterator starts with.
        is_first: whether it began before any pass of this worker's life.
    """

    origin: int
    is_first: bool


class _Kept(NamedTuple):
    """The iterators of a resumed run, as they were at its checkpoint.

    Attributes:
        last: the pass over the prepared loader that began last.
        num_chains: chains until then.
    """

    origin: int
    last: int
    num_chains: int


class _Batches:
    """One iterator over a second loader, inside the prepared loader's loop.

    Attributes:
        number: the pass of its chain that it goes through; None: that of its first batch.
        needs_border: whether that batch must be the first of its pass.
    """

    def __init__(
        self, loader: "SecondLoader", chain: _Chain, number: int | None, *, needs_border: bool
    ) -> None:
        self._loader = loader
        self.chain, self.number, self.needs_border = chain, number, needs_border
        self.has_ended = self.was_asked = False

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        return self._loader.take(self)


class SecondLoader(OfLoader):
    """A loader beside the prepared one; ``len`` is the number of its batches.

    In the prepared loader's loop each ``next()`` gives this worker's part of the batch that belongs
    to its mini-batch. With one worker, and under ``torch.no_grad()``, it is the user's own loader.

    Args:
        main: the prepared loader.
        size: samples of a batch, of which a mini-batch has a part.
        seed: orders follow from it and the number of the pass.
        averages: whether an update averages several mini-batches, whose parts must then be shared
            like the prepared loader's.

    Attributes:
        plain: the loader that was given to ``prepare``.

    Raises:
        ConfigError: its batches cannot be shared out.
    """

    OWN = frozenset(("plain", "seed"))

    def __init__(
        self,
        main: PreparedLoader,
        loop: TrainingLoop,
        loader: DataLoader[Any],
        *,
        size: int,
        seed: int,
        averages: bool,
    ) -> None:
        self._main, self._loop, self._averages = main, loop, averages
        self.plain, self.seed = loader, seed
        self._chain: _Chain | None = None
        self._newest: _Batches | None = None
        self._last: Held | None = None
        """The mini-batch that the loop took last, since the chain began."""
        self._first: Held | None = None
        """The first mini-batch of this pass over the prepared loader."""
        self._first_ever: Held | None = None
        """The first mini-batch of this worker's life."""
        self._asked: Held | None = None
        """The mini-batch whose batch, or end of pass, was requested last."""
        self._drawn: Held | None = None
        self._has_missed = self._is_checked = False
        self._kept: _Kept | None = None
        self._num_looks, self._num_chains, self._last_pass = 2, 0, -1
        if not loop.is_alone:
            _refuse(loader, main)
            self._share_out(size)

    def _share_out(self, size: int) -> None:
        """Find its batches. ConfigError: they do not fit the prepared loader's."""
        main, loop, loader, seed = self._main, self._loop, self.plain, self.seed
        self._leased = LeasedLoader(loader, seed, loop.device)
        order = self._leased.order
        num_samples, self._num_batches = order.count()
        self._usual = self._batches = Batches(
            num_samples, size, 1, keep_remainder=not loader.drop_last or order.has_own_batches
        )
        if not order.has_own_batches:
            self._num_batches = self._usual.num_batches
        self._num_passes = max(1, -(-len(main) // self._num_batches))
        self._of_main = main.usual_batches
        if not (order.has_own_batches or main.has_own_batches):
            self._refuse_uneven()

    @property
    def is_released(self) -> bool:
        """Whether its trial is over."""
        return self._loop.is_released

    def __len__(self) -> int:
        return len(self.plain) if self._loop.is_alone else self._num_batches

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        if not (loop.is_alone or loop.is_released) and torch.is_grad_enabled():
            return self._open()
        if loop.device.type == "cpu":
            return iter(self.plain)
        return (to_device(batch, loop.device) for batch in self.plain)

    # -- iterators ------------------------------------------------------------------------------

    def _current(self) -> Held | None:
        return self._loop.holding.current if self._loop.is_iterating else None

    def _open(self) -> _Batches:
        held, before = self._current(), self._newest
        if held is None:
            iterator = _Batches(self, self._begin(self._main.passes.next), 0, needs_border=False)
        elif before is not None and before.has_ended:
            iterator = _Batches(self, before.chain, None, needs_border=False)
        elif self._chain is None or (held is self._first and held is not self._drawn):
            origin = self._origin_inside(held)
            iterator = _Batches(self, self._begin(origin), None, needs_border=False)
            iterator.needs_border, self._last = held is not self._first, held
        else:
            iterator = _Batches(self, self._chain, None, needs_border=True)
        self._newest = iterator
        return iterator

    def _begin(self, origin: int) -> _Chain:
        self._chain = _Chain(origin, not self._main.has_opened)
        self._last, self._has_missed = None, False
        self._num_chains += 1
        return self._chain

    def _origin_inside(self, held: Held) -> int:
        """The origin of a chain that begins in the loop, with this mini-batch.

        Raises:
            ConfigError: the run was resumed, and the chain may have begun before.
        """
        kept, epoch = self._kept, held.lease.epoch
        is_new = held is not self._first_ever or (kept is None and not self._main.passes.first)
        if self._chain is not None or is_new:
            return epoch
        if self._main.most_batches is not None:  # a loop that counts updates knows no passes
            return 0 if kept is None else max(0, kept.origin)
        if kept is None or kept.origin < 0:
            return epoch
        if kept.last == epoch or kept.origin < kept.last:
            return kept.origin
        if kept.num_chains > 1:  # one for each pass
            return epoch
        raise ConfigError(
            "the run was resumed after its first epoch, and an iterator over the second loader "
            "that is opened in the loop may be that epoch's or a new one: open it where that is "
            "clear, it = iter(loader_b) before the epochs or before each loop"
        )

    def take(self, iterator: _Batches) -> Any:
        """The part of this worker's mini-batch, or the end of the pass.

        Raises:
            ConfigError: no batch belongs to the current work of the loop.
        """
        held = self._current()
        if held is None:
            raise ConfigError(
                "the second loader gives its batches inside the prepared loader's loop, after that "
                "loader's batch: for (x, y), (u, _) in zip(loader, loader_b); to look at a batch: "
                "next(iter(loader_b.plain)). One loader serves all epochs of a run: train with "
                "larger batches or other data in a run of their own, with pace.trial('large'):"
            )
        self._refuse(iterator, held)
        number, batch = self._place(held.lease)
        if iterator.number is None:
            iterator.number = number
            if iterator.needs_border and batch:
                raise ConfigError(
                    "an iterator over the second loader was opened before the end of the last one: "
                    f"{_NEEDS_EACH}; open one before the loop, and another at its end "
                    "(except StopIteration)"
                )
        self._asked = held
        if number > iterator.number:
            iterator.has_ended = True
            self._loop.holding.has_worked = True  # a zip leaves the loop with this mini-batch
            raise StopIteration
        self._drawn = held
        self._list(self._number(number))
        part = self._part(batch, held.lease)
        with kept_random_state():
            return self._loop.fetch_from(self._leased, part)

    def _refuse(self, iterator: _Batches, held: Held) -> None:
        if iterator is not self._newest:
            raise ConfigError(
                "two iterators over the second loader are used at once; prepare a separate "
                "DataLoader for each"
            )
        if not iterator.was_asked and self._num_looks:
            iterator.was_asked, self._num_looks = True, self._num_looks - 1
            if any(type(user) is itertools.cycle for user in gc.get_referrers(iterator)):
                raise ConfigError(
                    "itertools.cycle keeps the batches of the second loader's first pass, which "
                    "then meet other mini-batches in each worker; begin a new pass instead: "
                    "def again(loader): while True: yield from loader"
                )
        if held is self._drawn:
            raise ConfigError(
                f"next() on the second loader was called twice for one mini-batch; {_NEEDS_EACH}; "
                "for two batches of it each, make them twice as large"
            )
        if self._has_missed:
            raise ConfigError(
                f"{_NEEDS_EACH}, and one was left out; call it before anything that may skip one, "
                "or open an iterator before each loop: zip(loader, loader_b)"
            )

    # -- what belongs to a lease ------------------------------------------------------------------

    def _place(self, lease: Lease) -> tuple[int, int]:
        """The pass of the chain, and the batch in it, that belong to a lease."""
        assert self._chain is not None
        main, origin = self._main, self._chain.origin
        if origin <= main.last_uneven < lease.epoch:
            raise ConfigError(
                "an iterator over the second loader continues after a loop over the prepared "
                "loader that was left early, or had an unusual number of batches; open one for "
                "each loop: it = iter(loader_b), or zip(loader, loader_b)"
            )
        looks = sum(origin <= look < lease.epoch for look in main.passes.place.looks)
        before = (lease.epoch - origin - looks) * len(main)
        return divmod(before + self._of_main.batch_at(lease.start), self._num_batches)

    def _number(self, number: int) -> int:
        """The number of a pass of the chain among all passes."""
        assert self._chain is not None
        return self._chain.origin * self._num_passes + number

    def _list(self, number: int) -> None:
        """Draw the order of this pass; the first one twice, to check that it repeats."""
        order = self._leased.order
        if order.epoch == number and self._is_checked:
            return
        ends = order.draw(number)
        order.check()
        if not self._is_checked:
            first = order.fingerprint()
            ends = order.draw(number)
            if order.fingerprint() != first:
                raise ConfigError(
                    "the second loader's sampler has random numbers of its own, so its order would "
                    "differ between workers; let it draw from torch, random or numpy.random "
                    "directly, or seed its own in set_epoch(epoch)"
                )
            self._is_checked = True
        self._batches = self._usual if ends is None else self._usual.with_ends(ends)
        if ends is not None and len(ends) != self._num_batches:
            raise ConfigError(
                f"the second loader's batch sampler gave {len(ends)} batches, and "
                f"{self._num_batches} before: each pass must have the same number"
            )

    def _part(self, batch: int, lease: Lease) -> Lease:
        """The positions of ``batch`` that correspond to the lease's share of its own batch.

        Raises:
            ConfigError: there are none, or their share differs from the lease's where that matters.
        """
        bounds, main = self._batches.bounds(batch), self._of_main
        whole = main.bounds(main.batch_at(lease.start))
        start, stop = (share(bounds, whole, position) for position in (lease.start, lease.stop))
        is_even = start.denominator == stop.denominator == 1
        first, last = math.floor(start), math.floor(stop)
        if first == last or (self._averages and not is_even):
            raise _uneven(bounds[1] - bounds[0], whole[1] - whole[0])
        return Lease(lease.id, self._leased.order.epoch, first, last)

    def _refuse_uneven(self) -> None:
        """Check before the first step the sizes that will meet."""
        num, most = self._of_main.num_batches, self._num_batches
        for batch in sorted({0, min(most, num) - 1, num - 1}):
            for lease in self._of_main.cut(batch, 0, 0):
                self._part(batch % most, lease)

    # -- what the loop tells --------------------------------------------------------------------

    def begin_pass(self, epoch: int, batches: Batches) -> None:
        """Start a pass over the prepared loader, of these batches."""
        chain, passes, self._of_main, self._first = self._chain, self._main.passes, batches, None
        is_resumed = passes.first > 0 and passes.place.position < 0
        if (
            chain is not None
            and chain.is_first
            and is_resumed
            and self._main.most_batches is not None
        ):
            chain.origin = 0 if self._kept is None else max(0, self._kept.origin)
        self._list(epoch * self._num_passes)

    def took(self, held: Held) -> None:
        """Note the loop's new mini-batch."""
        last = self._last
        if last is not None and last is not self._asked and not last.is_called_off:
            self._has_missed = True
        self._last, self._last_pass = held, held.lease.epoch
        self._first = self._first or held
        self._first_ever = self._first_ever or held

    def reserve(self, leases: Sequence[Lease]) -> None:
        """Let the loader's workers fetch what belongs to the next leases, within this pass."""
        if not self._leased.lookahead or self._drawn is None or self._drawn is not self._last:
            return
        now = self._leased.order.epoch
        places = [(self._place(lease), lease) for lease in leases]
        self._leased.reserve([
            self._part(batch, lease)
            for (number, batch), lease in places
            if self._number(number) == now
        ])  # fmt: skip

    def end_pass(self) -> None:
        self._leased.end_epoch()

    def fingerprint(self) -> str:
        """Identifies the order of the pass that begins now, and the chain of its iterators."""
        origin = -1 if self._chain is None else self._chain.origin
        return f"{origin} {self._leased.order.fingerprint()}"

    # -- checkpoints ----------------------------------------------------------------------------

    def remember(self) -> list[int]:
        origin = -1 if self._chain is None else self._chain.origin
        return [self._main.last_uneven, origin, self._last_pass, self._num_chains]

    def go_on(self, state: list[int]) -> None:
        uneven, *kept = map(integer, state)
        self._main.last_uneven, self._kept = uneven, _Kept(*kept)
        self._num_chains = self._kept.num_chains

    def keep_order(self) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """What a checkpoint keeps of the order, and the function that restores it."""
        return self._leased.order.digest, self._leased.order.expect


def _uneven(size: int, of_main: int) -> ConfigError:
    return ConfigError(
        f"a batch of {size} of the second loader cannot be shared out like one of {of_main} of the "
        "prepared loader: a mean over the parts would not be the mean over the batch; use batch "
        "sizes that the mini-batches of an update share evenly, and drop_last=True in both "
        "loaders"
    )


def _refuse(loader: DataLoader[Any], main: PreparedLoader) -> None:
    """Raise ConfigError for a loader that cannot be used beside the prepared one."""
    if main.has_numbers:
        raise ConfigError(
            "prepare(loader) after a prepare() without a loader: give this loader to the first "
            "call, and loop over its batches: pace.prepare(model, optimizer, loader)"
        )
    if main.is_stream or isinstance(loader.dataset, IterableDataset):
        which = "prepared" if main.is_stream else "second"
        raise ConfigError(
            f"the {which} loader is over a stream, whose batches have no numbers by which another "
            "loader's could be matched; make the data set map-style "
            "(__len__ and __getitem__)"
        )
    refuse_own_iteration(loader)
