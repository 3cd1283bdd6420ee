"""One worker: the plain loop against the same with ``--fast auto``, in turn.

    python bench/fast.py [--only lenet] [--rounds 24] [--updates 200] [--write]

The loop that everybody writes, the same with the four lines and ``fast="auto"`` (nothing is
remembered from before), and the plain loop again (A/A), each in a process of its own, since some of
what is found is a setting of the process. After the trial and the first, compiling steps they take
blocks of steps in turn, in every order as often, the others asleep; several times in new processes,
since each has a speed of its own (what lies where in its memory). Then 200 updates from the same
parameters on the same batches: the largest difference of the losses, beside what rounding alone
does, the plain loop with the samples of each batch in reverse. All cores, batch 256,
Fashion-MNIST's shape, fp32. Writes results/fast.md.
"""

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from overhead import make_data, ratios
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

BATCH, LEARNING_RATE = 256, 0.05
BLOCKS = {"lenet": 5, "mlp": 5, "resnet18": 1}
"""Network -> steps a block."""
WANTED = {"lenet": 1.4, "mlp": 0.99, "resnet18": 0.99}
NUM_LIVES = 4
"""New processes that all blocks are shared out over."""
MOST_GAP = 1e-4
Step = Callable[[], Tensor]
loss_of = nn.functional.cross_entropy


def parts(name: str, data: ArrayDataset) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = load_task(name, 1, "default").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, DataLoader(data, batch_size=BATCH, collate_fn=collate_batch)


class Plain:
    """What everybody writes."""

    notes: tuple[str, ...] = ()

    def __init__(self, name: str, data: ArrayDataset) -> None:
        self.threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)
        self.step = self._loop(*parts(name, data)).__next__

    def turned(self, batch: Any) -> Any:
        """The batch that it computes on."""
        return batch

    def _loop(self, model: nn.Module, optimizer: Any, loader: Any) -> Iterator[Tensor]:
        while True:
            for inputs, targets in map(self.turned, loader):
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                yield loss.detach()


class Reversed(Plain):
    """The same sums in another order: what of a difference is rounding."""

    def turned(self, batch: Any) -> Any:
        return tuple(one.flip(0) for one in batch)


class Fast:
    """The same with the four lines."""

    def __init__(self, name: str, data: ArrayDataset, fast: str = "auto") -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        pace = Pace(SoloExchange(), Context())
        model, optimizer, loader = pace.prepare(*parts(name, data), fast=fast)
        self.threads = torch.get_num_threads()
        assert pace._prepared is not None
        self.notes = pace._prepared.settled.notes
        self.step = self._loop(pace, model, optimizer, loader).__next__

    def _loop(self, pace: Pace, model: nn.Module, optimizer: Any, loader: Any) -> Iterator[Tensor]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss = loss_of(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                yield loss.detach()


class Seat:
    """A loop in a process of its own, so that what is set for a process is set for it alone.

    Attributes:
        said: what it found when it began.
    """

    def __init__(self, kind: type[Plain] | type[Fast], name: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other, kind, name))
        self._process.start()
        other.close()
        self.said: dict[str, Any] = self._pipe.recv()

    def block_s(self, num_steps: int) -> float:
        """Seconds a step, over so many."""
        self._pipe.send(("block", num_steps))
        return float(self._pipe.recv())

    def losses(self, num_updates: int) -> list[float]:
        """Of so many updates of a loop that begins anew; what was found is remembered now."""
        self._pipe.send(("losses", num_updates))
        return list(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Any, kind: type[Plain] | type[Fast], name: str) -> None:
    """In the loop's process."""
    data = make_data(BATCH * 40)
    start_s = time.perf_counter()
    loop = kind(name, data)
    made_s = time.perf_counter()
    loop.step()
    first_s = time.perf_counter() - made_s
    pipe.send({"notes": loop.notes, "trial": made_s - start_s, "first": first_s})
    while (asked := told(pipe)) is not None:
        what, count = asked
        if what == "losses":
            loop = kind(name, data)
        start_s = time.perf_counter()
        losses = [loop.step() for _ in range(count)]
        spent_s = time.perf_counter() - start_s
        pipe.send(spent_s / count if what == "block" else [float(one) for one in losses])


