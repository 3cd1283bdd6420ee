"""The mini-batches of a user's stream, one after the other, read in loader workers.

    loader worker    worker_init_fn -> a state, where there is one -> the data set -> m samples
                     -> collate_fn -> how many, their batch, the data set's state after them;
                     the batch is taken apart here (frames.py): a queue carries less so

Who reads is a process of torch's own, so the user's Python takes nothing from a step; its random
state follows from the run's seed and the pass, so who reads the stream again, after a death, reads
the same. This module must not know who wants them, nor what is done with them.

Source: PyTorch documentation, ``torch.utils.data``, "Iterable-style datasets"; torchdata,
"Stateful DataLoader", for ``state_dict`` and ``load_state_dict`` of a data set.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..errors import ConfigError
from ..replica.seeding import (
    kept_random_state,
    mix,
    random_states,
    restore_random_states,
    seed_all,
)
from .frames import Packed, pack

_STREAM_SALT = 6
_STATE_S = 0.5
"""Between two looks at the data set's own state: it may be long."""
_MOST_STATE = 1 << 18
"""Characters of it: it goes to the run, and into each checkpoint."""


class _Collated:
    """The user's ``collate_fn``, and beside its batch what else is to be known of it.

    It is called where the data set is, right after it gave the last of these samples.
    """

    def __init__(self, collate: Callable[[Any], Any], *, is_batch: bool, saves: bool) -> None:
        self._collate, self._is_batch, self._saves = collate, is_batch, saves
        self._next_s = 0.0

    def __call__(self, samples: Any) -> tuple[int, Packed, str]:
        """Number of samples, their batch, and the state after them or nothing."""
        num_samples = 1 if self._is_batch else len(samples)
        batch, state = self._collate(samples), ""
        if self._saves and time.monotonic() >= self._next_s:
            state = self._state()
            self._next_s = time.monotonic() + _STATE_S
        return num_samples, pack(batch), state

    def _state(self) -> str:
        info = get_worker_info()
        assert info is not None
        try:
            state = info.dataset.state_dict()  # type: ignore[attr-defined]  # asked for before
            text = json.dumps([state, _random()]) if state else ""
        except (TypeError, ValueError):
            text = ""
        self._saves = 0 < len(text) <= _MOST_STATE
        return text if self._saves else ""


class _Begun:
    """The user's ``worker_init_fn``, and after it the data set goes on from a state."""

    def __init__(self, init: Callable[[int], None] | None, state: str) -> None:
        self._init, self._state = init, state

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        if self._state and info is not None:
            state, random = json.loads(self._state)
            info.dataset.load_state_dict(state)  # type: ignore[attr-defined]  # it gave it
            _go_on(random)


def _random() -> dict[str, Any]:
    """The random state of this process, as JSON can carry it."""
    states = random_states()
    numpy = states.get("numpy")
    return {
        "python": states["python"],
        "torch": states["torch"].tolist(),
        "numpy": None if numpy is None else [numpy[0], numpy[1].tolist(), *numpy[2:]],
    }


def _go_on(saved: dict[str, Any]) -> None:
    """Draw from here on what would have been drawn after ``_random``."""
    version, words, gauss = saved["python"]
    states: dict[str, Any] = {
        "python": (version, tuple(words), gauss),
        "torch": torch.tensor(saved["torch"], dtype=torch.uint8),
    }
    if saved["numpy"] is not None:
        states["numpy"] = tuple(saved["numpy"])
    restore_random_states(states)


def _loses_some(dataset: Any) -> bool:
    """Whether its state leaves out what it has read and not given yet.

    Two parts of Hugging Face's data sets, wherever one is mixed or mapped from others: a shuffle
    buffer is filled anew from where the reading stood, and of a map over batches of tables a batch
    may be skipped, as their ``state_dict`` says itself; may go when it holds both.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if part is None:
            continue
        is_table = getattr(getattr(part, "formatting", None), "is_table", False)
        if "BufferShuffled" in type(part).__name__ or (is_table and part.batched):
            return True
        parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


class StreamSource:
    """A user's loader over an iterable data set, read in loader workers.

    Args:
        loader: the user's.
        size: samples of a mini-batch; None: the data set gives whole batches, as it is.
        seed: of the run.
    """

    def __init__(self, loader: DataLoader[Any], size: int | None, seed: int) -> None:
        self._loader, self._size, self._seed = loader, size, seed

    @property
    def num_workers(self) -> int:
        return max(1, self._loader.num_workers)

    @property
    def saves(self) -> bool:
        """Whether the data set can say where it is, so that nothing has to be read again."""
        dataset = self._loader.dataset
        if _loses_some(dataset):
            return False
        can = all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))
        return can and self.num_workers == 1

    @property
    def num_prefetched(self) -> int:
        """Mini-batches that torch's loader workers hold ready."""
        return self.num_workers * (self._loader.prefetch_factor or 2)

    def open(self, epoch: int, state: str) -> Iterator[tuple[int, Packed, str]]:
        """One pass; its workers begin now, forked by the thread that calls."""
        user, generator = self._loader, None
        seed = mix(self._seed, epoch, _STREAM_SALT)
        if isinstance(user.generator, torch.Generator):
            generator = torch.Generator().manual_seed(mix(user.generator.initial_seed(), seed))
        is_batch = self._size is None
        with kept_random_state():
            seed_all(seed)
            return iter(DataLoader(
                user.dataset,
                batch_size=self._size,
                drop_last=user.drop_last and not is_batch,
                num_workers=self.num_workers,
                collate_fn=_Collated(user.collate_fn, is_batch=is_batch, saves=self.saves),
                worker_init_fn=_Begun(user.worker_init_fn, state),
                multiprocessing_context=user.multiprocessing_context,
                timeout=user.timeout,
                prefetch_factor=user.prefetch_factor,
                generator=generator,
            ))  # fmt: skip


def mini_batch(loader: DataLoader[Any], parts: int, *, is_global: bool) -> int | None:
    """Samples of a mini-batch; None: the data set gives it whole.

    Raises:
        ConfigError: it cannot be shared so.
    """
    size = loader.batch_size
    if getattr(loader, "in_order", True) is False:
        raise ConfigError("the loader has in_order=False; a stream's mini-batches have numbers")
    if size is None and is_global and parts > 1:
        raise ConfigError(
            f"the loader has batch_size=None: its data set makes the batches, and each would be "
            f"shared by {parts} mini-batches; where one of them is a mini-batch: "
            "pace.prepare(..., batch='per-worker')"
        )
    if size is None or not is_global:
        return size
    if size % parts:
        raise ConfigError(
            f"a stream's batch of {size} samples cannot be shared by {parts} mini-batches of one "
            f"size; use a batch size that {parts} divides, or pace.prepare(..., "
            "batch='per-worker')"
        )
    return size // parts
