"""The order of an epoch's samples: the user's sampler, drawn once an epoch, equal in all members.

    (seed, epoch) -> random state, generators, set_epoch -> sampler        -> positions
                                                            batch sampler  -> and ends of batches

All positions are listed, 8 bytes each. A sampler that never ends, or gives another number than its
length, is refused before it fills the memory; torch's own sampler with replacement, which scripts
use as an endless one, is drawn only as far as needed. This module must not know leases, or what a
sample is. Above 300 lines, since all that an order may depend on is here.
"""

import copy
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from ..errors import ConfigError
from ..replica.seeding import kept_random_state, mix, seed_all
from .numbers import Numbers
from .positions import CHUNK, MOST_POSITIONS, DrawnLater, Positions, is_drawn_later, refuse_many

_ORDER_SALT, _EVALUATION_SALT = 3, 4
_MOST_UNSAID, _MOST_ROUNDS = 1 << 20, 16
"""Limits for a sampler without a length: so many positions, or so many times the data set."""
_MOST_COPIED = 1 << 20
"""Bytes of a table that is copied with a sampler."""


class _SetEpoch:
    """Replaces a sampler's ``set_epoch`` to note whether the script calls it.

    Attributes:
        call: the sampler's own method.
        is_scripts: whether the script has called it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.is_scripts = call, False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.is_scripts = True
        return self.call(*arguments, **options)


class EpochOrder:
    """Draws the orders of a loader's epochs.

    Args:
        seed: of the run; orders follow from it and the epoch.

    Attributes:
        epoch: the epoch that was drawn last.
        indices: indices into the data set, by position in that epoch.
        has_own_batches: whether the user's batch sampler decides where batches end.
        is_kept: whether the script keeps the state of a sampler (``pace.keep``).
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        own = loader.batch_sampler
        is_plain = own is None or (loader.batch_size is not None and type(own) is BatchSampler)
        self.has_own_batches = not is_plain
        inner = getattr(own, "sampler", None)
        self._samplers: list[Any] = list(
            {id(sampler): sampler for sampler in (loader.sampler, own, inner)}.values()
        )
        owners = (loader, *self._samplers)
        generators = [getattr(owner, "generator", None) for owner in owners]
        self._generators = [
            (generator, generator.initial_seed())
            for generator in {id(generator): generator for generator in generators}.values()
            if isinstance(generator, torch.Generator)
        ]
        self.is_kept: Callable[[Any], bool] = lambda sampler: False
        self._before: dict[int, Any] = {}
        """Per kept sampler: its state before it drew the order of ``epoch``."""
        self.epoch = 0
        self._num_positions: int | None = None
        self.indices: Sequence[int] = ()
        self._ends: list[int] | None = None
        self._digest: str | None = None
        self._expected: list[Any] | None = None

    @property
    def kind(self) -> str:
        """How `redraw` draws this loader's orders: "in order", "shuffled"; "own": it cannot."""
        sampler: Any = self._loader.sampler
        if self.has_own_batches or self._generators:
            return "own"
        if type(sampler) is SequentialSampler:
            return "in order"
        is_plain = type(sampler) is RandomSampler and not sampler.replacement
        has_all = is_plain and len(sampler) == len(sampler.data_source)
        return "shuffled" if has_all else "own"

    def count(self) -> tuple[int, int]:
        """Positions and batches an epoch; those of the first epoch, if the user's differ.

        What has no length is drawn, from a copy, since a sampler may count how often it was drawn.
        From here on, calls of ``set_epoch`` are taken for the script's own.

        Raises:
            ConfigError: an epoch has no end, or too many positions to be listed.
        """
        self._note_set_epoch()
        num_positions = length_of(self._loader.sampler)
        if self.has_own_batches or num_positions is None:
            with self._drawing(0):
                self._list(self._copied())
            ends = self._ends
            self._num_positions = None if self.has_own_batches else len(self.indices)
            return len(self.indices), len(ends) if ends is not None else self._num_batches()
        if not is_drawn_later(self._loader.sampler):
            refuse_many(f"the sampler {type(self._loader.sampler).__name__} has", num_positions)
        self._num_positions = None if type(self._loader.sampler) is Numbers else num_positions
        return num_positions, self._num_batches()

    def _num_batches(self) -> int:
        """As ``len(loader)``, also for a sampler without a length."""
        size, num = self._loader.batch_size or 1, len(self.indices)
        if length_of(self._loader.sampler) is not None:
            return len(self._loader)
        return num // size if self._loader.drop_last else -(-num // size)

    def draw(self, epoch: int) -> list[int] | None:
        """Draw the order of ``epoch``; returns the ends of the user's own batches, if any.

        The order is a pure function of the seed and the epoch if the sampler draws from Python's,
        NumPy's or torch's own generator, from a ``torch.Generator`` of a sampler or the loader, or
        follows ``set_epoch``: every member draws the same. ``set_epoch`` is called with the epoch
        only if the script does not call it, since it may count differently.

        Raises:
            ConfigError: the order has no end, or another number of samples than an epoch has.
        """
        self.epoch = epoch
        kept = [sampler for sampler in self._samplers if self.is_kept(sampler)]
        self._before = {id(sampler): copy.deepcopy(sampler.state_dict()) for sampler in kept}
        with self._drawing(epoch):
            self._list()
        expected, num_drawn = self._num_positions, len(self.indices)
        if expected is not None and num_drawn != expected:
            raise ConfigError(
                f"the sampler {type(self._loader.sampler).__name__} gave {num_drawn} samples for "
                f"epoch {epoch + 1}, and {expected} before: all epochs must have the same number"
            )
        return self._ends

    @contextmanager
    def _drawing(self, epoch: int) -> Iterator[None]:
        with self._seeded(mix(self._seed, epoch, _ORDER_SALT)), self._told(epoch):
            yield

    def _copied(self) -> Iterable[Any]:
        """A copy of the user's sampler, or itself if it cannot be copied; data, models and large
        tables that it holds are shared.
        """
        values = [self._loader.dataset, *self._held()]
        shared = {id(value): value for value in values if _is_shared(value, self._loader.dataset)}
        try:
            copied: Iterable[Any] = copy.deepcopy(self._sampler, shared)
        except Exception:  # an object of the user's may refuse it in any way
            return self._sampler
        return copied

    def _held(self) -> list[Any]:
        """What the user's samplers hold."""
        held = (getattr(sampler, "__dict__", {}) for sampler in self._samplers)
        return [value for names in held for value in names.values()]

    def before(self, thing: Any) -> list[Any] | None:
        """The epoch drawn last, and a kept sampler's state before it; None: not a kept sampler.

        A run that resumes inside that epoch draws its order again from this state.
        """
        return [self.epoch, self._before[id(thing)]] if id(thing) in self._before else None

    def _note_set_epoch(self) -> None:
        """Note from here on whether the script calls ``set_epoch``."""
        for sampler in self._samplers:
            call = getattr(sampler, "set_epoch", None)
            if call is not None and not isinstance(call, _SetEpoch):
                with suppress(AttributeError):  # an object with __slots__
                    sampler.set_epoch = _SetEpoch(call)

    @contextmanager
    def _told(self, epoch: int) -> Iterator[None]:
        """Set the samplers' epoch; calls among themselves meanwhile are not the script's."""
        calls = [getattr(sampler, "set_epoch", None) for sampler in self._samplers]
        noted = [call for call in calls if isinstance(call, _SetEpoch)]
        is_scripts = any(call.is_scripts for call in noted)
        before = [call.is_scripts for call in noted]
        try:
            for call in calls:
                if call is not None and not is_scripts:
                    call(epoch)
            yield
        finally:
            for call, was_scripts in zip(noted, before, strict=True):
                call.is_scripts = was_scripts

    def draw_for_evaluation(self, version: int) -> list[int] | None:
        """As ``draw``, for an evaluation at this version; ``set_epoch`` is not called."""
        with self._seeded(mix(self._seed, version, _EVALUATION_SALT)):
            self._list()
        return self._ends

    def look(self, num_positions: int) -> Sequence[Any]:
        """List an order of a copy of the sampler; the first positions, all of one batch.

        ``set_epoch`` is not called, and the user's own sampler draws nothing: of one that cannot be
        copied, these are the first samples of the data.
        """
        data, held = self._loader.dataset, self._held()
        shared = {id(one): one for one in held if isinstance(one, Dataset | torch.nn.Module)}
        try:
            sampler = copy.deepcopy(self._sampler, {**shared, id(data): data})
        except Exception:  # an object of the user's may refuse it in any way
            self.indices = range(len(self._loader.dataset))  # type: ignore[arg-type]  # or it has no length, and raises
            return self.indices[:num_positions]
        with self._seeded(mix(self._seed, _ORDER_SALT)):
            self._list(sampler)
        ends = self._ends or [num_positions]
        return self.indices[: min(num_positions, ends[0])]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed all known generators inside the block, and restore their states afterwards."""
        states = [(generator, generator.get_state()) for generator, _ in self._generators]
        with kept_random_state():
            seed_all(seed)
            for generator, first_seed in self._generators:
                generator.manual_seed(mix(first_seed, seed))
            try:
                yield
            finally:
                for generator, state in states:
                    generator.set_state(state)

    @property
    def _sampler(self) -> Iterable[Any]:
        """What draws the order: the user's batch sampler, or the sampler."""
        loader = self._loader
        if not self.has_own_batches:
            return loader.sampler
        assert loader.batch_sampler is not None
        return loader.batch_sampler

    def _list(self, sampler: Iterable[Any] | None = None) -> None:
        """List what the sampler, or this copy of it, gives now."""
        self._digest, self._ends = None, [] if self.has_own_batches else None
        source = self._sampler if sampler is None else sampler
        self.indices = list_positions(source, self._loader.dataset, self._ends)

    def fingerprint(self) -> str:
        """A digest of the order that was drawn last and of the ends of its batches."""
        digest: str = self.digest()[1]
        if self._ends is None:
            return digest
        return hashlib.sha256(digest.encode() + array("q", self._ends)).hexdigest()

    def digest(self) -> list[Any]:
        """The epoch that was drawn last, and a digest of its order."""
        if self._digest is None:
            try:
                # Too many to hash them all.
                is_counted = isinstance(self.indices, DrawnLater) or (
                    type(self._loader.sampler) is Numbers
                )
                data: Any = repr(self.indices).encode() if is_counted else _bytes(self.indices)
            except (TypeError, OverflowError):  # indices of a data set of the user's own kind
                data = repr(list(self.indices)).encode()
            self._digest = hashlib.sha256(data).hexdigest()
        return [self.epoch, self._digest]

    def expect(self, digest: list[Any]) -> None:
        """Let ``check`` refuse another order of that epoch: the run resumes inside it."""
        self._expected = digest

    def check(self) -> None:
        """Raise ConfigError if another order was drawn than before the run was cut off."""
        if (expected := self._expected) is not None and expected[0] == self.epoch:
            if expected != self.digest():
                raise ConfigError(
                    f"the sampler gave another order for epoch {self.epoch + 1} than before the "
                    "run was cut off, so some samples would be used twice: has the data changed? "
                    "If the sampler has state of its own: pace.keep(sampler=sampler)"
                )
            self._expected = None


