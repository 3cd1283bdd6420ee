"""Processes beside this one that do what a run's other workers do, while costs are measured.

    this process   rank 0         measures each piece of the model         what all do together
    neighbours     rank 1 .. n-1  compute the whole model all the time     (exchanges.py)

    all, in rounds                a step each, then all meet: where they are more than the cores

So what several processes take from each other on one machine, memory above all, is in what is
measured. A neighbour makes the model anew by its name, and ends with this process: its connection
breaks. This module must not know what is measured.
"""

import base64
import datetime
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from ..splits.clocks import step_once, threads
from ..tuning.allocator import keep, may_keep
from .exchanges import ExchangeCosts, NeighbourGroup, measure, round_s
from .split_models import SplitQuestion, find_model

MOST_NEIGHBOURS = 3
"""More of them would take longer to begin than all that is measured."""
_PATIENCE = datetime.timedelta(seconds=90)
_LONGEST = datetime.timedelta(hours=2)
"""Of what is measured beside; where this process has died, its connection breaks at once."""
_LOOK_S = 0.02
_END_S = 20.0
"""Until one that was told to end is killed; it ends later where many processes compute."""
_ENOUGH_S = 0.05
"""A neighbour computes for so long before anything is measured beside it."""


class Neighbours:
    """This process's side.

    Args:
        size: all processes, this one included.
        computing: of them, that compute at the same time.
    """

    def __init__(
        self, question: SplitQuestion, size: int, computing: int, own_threads: int
    ) -> None:
        self._size, self._computing, self._turn = size, computing, 0
        self._threads = own_threads
        self._store: Any = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=_PATIENCE)
        asked = base64.b64encode(pickle.dumps((question, computing, own_threads))).decode()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._store.port), str(rank), str(size)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(1, size)
        ]  # fmt: skip
        for one in self.processes:
            assert one.stdin is not None
            with suppress(BrokenPipeError):
                one.stdin.write(asked + "\n")
                one.stdin.flush()

    def are_there(self) -> bool:
        """Whether all have made the model; waits until that is known."""
        for rank, one in enumerate(self.processes, start=1):
            while not self._store.check([f"here {rank}"]):
                if one.poll() is not None:
                    return False
                time.sleep(_LOOK_S)
        self._group = dist.ProcessGroupGloo(self._store, 0, self._size, _PATIENCE)
        return True

    def exchanges(self) -> ExchangeCosts:
        """Measured, while nobody computes the model."""
        self._say("exchange")
        with threads(self._threads):
            return measure(NeighbourGroup(self._group))

    @contextmanager
    def compute(self, batch_size: int) -> Iterator[None]:
        """They compute meanwhile, as many samples each."""
        turn = self._say(f"compute {batch_size}")
        for rank in range(1, self._computing):
            self._store.wait([f"computes {turn} {rank}"], _PATIENCE)
        try:
            yield
        finally:
            self._store.set(f"enough {turn}", "1")

    def taking_turns(self, batch_size: int, step: Callable[[], object], times: int) -> float:
        """How many times as long a step takes all as it would if they shared the cores for nothing:
        1.0 where each has its own, more where their memory and the cores' caches are in turns.

        Args:
            step: this process's own, of so many samples.
            times: that it is measured.
        """
        if self._size <= self._computing:
            return 1.0
        few_s, all_s = (
            self._round_s(f"round {batch_size} {times} {num}", step, times)
            for num in (self._computing, self._size)
        )
        return max(1.0, all_s / few_s * self._computing / self._size)

    def _round_s(self, word: str, step: Callable[[], object], times: int) -> float:
        self._say(word)
        return round_s(NeighbourGroup(self._group), step, times)

    def _say(self, word: str) -> int:
        self._turn += 1
        self._store.set(f"turn {self._turn}", word)
        return self._turn

    def close(self) -> None:
        self._say("end")
        for one in self.processes:
            try:
                one.wait(_END_S)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
            assert one.stdin is not None
            with suppress(BrokenPipeError):
                one.stdin.close()


@contextmanager
def neighbours(
    question: SplitQuestion, places: float, own_threads: int
) -> Iterator[Neighbours | None]:
    """Those of a run of so many workers; None: it has one, or the model cannot be made in another
    process (its module is not found there).

    Args:
        places: workers that compute at the same time.
        own_threads: of each.
    """
    size = min(question.num_workers, 1 + MOST_NEIGHBOURS)
    if size < 2:
        yield None
        return
    found = Neighbours(question, size, min(max(1, int(places)), size), own_threads)
    try:
        yield found if found.are_there() else None
    finally:
        found.close()


def _serve(port: int, rank: int, size: int) -> None:
    """A neighbour's life."""
    question, computing, own_threads = pickle.loads(base64.b64decode(sys.stdin.readline()))
    torch.set_num_threads(own_threads)
    if may_keep():
        keep(True)
    store: Any = TCPStore("127.0.0.1", port, None, is_master=False, timeout=_PATIENCE)
    subject = find_model(question)
    model = subject.model.train()
    store.set(f"here {rank}", "1")
    group = dist.ProcessGroupGloo(store, rank, size, _PATIENCE)
    turn = 0
    while True:
        turn += 1
        store.wait([f"turn {turn}"], _LONGEST)
        word, *numbers = store.get(f"turn {turn}").decode().split()
        if word == "end":
            return
        if word == "exchange":
            measure(NeighbourGroup(group))
            continue
        inputs = subject.inputs(int(numbers[0]))
        step = partial(step_once, partial(model, *inputs), model)
        if word == "round":
            times, num = map(int, numbers[1:])
            round_s(NeighbourGroup(group), step if rank < num else lambda: None, times)
            continue
        if rank >= computing:
            continue
        begin_s, is_told = time.perf_counter(), False
        while not store.check([f"enough {turn}"]):
            step()
            if not is_told and time.perf_counter() - begin_s > _ENOUGH_S:
                store.set(f"computes {turn} {rank}", "1")
                is_told = True


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
