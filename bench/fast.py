"""One worker: the plain loop against the same with ``--fast auto``, in turn.

    python bench/fast.py [--only lenet] [--rounds 24] [--updates 200] [--write]

The plain loop, the same with the four lines and ``fast="auto"`` (nothing is remembered from
before), and the plain loop again (A/A), each in a process of its own, since some of the settings
found belong to a process. After the trial and the first, compiling steps they take blocks of steps
in turn, each order equally often, while the others sleep; this is repeated in new processes, since
each has a speed of its own (the layout of its memory). Then 200 updates from the same parameters on
the same batches: the largest difference of the losses, compared with that of rounding alone, the
plain loop with the samples of each batch in reverse. All cores, batch 256, Fashion-MNIST's shape,
fp32. Writes results/fast.md.
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
"""Network -> steps of a block."""
WANTED = {"lenet": 1.4, "mlp": 0.99, "resnet18": 0.99}
NUM_LIVES = 4
"""New processes over which all blocks are distributed."""
MOST_GAP = 1e-4
Step = Callable[[], Tensor]
loss_of = nn.functional.cross_entropy


def parts(name: str, data: ArrayDataset) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = load_task(name, 1, "default").model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, DataLoader(data, batch_size=BATCH, collate_fn=collate_batch)


class Plain:
    """The plain loop."""

    notes: tuple[str, ...] = ()

    def __init__(self, name: str, data: ArrayDataset) -> None:
        self.threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)
        self.step = self._loop(*parts(name, data)).__next__

    def arrange(self, batch: Any) -> Any:
        """Return the batch to compute on."""
        return batch

    def _loop(self, model: nn.Module, optimizer: Any, loader: Any) -> Iterator[Tensor]:
        while True:
            for inputs, targets in map(self.arrange, loader):
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                yield loss.detach()


class Reversed(Plain):
    """The same sums in another order, which shows the difference that rounding makes."""

    def arrange(self, batch: Any) -> Any:
        return tuple(tensor.flip(0) for tensor in batch)


class Fast:
    """The same loop with the four lines."""

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


class LoopProcess:
    """A loop in a process of its own, so that settings of the process affect it alone.

    Attributes:
        report: the result of the trial, and seconds of the first steps.
    """

    def __init__(self, loop_type: type[Plain] | type[Fast], name: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(child_pipe, loop_type, name))
        self._process.start()
        child_pipe.close()
        self.report: dict[str, Any] = self._pipe.recv()

    def block_s(self, num_steps: int) -> float:
        """Return the seconds of a step, over ``num_steps`` steps."""
        self._pipe.send(("block", num_steps))
        return float(self._pipe.recv())

    def losses(self, num_updates: int) -> list[float]:
        """Return the losses of a new loop, which reuses the result of the trial."""
        self._pipe.send(("losses", num_updates))
        return list(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Any, loop_type: type[Plain] | type[Fast], name: str) -> None:
    """Answer requests in the loop's process."""
    data = make_data(BATCH * 40)
    start_s = time.perf_counter()
    loop = loop_type(name, data)
    built_s = time.perf_counter()
    loop.step()
    first_s = time.perf_counter() - built_s
    pipe.send({"notes": loop.notes, "trial": built_s - start_s, "first": first_s})
    while (request := next_request(pipe)) is not None:
        command, count = request
        if command == "losses":
            loop = loop_type(name, data)
        start_s = time.perf_counter()
        losses = [loop.step() for _ in range(count)]
        spent_s = time.perf_counter() - start_s
        pipe.send(spent_s / count if command == "block" else [float(loss) for loss in losses])


def next_request(pipe: Any) -> tuple[str, int] | None:
    """Return the next request; None ends the process."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]  # the parent sends these
    except EOFError:
        return None


def measure(name: str, rounds: int, updates: int) -> dict[str, Any]:
    """Return the seconds of all blocks, the trial's report, and the difference of the losses."""
    loop_types: dict[str, type[Plain] | type[Fast]] = {
        "fast": Fast,
        "bare": Plain,
        "bare again": Plain,
    }
    times: dict[str, list[float]] = {label: [] for label in loop_types}
    report: dict[str, Any] = {}
    orders = itertools.cycle(itertools.permutations(loop_types))
    for _ in range(NUM_LIVES):
        processes = {label: LoopProcess(loop_type, name) for label, loop_type in loop_types.items()}
        report = report or processes["fast"].report
        for number in range(1 + rounds // NUM_LIVES):
            for label in next(orders) if number else loop_types:
                seconds = processes[label].block_s(BLOCKS[name])
                if number:
                    times[label].append(seconds)
        for process in processes.values():
            process.close()
    updates = updates if BLOCKS[name] > 1 else updates // 40
    plain, fast, reordered = (
        measure_losses(loop_type, name, updates) for loop_type in (Plain, Fast, Reversed)
    )
    return {
        "times": times, "updates": updates, **report,
        "gap": largest_gap(plain, fast), "rounding": largest_gap(plain, reordered),
    }  # fmt: skip


def measure_losses(loop_type: type[Plain] | type[Fast], name: str, num_updates: int) -> list[float]:
    """Return the losses of ``num_updates`` updates, from a new process."""
    process = LoopProcess(loop_type, name)
    values = process.losses(num_updates)
    process.close()
    return values


def largest_gap(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def row(name: str, result: dict[str, Any]) -> list[str]:
    times = {key: [1000 * s for s in values] for key, values in result["times"].items()}
    gains = {
        "fast": [1 / ratio for ratio in ratios(times, "fast")],
        "bare again": [1 / ratio for ratio in ratios(times, "bare again")],
    }
    median, low, high = interval(gains["fast"])
    aa_median, aa_low, aa_high = interval(gains["bare again"])
    is_same = result["gap"] <= max(MOST_GAP, result["rounding"])
    is_reached = median >= WANTED[name] and is_same
    verdict = "yes" if is_reached else "no"
    if not aa_low <= 1.0 <= aa_high:
        verdict = "not told: plain again is off 1"
    return [
        f"{name}, {BATCH}", spread(times["bare"]), spread(times["fast"]),
        f"{median:.3f} ({low:.3f} to {high:.3f})",
        f"{aa_median:.3f} ({aa_low:.3f} to {aa_high:.3f})",
        f"{result['gap']:.1e} over {result['updates']}", f"{result['rounding']:.1e}",
        f"{result['trial']:.0f}",
        f"{result['first']:.0f}", f">= {WANTED[name]}", verdict,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--updates", type=int, default=200, help="updates over which losses are compared"
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    header = [
        "network, batch", "plain ms a step", "fast ms a step", "plain : fast (95 % interval)",
        "plain : plain again", "largest difference of losses, updates",
        "of rounding alone", "trial s",
        "first step s (compiles)", "wanted", "reached",
    ]  # fmt: skip
    rows, findings = [], []
    for name in BLOCKS:
        if options.only not in name:
            continue
        rounds = options.rounds if BLOCKS[name] > 1 else max(NUM_LIVES, options.rounds // 3)
        with tempfile.TemporaryDirectory() as folder:
            # An empty cache: no remembered settings, no compiled code.
            os.environ["XDG_CACHE_HOME"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            result = measure(name, rounds, options.updates)
        rows.append(row(name, result))
        findings += [f"    {name}: {line}" for line in result["notes"][:-1]]
        print(" | ".join(rows[-1]), *result["notes"], sep="\n", flush=True)
    if options.write:
        note = "\n".join(["What was found:", "", *findings, "", note])
        write_table("fast", "One worker with --fast auto", header, rows, note)


if __name__ == "__main__":
    main()
