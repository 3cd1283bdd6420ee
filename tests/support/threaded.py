"""Workers of a split model as threads of one process, over real gloo.

Each thread has groups and a module of its own. It must not know what tests assert.
"""

import datetime
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.exchange.group import TorchGroup
from paceline.exchange.mapped import mapped
from paceline.spread import cut, layered
from paceline.spread.group import Ranks

_PATIENCE = datetime.timedelta(seconds=30)
Result = TypeVar("Result")


class ThreadGroup(TorchGroup):
    """Some of the threads, by their numbers among them."""

    patience = _PATIENCE

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.size = list(ranks).index(rank), len(ranks)
        self._store = dist.PrefixStore(name, store)
        self._gloo: Any = dist.ProcessGroupGloo(self._store, self.rank, self.size, _PATIENCE)

    def share(self, tensor: Tensor) -> Any:
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        return self._gloo.broadcast([tensor], options)

    def close(self) -> None:
        """End gloo's threads, which would wake up a hundred times a second for good."""
        del self._gloo

    def _of(self, tensor: Tensor) -> Any:
        return self._gloo


def in_threads(size: int, work: Callable[[Ranks], Result], *, is_near: bool = True) -> list[Result]:
    """The results of ``work`` in each of this number of threads; an error in one is raised.

    Tracing is serialized, because torch.fx changes modules for the whole process, and whether a
    model is random shows in the generators of the process.
    """
    turns, lock = threading.Barrier(size), threading.Lock()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            turns.wait(30)
            with lock:
                result = function(*args)
            turns.wait(30)
            return result

        return call

    main = dist.TCPStore("127.0.0.1", 0, None, True, _PATIENCE, wait_for_workers=False)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    groups: list[ThreadGroup] = []

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", main.port, None, False, _PATIENCE)

    def meet(store: Any, name: str, rank: int, ranks: Sequence[int]) -> ThreadGroup:
        groups.append(group := ThreadGroup(store, name, rank, ranks))
        return group

    def run(rank: int) -> None:
        try:
            store = connect()
            everyone = meet(store, "all", rank, range(size))
            results[rank] = work(Ranks(
                everyone=everyone,
                part=lambda name, ranks: meet(store, name, rank, ranks),
                near=partial(mapped, check=lambda: None) if is_near else lambda group: group,
                words=connect,
                share=everyone.share,
            ))  # fmt: skip
        except BaseException as error:
            errors.append(error)
            turns.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "trace", in_turn(cut.trace))
        patch.setattr(layered, "_is_random", in_turn(layered._is_random))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for group in groups:
        group.close()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker waits for the others"
    return results


def close_to(one: Tensor, other: Tensor, within: float = 1e-10) -> bool:
    return bool(torch.allclose(one, other, rtol=within, atol=within))
