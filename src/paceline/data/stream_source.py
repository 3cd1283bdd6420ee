"""The mini-batches of a user's stream, one after the other, as loader workers read them.

    loader worker    worker_init_fn -> saved state, if any -> the data set -> m samples
                     -> collate_fn -> number of samples, their batch, the data set's state

A single loader worker is the process that iterates here: a queue to another process would cost more
than everything but the user's own code. Several are torch's own, and pack their batches for the
queue (frames.py). Random state follows from the run's seed and the pass, so the stream can be read
again after a death and gives the same. This module must not know who wants the mini-batches, nor
what is done with them.

Source: PyTorch documentation, ``torch.utils.data``, "Iterable-style datasets"; torchdata,
"Stateful DataLoader", for ``state_dict`` and ``load_state_dict`` of a data set.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker

from ..errors import ConfigError
from ..replica.seeding import mix, random_states, restore_random_states, seed_all
from ..system.signals import die_with_parent
from .frames import pack

_STREAM_SALT = 6
_STATE_S = 0.5
"""The data set's own state is saved at most this often: it may be long."""
_MOST_STATE = 1 << 18
"""Characters of a state: it is sent to the run, and goes into each checkpoint."""


class _Collated:
    """The user's ``collate_fn``, whose batch comes with its size and the data set's state.

    It is called in the data set's process, right after it gave the last of these samples.

    Args:
        size: samples of a mini-batch; None: the data set gives whole batches.
        saves: whether to save the data set's state.
        packs: whether to pack the batch for a queue.
    """

    def __init__(
        self, user: DataLoader[Any], size: int | None, *, saves: bool, packs: bool
    ) -> None:
        self._collate, self._size, self._saves = user.collate_fn, size, saves
        self._packs, self._next_s = packs, 0.0

    def __call__(self, samples: Any) -> tuple[int, Any, str]:
        """Returns the number of samples, their batch, and the state after them or ``""``."""
        num_samples = 1 if self._size is None else len(samples)
        batch, state = self._collate(samples), ""
        # A short mini-batch ends the pass, and the data set may have gone back to its beginning.
        is_last = self._size is not None and num_samples < self._size
        if self._saves and not is_last and time.monotonic() >= self._next_s:
            state = self._state()
            self._next_s = time.monotonic() + _STATE_S
        return num_samples, pack(batch) if self._packs else batch, state

    def _state(self) -> str:
        info = get_worker_info()
        assert info is not None
        try:
            state = info.dataset.state_dict()  # type: ignore[attr-defined]  # checked by StreamSource.saves
            text = json.dumps([state, _random_state()]) if state else ""
            if text and json.loads(text)[0] != state:
                text = ""  # JSON changes it: keys that are numbers, tuples, NaN
        except (TypeError, ValueError):
            text = ""
        self._saves = 0 < len(text) <= _MOST_STATE
        return text if self._saves else ""


class _Start:
    """The user's ``worker_init_fn``; then the data set goes on from a saved state.

    Args:
        is_another: whether it runs in a child of the process that iterates.
    """

    def __init__(self, init: Callable[[int], None] | None, state: str, *, is_another: bool) -> None:
        self._init, self._state, self._is_another = init, state, is_another

    def __call__(self, worker: int) -> None:
        if self._is_another:
            die_with_parent()
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        if self._state and info is not None:
            state, random = json.loads(self._state)
            info.dataset.load_state_dict(state)  # type: ignore[attr-defined]  # it was saved by it
            _restore_random(random)


def _random_state() -> dict[str, Any]:
    """The random state of this process, as JSON."""
    states = random_states()
    numpy = states.get("numpy")
    return {
        "python": states["python"],
        "torch": states["torch"].tolist(),
        "numpy": None if numpy is None else [numpy[0], numpy[1].tolist(), *numpy[2:]],
    }


def _restore_random(saved: dict[str, Any]) -> None:
    """Restore the random state that ``_random_state`` returned."""
    version, words, gauss = saved["python"]
    states: dict[str, Any] = {
        "python": (version, tuple(words), gauss),
        "torch": torch.tensor(saved["torch"], dtype=torch.uint8),
    }
    if saved["numpy"] is not None:
        states["numpy"] = tuple(saved["numpy"])
    restore_random_states(states)


