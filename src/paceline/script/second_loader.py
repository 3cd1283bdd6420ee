"""A further loader of a script: a batch of it for each batch of the prepared one.

    prepared loader   pass e, batch n   |--lease--|---------|      s: its batches since an iterator
    this loader       pass k, batch m   |--this---|---------|      was opened; k, m = divmod(s, its
                                                                   own batches)

What a worker is given follows from its lease alone, so it is the same whoever does a mini-batch and
however often, and all parts of a batch together are the batch. An iterator that is opened where
another has ended goes on with the next pass, and so do those after it: a chain. What cannot be
placed so is refused by name. Above 300 lines because whether a batch belongs to a mini-batch can
only be seen where iterators, passes and mini-batches are told of. This module must not know
exchanges, protocols or who holds a lease.
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
    "since its batch follows from that one's place"
)


@dataclass(slots=True)
class _Chain:
    """Iterators that follow each other.

    Attributes:
        origin: the pass over the prepared loader with whose first batch the first one begins.
        is_first: whether it was begun before any pass of this worker's life.
    """

    origin: int
    is_first: bool


class _Kept(NamedTuple):
    """Of a run that goes on: what its iterators were when the checkpoint was taken.

    Attributes:
        last: the pass over the prepared loader that was begun last.
        num_chains: that there had been.
    """

    origin: int
    last: int
    num_chains: int


class _Batches:
    """One iterator over a second loader, inside the prepared loader's loop.

    Attributes:
        number: of the pass of its chain that it goes through; None: that of its first batch.
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
            as the prepared loader's are.

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
        """Of this pass over the prepared loader."""
        self._first_ever: Held | None = None
        """Of this worker's life."""
        self._asked: Held | None = None
        """For which a batch was asked for, or the end was told."""
        self._drawn: Held | None = None
        self._has_missed = self._is_checked = False
        self._kept: _Kept | None = None
        self._num_looks, self._num_chains, self._last_pass = 2, 0, -1
        if not loop.is_alone:
            _refuse(loader, main)
            self._share_out(size)

    def _share_out(self, size: int) -> None:
        """Find its batches. Raises ConfigError where they and the prepared loader's do not fit."""
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

    def _in_hand(self) -> Held | None:
        return self._loop.holding.current if self._loop.is_iterating else None

    def _open(self) -> _Batches:
        held, before = self._in_hand(), self._newest
        if held is None:
            one = _Batches(self, self._begin(self._main.passes.next), 0, needs_border=False)
        elif before is not None and before.has_ended:
            one = _Batches(self, before.chain, None, needs_border=False)
        elif self._chain is None or (held is self._first and held is not self._drawn):
            origin = self._origin_inside(held)
            one = _Batches(self, self._begin(origin), None, needs_border=False)
            one.needs_border, self._last = held is not self._first, held
        else:
            one = _Batches(self, self._chain, None, needs_border=True)
        self._newest = one
        return one

    def _begin(self, origin: int) -> _Chain:
        self._chain = _Chain(origin, not self._main.has_opened)
        self._last, self._has_missed = None, False
        self._num_chains += 1
        return self._chain

    def _origin_inside(self, held: Held) -> int:
        """Of a chain that begins in the loop, with this mini-batch.

        Raises:
            ConfigError: the run goes on, and the chain may be one that had begun before.
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
            "the run goes on after its first epoch, and an iterator over the second loader that "
            "begins in the loop may be that epoch's or a new one: open it where it is known, "
            "it = iter(loader_b) before the epochs or before each loop"
        )

    def take(self, one: _Batches) -> Any:
        """The part of this worker's mini-batch, or the end of the pass.

        Raises:
            ConfigError: no batch belongs to what the loop does.
        """
        held = self._in_hand()
        if held is None:
            raise ConfigError(
                "the second loader gives its batches inside the prepared loader's loop, after that "
                "one's batch: for (x, y), (u, _) in zip(loader, loader_b); a batch to look at is "
                "next(iter(loader_b.plain)). One loader has all epochs of a run: larger batches or "
                "other data for later ones are a run of their own, with pace.trial('large'):"
            )
        self._refuse(one, held)
        number, batch = self._place(held.lease)
        if one.number is None:
            one.number = number
            if one.needs_border and batch:
                raise ConfigError(
                    "an iterator over the second loader was opened before the last one's end: "
                    f"{_NEEDS_EACH}; open one before the loop, and another one at its end "
                    "(except StopIteration)"
                )
        self._asked = held
        if number > one.number:
            one.has_ended = True
            self._loop.holding.has_worked = True  # a zip leaves the loop with this mini-batch
            raise StopIteration
        self._drawn = held
        self._list(self._number(number))
        own = self._part(batch, held.lease)
        with kept_random_state():
            return self._loop.fetch_from(self._leased, own)

    def _refuse(self, one: _Batches, held: Held) -> None:
        if one is not self._newest:
            raise ConfigError(
                "two iterators over the second loader are used at once; prepare a DataLoader of "
                "its own for each"
            )
        if not one.was_asked and self._num_looks:
            one.was_asked, self._num_looks = True, self._num_looks - 1
            if any(type(other) is itertools.cycle for other in gc.get_referrers(one)):
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
                f"{_NEEDS_EACH}, and one was left out; call it before anything that may leave one "
                "out, or open an iterator before each loop: zip(loader, loader_b)"
            )

    # -- what belongs to a lease ------------------------------------------------------------------

    def _place(self, lease: Lease) -> tuple[int, int]:
        """The pass of the chain, and the batch of it."""
        assert self._chain is not None
        main, origin = self._main, self._chain.origin
        if origin <= main.last_uneven < lease.epoch:
            raise ConfigError(
                "an iterator over the second loader goes on after a loop over the prepared loader "
                "that was left early, or had another number of batches than usual; open one for "
                "each loop: it = iter(loader_b), or zip(loader, loader_b)"
            )
        looks = sum(origin <= one < lease.epoch for one in main.passes.place.looks)
        before = (lease.epoch - origin - looks) * len(main)
        return divmod(before + self._of_main.batch_at(lease.start), self._num_batches)

    def _number(self, number: int) -> int:
        """Of all passes, for a pass of the chain."""
        assert self._chain is not None
        return self._chain.origin * self._num_passes + number

    def _list(self, number: int) -> None:
        """The order of this pass; the first one is drawn twice, which must come out alike."""
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
                    "be another in each worker; let it draw from torch, random or numpy.random "
                    "themselves, or seed its own in set_epoch(epoch)"
                )
            self._is_checked = True
        self._batches = self._usual if ends is None else self._usual.with_ends(ends)
        if ends is not None and len(ends) != self._num_batches:
            raise ConfigError(
                f"the second loader's batch sampler gave {len(ends)} batches, and "
                f"{self._num_batches} before: each pass must have as many"
            )

    def _part(self, batch: int, lease: Lease) -> Lease:
        """The positions of ``batch`` that are what the lease is of its own batch.

        Raises:
            ConfigError: there are none, or their share is not the lease's where that counts.
        """
        own, main = self._batches.bounds(batch), self._of_main
        whole = main.bounds(main.batch_at(lease.start))
        start, stop = (share(own, whole, one) for one in (lease.start, lease.stop))
        is_even = start.denominator == stop.denominator == 1
        first, last = math.floor(start), math.floor(stop)
        if first == last or (self._averages and not is_even):
            raise _uneven(own[1] - own[0], whole[1] - whole[0])
        return Lease(lease.id, self._leased.order.epoch, first, last)

    def _refuse_uneven(self) -> None:
        """The same before the first step, of the sizes that will meet."""
        num, most = self._of_main.num_batches, self._num_batches
        for batch in sorted({0, min(most, num) - 1, num - 1}):
            for lease in self._of_main.cut(batch, 0, 0):
                self._part(batch % most, lease)

    # -- what the loop tells --------------------------------------------------------------------

    def begin_pass(self, epoch: int, batches: Batches) -> None:
        """A pass over the prepared loader begins, of these batches."""
        chain, passes, self._of_main, self._first = self._chain, self._main.passes, batches, None
        goes_on = passes.first > 0 and passes.place.position < 0
        if chain is not None and chain.is_first and goes_on and self._main.most_batches is not None:
            chain.origin = 0 if self._kept is None else max(0, self._kept.origin)
        self._list(epoch * self._num_passes)

    def took(self, held: Held) -> None:
        """The loop has another mini-batch."""
        last = self._last
        if last is not None and last is not self._asked and not last.is_called_off:
            self._has_missed = True
        self._last, self._last_pass = held, held.lease.epoch
        self._first = self._first or held
        self._first_ever = self._first_ever or held

    def reserve(self, leases: Sequence[Lease]) -> None:
        """These come next: the loader's workers fetch what belongs to them, of this pass."""
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
        """Of the order of the pass that begins now, and of how its iterators hang together."""
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
        """What a checkpoint has of the order, and what takes it back."""
        return self._leased.order.digest, self._leased.order.expect


def _uneven(size: int, of_main: int) -> ConfigError:
    return ConfigError(
        f"a batch of {size} of the second loader cannot be shared out as one of {of_main} of the "
        "prepared loader is: a mean over the parts would not be the mean over the batch; take "
        "batch sizes that the mini-batches of an update share evenly, and drop_last=True in both "
        "loaders"
    )


def _refuse(loader: DataLoader[Any], main: PreparedLoader) -> None:
    """Say by name what cannot stand beside a prepared loader."""
    if main.has_numbers:
        raise ConfigError(
            "prepare(loader) after a prepare() without a loader: give the first one this loader, "
            "and go over its batches: pace.prepare(model, optimizer, loader)"
        )
    if main.is_stream or isinstance(loader.dataset, IterableDataset):
        which = "prepared" if main.is_stream else "second"
        raise ConfigError(
            f"the {which} loader is over a stream, whose batches "
            "have no numbers that another loader's could belong to; make the data set map-style "
            "(__len__ and __getitem__)"
        )
    refuse_own_iteration(loader)
