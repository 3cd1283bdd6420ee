"""Workers of a split model as threads of one process, over real gloo.

Each thread has groups and a module of its own. It must not know what tests assert.
"""

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.exchange.group import Messages, Pending, TorchGroup, plain
from paceline.splits.tracing import TracedModel
from paceline.spread import cut
from paceline.spread.group import PeerGroup, Ranks

_PATIENCE = datetime.timedelta(seconds=30)
Result = TypeVar("Result")


class ThreadGroup(TorchGroup, PeerGroup):
    """Some of the threads, by their numbers among them."""

    patience = _PATIENCE

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.size = list(ranks).index(rank), len(ranks)
        self._store = dist.PrefixStore(name, store)
        self._gloo: Any = dist.ProcessGroupGloo(self._store, self.rank, self.size, _PATIENCE)

    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return Messages([self._gloo.send([plain(tensor)], peer, tag)], self.patience)

    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return Messages([self._gloo.recv([plain(tensor)], peer, tag)], self.patience)

    def share(self, tensor: Tensor) -> Any:
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        return self._gloo.broadcast([tensor], options)

    def _of(self, tensor: Tensor) -> Any:
        return self._gloo


def in_threads(size: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """The results of ``work`` in each of this number of threads; an error in one is raised.

    Tracing is serialized, because torch.fx changes modules for the whole process.
    """
    turns, lock, own_trace = threading.Barrier(size), threading.Lock(), cut.trace

    def trace(module: nn.Module, inputs: Sequence[Tensor]) -> TracedModel:
        turns.wait(30)
        with lock:
            found = own_trace(module, inputs)
        turns.wait(30)
        return found

    main = dist.TCPStore("127.0.0.1", 0, None, True, _PATIENCE, wait_for_workers=False)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", main.port, None, False, _PATIENCE)

    def run(rank: int) -> None:
        try:
            store = connect()
            everyone = ThreadGroup(store, "all", rank, range(size))
            results[rank] = work(Ranks(
                everyone=everyone,
                part=lambda name, ranks: ThreadGroup(store, name, rank, ranks),
                words=connect,
                share=everyone.share,
            ))  # fmt: skip
        except BaseException as error:
            errors.append(error)
            turns.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    cut.trace = trace
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    cut.trace = own_trace
    if errors:
        raise errors[0]
    assert not any(one.is_alive() for one in threads), "a worker waits for the others"
    return results


def close_to(one: Tensor, other: Tensor, within: float = 1e-10) -> bool:
    return bool(torch.allclose(one, other, rtol=within, atol=within))
