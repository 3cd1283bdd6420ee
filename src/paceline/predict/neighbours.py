"""Runs processes that do what a run's other workers would do, while this one measures costs.

    this process   rank 0         measures each piece of the model         the exchanges of all
    neighbours     rank 1 .. n-1  compute the whole model all the time     (exchanges.py)

    all, in rounds                a step each, then all meet

So the measured costs include what several processes take from each other on one machine, above all
memory bandwidth. A neighbour makes the model from its name, and ends with this process because its
connection breaks. This module must not know what is measured. Above 300 lines, since both ends of
the conversation are read together.
"""

import base64
import datetime
import os
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
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from ..errors import LinkError
from ..exchange.group import PeerGroup, TorchGroup
from ..exchange.mapped import mapped
from ..splits.clocks import step_once, threads
from ..system.interpreter import safe_path_flag
from ..tuning.allocator import keep, may_keep
from .exchanges import ExchangeCosts, measure, round_s
from .split_models import SplitQuestion, find_model

MOST_NEIGHBOURS = 3
"""More would take longer to start than the whole measurement."""
_TIMEOUT = datetime.timedelta(seconds=90)
_LONGEST = datetime.timedelta(hours=2)
"""Limit of a measurement; if this process dies, its connection breaks at once."""
_POLL_S = 0.02
_START_S = 300.0
"""A neighbour that has not made the model by then is killed, and the model is measured alone."""
_END_S = 20.0
"""A neighbour that does not end within this time is killed; many that compute end slowly."""
_EXIT_S = 1.0
"""How long after its connection broke a process may take to be gone."""
_WARM_UP_S = 0.05
"""How long a neighbour computes before anything is measured beside it."""


class Neighbours:
    """Starts the neighbours and tells them what to do.

    Args:
        size: number of processes, this one included.
        computing: how many of them compute at the same time.
        own_threads: threads of each.
    """

    def __init__(
        self, question: SplitQuestion, size: int, computing: int, own_threads: int
    ) -> None:
        self.size, self._computing, self._turn = size, computing, 0
        self._threads = own_threads
        self._store: Any = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=_TIMEOUT)
        self.processes: list[subprocess.Popen[str]] = []
        self._start()
        request = base64.b64encode(pickle.dumps((question, computing, own_threads))).decode()
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()

    def _start(self) -> None:
        """Start all processes, or none.

        Raises:
            LinkError: a process cannot be started.
        """
        for rank in range(1, self.size):
            command = [
                sys.executable, *safe_path_flag(), "-m", __name__, str(self._store.port),
                str(rank), str(self.size),
            ]  # fmt: skip
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
            except OSError as error:
                self._kill()
                raise LinkError(
                    f"cannot start process {rank} of the {self.size - 1} that compute while the "
                    f"model is measured: {error.strerror or error}; free some memory or processes, "
                    "or ask for fewer workers"
                ) from error
            self.processes.append(process)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # closing flushes what the process has not read
                process.stdin.close()

    def are_there(self) -> bool:
        """Wait until all have made the model, at most ``_START_S``; return whether they have."""
        deadline_s = time.monotonic() + _START_S
        for rank, process in enumerate(self.processes, start=1):
            while not self._store.check([f"here {rank}"]):
                if process.poll() is not None:
                    return False
                if time.monotonic() > deadline_s:
                    self._kill()
                    return False
                time.sleep(_POLL_S)
        with self._losses_named():
            self._group = _near(self._store, 0, self.size, self._refuse_ended)
        return True

    @contextmanager
    def _losses_named(self) -> Iterator[None]:
        """Raise LinkError instead of torch's RuntimeError if a neighbour has ended."""
        try:
            yield
        except RuntimeError:
            deadline_s = time.monotonic() + _EXIT_S
            while time.monotonic() < deadline_s:
                self._refuse_ended()
                time.sleep(_POLL_S)
            raise

    def _refuse_ended(self) -> None:
        """Raise LinkError if a neighbour has ended."""
        for rank, process in enumerate(self.processes, start=1):
            if process.poll() is not None:
                raise LinkError(
                    f"process {rank} of the {self.size - 1} that compute while the model is "
                    f"measured ended (exit status {process.returncode}); free some memory, or ask "
                    "for fewer workers"
                )

    def exchanges(self) -> ExchangeCosts:
        """Return what exchanges cost while no process computes the model."""
        self._send("exchange")
        with threads(self._threads), self._losses_named():
            return measure(self._group)

    @contextmanager
    def compute(self, batch_size: int) -> Iterator[None]:
        """Let the neighbours compute meanwhile, ``batch_size`` samples each."""
        turn = self._send(f"compute {batch_size}")
        deadline_s = time.monotonic() + _TIMEOUT.total_seconds()
        for rank in range(1, self._computing):
            while not self._store.check([f"computes {turn} {rank}"]):
                self._refuse_ended()
                if time.monotonic() > deadline_s:
                    raise LinkError(
                        f"process {rank} of the {self.size - 1} that compute while the model is "
                        f"measured has not computed {batch_size} samples within "
                        f"{_TIMEOUT.total_seconds():.0f} s; ask for fewer workers"
                    )
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            self._store.set(f"enough {turn}", "1")

    def taking_turns(self, batch_size: int, step: Callable[[], object], num_rounds: int) -> float:
        """Return how much longer a step of all takes than if sharing cores cost nothing: a factor.

        It is 1.0 if each has its own core, and more if they share memory bandwidth and caches.

        Args:
            step: this process's own step, of ``batch_size`` samples.
            num_rounds: rounds that are measured.
        """
        if self.size <= self._computing:
            return 1.0
        few_s, all_s = (
            self._round_s(f"round {batch_size} {num_rounds} {count}", step, num_rounds)
            for count in (self._computing, self.size)
        )
        return max(1.0, all_s / few_s * self._computing / self.size)

    def together_s(self, batch_size: int, step: Callable[[], object], num_rounds: int) -> float:
        """Return the seconds until all have made a step and have met, as in data parallelism.

        Args:
            step: as of `taking_turns`.
            num_rounds: rounds of which the median is returned.
        """
        return self._round_s(f"round {batch_size} {num_rounds} {self.size}", step, num_rounds)

    def _round_s(self, order: str, step: Callable[[], object], num_rounds: int) -> float:
        self._send(order)
        with self._losses_named():
            return round_s(self._group, step, num_rounds)

    def _send(self, order: str) -> int:
        """Send an order to all neighbours, and return its number."""
        self._turn += 1
        self._store.set(f"turn {self._turn}", order)
        return self._turn

    def close(self) -> None:
        """End all neighbours."""
        self._send("end")
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