def told(pipe: Any) -> tuple[str, int] | None:
    """What is asked next; None: nothing any longer."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]  # what the other end sends
    except EOFError:
        return None


def measure(name: str, rounds: int, updates: int) -> dict[str, Any]:
    """The seconds of all blocks, what was found, and the losses' difference."""
    kinds: dict[str, type[Plain] | type[Fast]] = {"fast": Fast, "bare": Plain, "bare again": Plain}
    times: dict[str, list[float]] = {one: [] for one in kinds}
    said: dict[str, Any] = {}
    orders = itertools.cycle(itertools.permutations(kinds))
    for _ in range(NUM_LIVES):
        seats = {one: Seat(kind, name) for one, kind in kinds.items()}
        said = said or seats["fast"].said
        for number in range(1 + rounds // NUM_LIVES):
            for one in next(orders) if number else kinds:
                seconds = seats[one].block_s(BLOCKS[name])
                if number:
                    times[one].append(seconds)
        for seat in seats.values():
            seat.close()
    updates = updates if BLOCKS[name] > 1 else updates // 40
    plain, fast, turned = (losses(kind, name, updates) for kind in (Plain, Fast, Reversed))
    return {
        "times": times, "updates": updates, **said,
        "gap": _gap(plain, fast), "rounding": _gap(plain, turned),
    }  # fmt: skip


def losses(kind: type[Plain] | type[Fast], name: str, num_updates: int) -> list[float]:
    """Of so many updates, in a process of its own."""
    seat = Seat(kind, name)
    found = seat.losses(num_updates)
    seat.close()
    return found


def _gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def row(name: str, found: dict[str, Any]) -> list[str]:
    times = {key: [1000 * one for one in values] for key, values in found["times"].items()}
    gains = {
        "fast": [1 / one for one in ratios(times, "fast")],
        "bare again": [1 / one for one in ratios(times, "bare again")],
    }
    middle, low, high = interval(gains["fast"])
    same, same_low, same_high = interval(gains["bare again"])
    is_same = found["gap"] <= max(MOST_GAP, found["rounding"])
    is_reached = middle >= WANTED[name] and is_same
    verdict = "yes" if is_reached else "no"
    if not same_low <= 1.0 <= same_high:
        verdict = "not told: plain again is off 1"
    return [
        f"{name}, {BATCH}", spread(times["bare"]), spread(times["fast"]),
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
        f"{same:.3f} ({same_low:.3f} to {same_high:.3f})",
        f"{found['gap']:.1e} over {found['updates']}", f"{found['rounding']:.1e}",
        f"{found['trial']:.0f}",
        f"{found['first']:.0f}", f">= {WANTED[name]}", verdict,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--updates", type=int, default=200, help="on which losses are compared")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    header = [
        "network, batch", "plain ms a step", "fast ms a step", "plain : fast (95 % interval)",
        "plain : plain again", "largest difference of losses, updates",
        "of rounding alone", "trial s",
        "first step s (compiles)", "wanted", "reached",
    ]  # fmt: skip
    rows, said = [], []
    for name in BLOCKS:
        if options.only not in name:
            continue
        rounds = options.rounds if BLOCKS[name] > 1 else max(NUM_LIVES, options.rounds // 3)
        with tempfile.TemporaryDirectory() as folder:
            # Nothing is remembered from before, and nothing is compiled.
            os.environ["XDG_CACHE_HOME"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            found = measure(name, rounds, options.updates)
        rows.append(row(name, found))
        said += [f"    {name}: {line}" for line in found["notes"][:-1]]
        print(" | ".join(rows[-1]), *found["notes"], sep="\n", flush=True)
    if options.write:
        note = "\n".join(["What was found:", "", *said, "", note])
        write_table("fast", "One worker with --fast auto", header, rows, note)


if __name__ == "__main__":
    main()