def _is_shared(value: Any, dataset: Any) -> bool:
    if value is dataset or isinstance(value, Dataset | torch.nn.Module):
        return True
    size = getattr(value, "nbytes", None)
    if not isinstance(size, int):
        size = 8 * len(value) if isinstance(value, list | tuple | dict | array) else 0
    return size > _MOST_COPIED


def _bytes(indices: Sequence[int]) -> Any:
    """The indices as bytes, 8 each."""
    if isinstance(
        indices, range
    ):  # ten million from a range: a hundredth of a second instead of one
        return torch.arange(indices.start, indices.stop, indices.step).numpy()
    return indices if isinstance(indices, array) else array("q", indices)


def epoch_order(loader: DataLoader[Any], seed: int, epoch: int) -> list[Any]:
    """The order of an epoch of a run with several workers, drawn again.

    The loader's own sampler draws it, under a random state that depends on seed and epoch alone:
    the generators of Python, NumPy, torch, the loader and the sampler are seeded, and restored
    afterwards.

    Args:
        loader: as it was given to ``prepare``.
        seed: of the run: ``pace.seed``.
        epoch: counted from 0.

    Returns:
        The data set's indices, in order; with a batch sampler of your own a list of them a batch.

    Raises:
        ConfigError: the order has no end, or another length than the sampler's.
    """
    order = EpochOrder(loader, seed)
    ends = order.draw(epoch)
    refuse_many(f"the sampler {type(loader.sampler).__name__} has", len(order.indices))
    indices = list(order.indices)
    return indices if ends is None else [indices[a:b] for a, b in pairwise([0, *ends])]


