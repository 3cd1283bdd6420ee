"""The ranks of a measurement of collectives, each in a process of its own.

    Seats                 calls the same in all; the slowest one's time counts; blocks take turns
    CollectiveSeat x P    in each process: times repeated calls

Buffers hold zeros, so repeated sums do not overflow. This module must not know what the times are
compared with.
"""

import contextlib
import datetime
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # no stubs

from ..collectives import parse
from ..collectives.host import Curve, HostCost, RoundOfKind, kinds_of
from ..collectives.transfers import Action, Operation
from ..engines.torchrun.symmetric_memory import SymmetricGroup
from ..errors import WorkerError
from ..exchange import SHARED
from ..exchange.group import MemberGroup, TorchGroup
from ..exchange.scheduled import ScheduledCollective, along
from ..plan import format_bytes
from .apart import Answer, Apart
from .clock import elapsed_s
from .samples import Timing, take_turns

NATIVE = "gloo"
HAVE_NATIVE = (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE)
_PATIENCE = datetime.timedelta(seconds=60)
_BLOCK_S, _MOST_CALLS = 0.1, 300
_MESSAGES_BYTES: Final = tuple(1 << power for power in (6, 10, 13, 16, 18, 20, 22, 24))
"""Sizes of a message: on loopback, its time changes slope between these."""
_NUM_TURNS = 3
"""Blocks of each kind of round."""
_SIDE = 128
"""Size of the matrices multiplied meanwhile: some 0.1 ms a product, like a small layer."""
_COVERS = 2.0
"""Computation during a sum, as a multiple of the sum's time: enough to hide all of it."""
_LEAST_S = 1e-7