def _loses_samples(dataset: Any) -> bool:
    """Whether its state leaves out samples that it has read and not given yet.

    Two parts of Hugging Face's data sets do, at any depth: a shuffle buffer is refilled from the
    position where reading stopped, and a map over batches of tables may skip a batch, as their
    ``state_dict`` documents. Can be removed once it saves both.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPass:
    """One pass over a user's data set, to be read in a process of its own.

    Attributes:
        size: samples of a mini-batch; None: the data set gives whole batches.
        seed: of this pass; own_seed: of the loader's generator, if it has one.
        prefetch: batches that each of torch's loader workers fetches ahead.
        reads_itself: whether the process that iterates is the loader worker.
    """

    dataset: Any
    collate: _Collated
    begin: _Start
    size: int | None
    drop_last: bool
    num_workers: int
    prefetch: int | None
    timeout_s: float
    seed: int
    own_seed: int | None
    context: Any
    reads_itself: bool

    def __iter__(self) -> Iterator[tuple[int, Any, str]]:
        """Begin the pass; this process is used for nothing else from now on."""
        seed_all(self.seed)
        has_own = self.own_seed is not None
        generator = torch.Generator().manual_seed(self.own_seed or 0) if has_own else None
        options: dict[str, Any] = {"generator": generator}
        if self.reads_itself:
            self._be_the_loader_worker(generator)
            options["generator"] = torch.Generator()  # torch draws a seed from it, unused here
        else:
            options |= {
                "num_workers": self.num_workers, "prefetch_factor": self.prefetch,
                "timeout": self.timeout_s, "worker_init_fn": self.begin,
                "multiprocessing_context": self.context,
            }  # fmt: skip
        return iter(DataLoader(
            self.dataset, self.size, drop_last=self.drop_last, collate_fn=self.collate, **options
        ))  # fmt: skip

    def _be_the_loader_worker(self, generator: torch.Generator | None) -> None:
        """Set up this process as torch does a loader worker: one thread, own seeds, a WorkerInfo.

        Source: ``torch/utils/data/_utils/worker.py``, ``_worker_loop``.
        """
        torch.set_num_threads(1)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        seed_all(seed)
        info = worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=self.dataset)
        worker._worker_info = info
        self.begin(0)


class StreamSource:
    """Makes the passes over a user's loader with an iterable data set.

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
    def reads_itself(self) -> bool:
        """Whether no queue lies behind the data set; a loader's timeout needs torch's queue."""
        return self.num_workers == 1 and not self._loader.timeout

    @property
    def saves(self) -> bool:
        """Whether the data set can save its position, so that nothing has to be read again."""
        dataset = self._loader.dataset
        if _loses_samples(dataset):
            return False
        can = all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))
        return can and self.num_workers == 1

    @property
    def num_prefetched(self) -> int:
        """Mini-batches that the user's loader workers fetch ahead."""
        return self.num_workers * (self._loader.prefetch_factor or 2)

    def of(self, epoch: int, state: str) -> StreamPass:
        """One pass, from a saved state of the data set; empty: from its beginning."""
        user, seed = self._loader, mix(self._seed, epoch, _STREAM_SALT)
        own = user.generator if isinstance(user.generator, torch.Generator) else None
        reads_itself = self.reads_itself
        return StreamPass(
            dataset=user.dataset,
            collate=_Collated(user, self._size, saves=self.saves, packs=not reads_itself),
            begin=_Start(user.worker_init_fn, state, is_another=not reads_itself),
            size=self._size,
            drop_last=user.drop_last and self._size is not None,
            num_workers=self.num_workers,
            prefetch=user.prefetch_factor,
            timeout_s=user.timeout,
            seed=seed,
            own_seed=None if own is None else mix(own.initial_seed(), seed),
            context=user.multiprocessing_context,
            reads_itself=reads_itself,
        )


def mini_batch(loader: DataLoader[Any], parts: int, *, is_global: bool) -> int | None:
    """Samples of a mini-batch; None: the data set gives whole batches.

    Raises:
        ConfigError: a batch cannot be split into ``parts`` mini-batches.
    """
    size = loader.batch_size
    if getattr(loader, "in_order", True) is False:
        raise ConfigError(
            "the loader has in_order=False, but a stream's mini-batches are numbered in order: "
            "leave it out"
        )
    if size is None and is_global and parts > 1:
        raise ConfigError(
            f"the loader has batch_size=None: its data set makes the batches, and each would have "
            f"to be split into {parts} mini-batches; to use each as one mini-batch: "
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