def redraw(kind: str, num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch, drawn again for a loader of this `EpochOrder.kind`.

    Raises:
        ConfigError: only the user's own sampler can draw it.
    """
    if kind == "in order":
        return range(num_samples)
    if kind != "shuffled":
        raise ConfigError(
            "the order of this run's samples came from the script's own sampler, which the trace "
            "does not hold; ask for a position in an epoch's order instead: --position N"
        )
    with kept_random_state():
        seed_all(mix(seed, epoch, _ORDER_SALT))
        return list(RandomSampler(range(num_samples)))


def length_of(source: Any) -> int | None:
    """``len(source)``; None: it has no length."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def list_positions(
    source: Iterable[Any], dataset: Any, ends: list[int] | None = None
) -> Sequence[int]:
    """The positions that a sampler gives.

    Args:
        ends: for a batch sampler: a list to which the ends of its batches are added.

    Raises:
        ConfigError: it has no end, or gives another number than its length.
    """
    if type(source) is SequentialSampler:
        return range(len(source))
    if type(source) is Numbers:
        return source.numbers
    if is_drawn_later(source):
        return DrawnLater(source)
    length, listed, num_listed, drawn = length_of(source), Positions(), 0, iter(source)
    limit = (
        max(_MOST_UNSAID, _MOST_ROUNDS * (length_of(dataset) or 0)) if length is None else length
    )
    while chunk := list(islice(drawn, min(CHUNK, limit + 1 - num_listed))):
        num_listed += len(chunk)
        for batch in [chunk] if ends is None else chunk:
            listed.add(batch if isinstance(batch, list) else list(batch))
            if ends is not None:
                ends.append(len(listed.values))
        if num_listed > limit or len(listed.values) > MOST_POSITIONS:
            break
    kind, what = ("sampler", "samples") if ends is None else ("batch sampler", "batches")
    name = f"the {kind} {type(source).__name__}"
    refuse_many(f"{name} gave", len(listed.values))
    if length is None and num_listed > limit:
        raise ConfigError(
            f"{name} has no __len__ and gave more than {limit:,} {what} for "
            f"{type(dataset).__name__}: an epoch must end; end its __iter__, or give it a __len__"
        )
    if length is not None and num_listed != length:
        raise ConfigError(
            f"{name} has a __len__ of {length:,} {what} and gave "
            f"{'more' if num_listed > length else f'{num_listed:,}'}; both must agree"
        )
    return listed.values