class CollectiveSeat:
    """One rank, created by `Apart` in a process of its own.

    Args:
        meeting: path of a file that only these ranks use.
    """

    def __init__(self, rank: int, num_ranks: int, meeting: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._size = rank, num_ranks
        self._made: dict[str, ScheduledCollective] = {}
        self._groups: dict[str, MemberGroup] = {}
        store = FileStore(meeting, num_ranks)  # a URL would end at a # or ? in the path
        store.set_timeout(_PATIENCE)
        dist.init_process_group(
            NATIVE, store=store, rank=rank, world_size=num_ranks, timeout=_PATIENCE
        )

    def calls(self, name: str, operation: str, num_bytes: int, count: int) -> Answer:
        """Time ``count`` calls of a collective, one after another."""
        kind = Operation(operation)
        blocks = self._size if kind is Operation.ALL_TO_ALL else 1
        _, call = self._prepared(name, kind, num_bytes // 4 * blocks)
        return self._timed(call, count)

    def rounds(self, kind: str, action: str, num_bytes: int, count: int) -> Answer:
        """Time ``count`` runs of rounds of one `RoundOfKind`, with messages of ``num_bytes``."""
        rounds = ScheduledCollective(RoundOfKind(self._size, kind, Action(action)))
        buffer = torch.zeros(num_bytes // 4 * self._size)
        return self._timed(lambda: rounds.all_reduce(buffer), count)

    def beside(self, name: str, num_bytes: int, products: int, count: int) -> Answer:
        """Time ``count`` times ``products`` matrix products during a sum.

        Args:
            name: the collective that sums; "": no sum.
        """
        buffer, square = torch.zeros(num_bytes // 4), torch.zeros(_SIDE, _SIDE)
        if name and name not in self._groups:
            self._groups[name] = along(name, TorchGroup(), is_apart=True)

        def call() -> None:
            pending = self._groups[name].all_reduce(buffer) if name else None
            for _ in range(products):
                torch.mm(square, square)
            if pending is not None:
                pending.wait()

        return self._timed(call, count)

    def copy(self, num_bytes: int) -> Answer:
        """Time copying one buffer to another."""
        target, source = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        return self._timed(lambda: target.copy_(source), 5)

    def check(self, name: str) -> Answer:
        """Return whether the collective's all-reduce is correct."""
        buffer, call = self._prepared(name, Operation.ALL_REDUCE, self._size + 1)
        buffer.fill_(float(self._rank + 1))
        call()
        return {"is_right": bool((buffer == self._size * (self._size + 1) / 2).all())}

    def can_share(self) -> Answer:
        """Return whether this process can map the others' memory."""
        refusals = list[str]()
        SymmetricGroup(TorchGroup(), refusals.append, lambda: None).zeros(4)
        return {"can": not refusals}

    def close(self) -> Answer:
        """Leave the group."""
        dist.destroy_process_group()
        return {}

    def _timed(self, call: Callable[[], object], count: int) -> dict[str, Any]:
        call()
        dist.barrier()
        return {"seconds": elapsed_s(call, count) / count}

    def _prepared(
        self, name: str, operation: Operation, count: int
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return ``count`` zeros of this rank, and a function that does the operation on them."""
        if name == SHARED:
            group = SymmetricGroup(TorchGroup(), _refuse, lambda: None)
            mapped = group.zeros(4 * count).view(torch.float32)
            return mapped, lambda: group.all_reduce(mapped).wait()
        buffer = torch.zeros(count)
        if name == NATIVE:
            return buffer, self._native(operation, buffer)
        collective = self._made.setdefault(name, ScheduledCollective(parse(name, self._size)))
        return buffer, lambda: collective.run(buffer, operation)

    def _native(self, operation: Operation, buffer: Tensor) -> Callable[[], object]:
        if operation is Operation.ALL_REDUCE:
            return lambda: dist.all_reduce(buffer)
        if operation is Operation.BROADCAST:
            return lambda: dist.broadcast(buffer, src=0)
        return lambda: dist.reduce(buffer, dst=0)


def _refuse(why: str) -> None:
    raise WorkerError(why)


class Seats(contextlib.ExitStack):
    """All ranks of a measurement.

    Args:
        size: how many.

    Raises:
        WorkerError: from any of its methods: a process died.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._seats: list[Apart] = []

    def __enter__(self) -> Self:
        super().__enter__()
        meeting = Path(self.enter_context(tempfile.TemporaryDirectory())) / "meeting"
        for rank in range(self._size):
            seat = Apart(
                f"{CollectiveSeat.__module__}:{CollectiveSeat.__name__}",
                {"rank": rank, "num_ranks": self._size, "meeting": str(meeting)},
                {"OMP_NUM_THREADS": "1"},
            )
            self._seats.append(self.enter_context(seat))
        return self

    def leave(self) -> None:
        """Let all ranks leave the group before their processes end."""
        self._all("close")

    def can_share(self) -> bool:
        """Return whether all ranks can map each other's memory."""
        return all(answer["can"] for answer in self._all("can_share"))

    def adds_up(self, name: str) -> bool:
        """Return whether this collective's all-reduce is correct in every rank."""
        return all(answer["is_right"] for answer in self._all("check", name=name))

    def copy_bytes_per_s(self, num_bytes: int) -> float:
        """Return the bytes a second that a process copies while the others also copy."""
        each_s = [float(answer["seconds"]) for answer in self._all("copy", num_bytes=num_bytes)]
        return num_bytes / statistics.median(each_s)

    def times(
        self, names: Sequence[str], operation: Operation, num_bytes: int, num_rounds: int
    ) -> Mapping[str, Timing]:
        """Return, by name, the timing of a call of each collective."""
        word = operation.value
        return take_turns(
            {
                name: self._block("calls", name=name, operation=word, num_bytes=num_bytes)
                for name in names
            },
            num_rounds,
        )

    def cost(self, largest_bytes: int, say: Callable[[str], None]) -> HostCost:
        """Measure the cost of each kind of round, with messages up to ``largest_bytes``."""
        keys = [(kind, action) for kind in kinds_of(self._size) for action in Action]
        curves: dict[tuple[str, Action], Curve] = dict.fromkeys(keys, ())
        smaller = takewhile(lambda size: size < largest_bytes, _MESSAGES_BYTES[:-1])
        for num_bytes in [*smaller, min(largest_bytes, _MESSAGES_BYTES[-1])]:
            say(f"messages of {format_bytes(num_bytes)}")
            blocks = {
                " ".join((kind, action.value)): self._block(
                    "rounds", kind=kind, action=action.value, num_bytes=num_bytes
                )
                for kind, action in keys
            }
            timings = take_turns(blocks, _NUM_TURNS)
            for kind, action in keys:
                call_s = timings[" ".join((kind, action.value))].median_s
                round_s = call_s / RoundOfKind(self._size, kind, action).num_rounds
                curves[kind, action] = (*curves[kind, action], (num_bytes, round_s))
        return HostCost(num_ranks=self._size, rounds=curves)

    def beside(
        self,
        names: Sequence[str],
        cost: HostCost,
        alone_s: Mapping[int, float],
        num_rounds: int,
    ) -> dict[str, Curve]:
        """Return the seconds that a running all-reduce adds to computation, see `HostCost`.

        Measured are torch's own all-reduce, and each of ``names`` that is the fastest at some size.

        Args:
            alone_s: bytes -> seconds of torch's own all-reduce without computation.
        """

        def seconds(name: str, num_bytes: int) -> float:
            return cost.seconds(parse(name, self._size), Operation.ALL_REDUCE, num_bytes)

        best = {min(names, key=lambda name: seconds(name, size)) for size in alone_s}
        curves: dict[str, Curve] = {}
        for num_bytes, native_s in alone_s.items():
            added_s = self._added_s(["native", *sorted(best)], num_bytes, native_s, num_rounds)
            for name, samples_s in added_s.items():
                cost_s = max(_LEAST_S, min(samples_s) if name == "native" else max(samples_s))
                curves[name] = (*curves.get(name, ()), (num_bytes, cost_s))
        return curves

    def _added_s(
        self, names: Sequence[str], num_bytes: int, alone_s: float, num_rounds: int
    ) -> dict[str, list[float]]:
        """Return, for each collective, the seconds that it adds in each round."""
        product_s = self._slowest_s("beside", name="", num_bytes=4, products=10, count=10) / 10
        products = max(1, round(_COVERS * alone_s / product_s))
        blocks = {
            name: self._block("beside", name=name, num_bytes=num_bytes, products=products)
            for name in ("", *names)
        }
        timings = take_turns(blocks, num_rounds)
        bare_s = timings.pop("").samples_s
        return {
            name: [total - bare for total, bare in zip(timing.samples_s, bare_s, strict=True)]
            for name, timing in timings.items()
        }

    def _block(self, method: str, **arguments: object) -> Callable[[], float]:
        """Return a function that gives the seconds of one call, from a block of about 0.1 s."""
        once_s = self._slowest_s(method, count=1, **arguments)
        count = max(1, min(_MOST_CALLS, int(_BLOCK_S / max(once_s, 1e-9))))
        return lambda: self._slowest_s(method, count=count, **arguments)

    def _slowest_s(self, method: str, **arguments: object) -> float:
        return max(float(answer["seconds"]) for answer in self._all(method, **arguments))

    def _all(self, method: str, **arguments: object) -> list[Answer]:
        """Call a method in all ranks at once and return their results by rank."""
        for seat in self._seats:
            seat.begin(method, **arguments)
        return [seat.end() for seat in self._seats]