@contextmanager
def neighbours(
    question: SplitQuestion, places: float, own_threads: int
) -> Iterator[Neighbours | None]:
    """Yield neighbours that stand for the other workers of a run, and end them.

    It yields None if the run has one worker, or if another process cannot make the model (it does
    not find its module) or takes too long.

    Args:
        places: workers that compute at the same time.
        own_threads: threads of each.
    """
    size = min(question.num_workers, 1 + MOST_NEIGHBOURS)
    if size < 2:
        yield None
        return
    group = Neighbours(question, size, min(max(1, int(places)), size), own_threads)
    try:
        yield group if group.are_there() else None
    except BaseException:  # raised again; one that waits for a lost one would end late
        group._kill()
        raise
    group.close()


class NeighbourGroup(TorchGroup):
    """The processes that measure together.

    Args:
        gloo: their process group of torch.
    """

    def __init__(self, gloo: Any) -> None:
        self.rank, self.size, self._group = gloo.rank(), gloo.size(), gloo


def _near(store: Any, rank: int, size: int, check: Callable[[], None]) -> PeerGroup:
    """Return the group of all that measure together, as workers of one machine have it."""
    return mapped(NeighbourGroup(dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)), check)


def _end_without(parent: int) -> None:
    """End this process if its parent is gone."""
    if os.getppid() != parent:
        sys.exit(1)


def make_step(forward: Callable[[], Any], model: nn.Module) -> None:
    """Compute new gradients, as an update does."""
    model.zero_grad(set_to_none=True)
    step_once(forward, model)


def _serve(port: int, rank: int, size: int) -> None:
    """Run a neighbour: make the model, then follow orders until the last."""
    question, computing, own_threads = pickle.loads(base64.b64decode(sys.stdin.readline()))
    torch.set_num_threads(own_threads)
    if may_keep():
        keep(True)
    store: Any = TCPStore("127.0.0.1", port, None, is_master=False, timeout=_TIMEOUT)
    subject = find_model(question)
    model = subject.model.train()
    store.set(f"here {rank}", "1")
    parent = os.getppid()
    group = _near(store, rank, size, lambda: _end_without(parent))
    turn = 0
    while True:
        turn += 1
        store.wait([f"turn {turn}"], _LONGEST)
        order, *numbers = store.get(f"turn {turn}").decode().split()
        if order == "end":
            return
        if order == "exchange":
            measure(group)
            continue
        inputs = subject.inputs(int(numbers[0]))
        step = partial(make_step, partial(model, *inputs), model)
        if order == "round":
            num_rounds, count = map(int, numbers[1:])
            round_s(group, step if rank < count else lambda: None, num_rounds)
            continue
        if rank >= computing:
            continue
        begin_s, is_warm = time.perf_counter(), False
        while not store.check([f"enough {turn}"]):
            step()
            if not is_warm and time.perf_counter() - begin_s > _WARM_UP_S:
                store.set(f"computes {turn} {rank}", "1")
                is_warm = True


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
