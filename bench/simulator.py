"""The speed of virtual time, and its agreement with theory.

    python bench/simulator.py [--quick] [--write] [--only speed|size|theory|training]

speed      pushes a second of k-batch-async:100 with 1,000 exponential workers: with the
           coordinator, its ledger and a trace, as a task in virtual time has them; counts alone,
           event by event; and counts alone on arrays, which plain conditions allow. Against a
           bare loop that pops a heap of tuples, draws and pushes, and the same model in SimPy (a
           process for each worker, which waits, and a server that gathers from a store); all in
           turn, in one process
size       10,000 workers, 1,000 updates of k-sync:9000: seconds and memory, in its own process
theory     every closed form, P in {1, 2, 8, 20, 100}, K in a grid, 20,000 updates (fewer
           where that is more than 120,000 steps): within three standard errors, and 1 % where the
           standard error is below 0.3 %
training   softmax, P = 8, k-async:4 and full-sync, one gradient at a time and --batched:
           gradients a second against a plain loop that computes them and applies nothing

Writes results/simulator.md.
"""

import argparse
import heapq
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.data.loader import LeasedLoader
from paceline.predict.simulation import expected_update_s
from paceline.protocols import parse
from paceline.simulation.engine import SimulatedRun, endless_ledger
from paceline.simulation.timing import LeanDriver, TimingRun
from paceline.simulation.training import TrainingWork
from paceline.trace import Trace
from paceline.trainer import make_loader
from paceline.workloads import load_task
from table import machine, spread, write_table

WORKERS, K = 1_000, 100
CONDITIONS = Conditions(delays=(parse_delay("exp:1s"),) * WORKERS)
WANTED_OF_HEAP, WANTED_OF_SIMPY = 0.6, 10.0
THEORY_DELAYS = ("exp:1s", "1s+exp:1s", "pareto:2.5,1s", "weibull:1.5,1s")
THEORY_WORKERS = (1, 2, 8, 20, 100)
ASYNCHRONOUS = ("async", "k-async", "k-batch-async")
_MOST_STEPS = 2_500_000
WANTED_TRAINING, WANTED_BATCHED = 0.8, 1.0
MINI_BATCH = 64

Row = list[str]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=["speed", "size", "theory", "training"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    note = machine()
    rows: list[Row] = []
    parts: dict[str, Callable[[bool], Iterator[Row]]] = {
        "speed": speed, "size": size, "theory": theory, "training": training,
    }  # fmt: skip
    for name, part in parts.items():
        if options.only in (None, name):
            for row in part(options.quick):
                rows.append([f"{name}: {row[0]}", *row[1:]])
                print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = ["what", "measured", "wanted", "reached"]
        write_table("simulator", "Virtual time", header, rows, f"Median (least to most). {note}")


# -- speed -------------------------------------------------------------------------------------


def speed(is_quick: bool) -> Iterator[Row]:
    num_pushes = 50_000 if is_quick else 300_000
    loops: dict[str, Callable[[int], float]] = {
        "traced": traced_s, "events": events_s, "arrays": arrays_s, "heap": bare_heap_s,
        "simpy": simpy_s,
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(1 if is_quick else 5):
        for name, measure_s in loops.items():
            count = num_pushes // 5 if name == "traced" else num_pushes
            rates[name].append(count / measure_s(count))
    yield ["pushes a second, with ledger and trace", spread(rates["traced"], 0), "", ""]
    yield ["counts alone, an event after another", spread(rates["events"], 0), "", ""]
    yield ["counts alone, on arrays", spread(rates["arrays"], 0), "", ""]
    for peer, wanted in (("heap", WANTED_OF_HEAP), ("simpy", WANTED_OF_SIMPY)):
        title = {"heap": "a bare heap loop, a second", "simpy": "the same model in SimPy"}[peer]
        yield [title, spread(rates[peer], 0), "", ""]
        for kind, target in (("traced", None), ("events", None), ("arrays", wanted)):
            ratios = [a / b for a, b in zip(rates[kind], rates[peer], strict=True)]
            yield ratio_row(f"{kind}, times it", ratios, target)


def ratio_row(title: str, values: list[float], wanted: float | None) -> Row:
    if wanted is None:
        return [title, spread(values), "", ""]
    is_reached = statistics.median(values) >= wanted
    return [title, spread(values), f">= {wanted:g}", "yes" if is_reached else "no"]


def bare_heap_s(num_pushes: int) -> float:
    """Time the least that a simulation with a heap of tuples must do, short of heap tricks."""
    rng = random.Random(0)
    heap = [(rng.expovariate(1.0), number, number) for number in range(WORKERS)]
    heapq.heapify(heap)
    number, start_s = WORKERS, time.perf_counter()
    for _ in range(num_pushes):
        now_s, _, worker = heapq.heappop(heap)
        number += 1
        heapq.heappush(heap, (now_s + rng.expovariate(1.0), number, worker))
    return time.perf_counter() - start_s


def arrays_s(num_pushes: int) -> float:
    run = TimingRun(parse(f"k-batch-async:{K}", WORKERS), CONDITIONS)
    return _timed_s(run.run, num_pushes)


def events_s(num_pushes: int) -> float:
    run = LeanDriver(parse(f"k-batch-async:{K}", WORKERS), CONDITIONS)
    return _timed_s(run.advance, num_pushes)


def _timed_s(run: Callable[[int], object], num_pushes: int) -> float:
    """Time pushes after the first update."""
    run(1)
    start_s = time.perf_counter()
    run(1 + num_pushes // K)
    return time.perf_counter() - start_s


def traced_s(num_pushes: int) -> float:
    protocol = parse(f"k-batch-async:{K}", WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(Path(folder) / "trace.jsonl")
        run = SimulatedRun(protocol, endless_ledger(protocol), CONDITIONS, trace=trace)
        seconds = _timed_s(run.run, num_pushes)
        trace.close()
        return seconds


def simpy_s(num_pushes: int) -> float:
    """Time workers and a server as processes with a store between them, as in SimPy's examples."""
    import simpy

    env, rng = simpy.Environment(), random.Random(0)
    version, pushes = [0], simpy.Store(env)
    staleness: dict[int, int] = {}

    def worker(number: int) -> Generator[Any, Any, None]:
        while True:
            begin_version = version[0]
            yield env.timeout(rng.expovariate(1.0))
            yield pushes.put((number, begin_version))

    def server() -> Generator[Any, Any, None]:
        for _ in range(num_pushes // K):
            for _ in range(K):
                _, begin_version = yield pushes.get()
                lag = version[0] - begin_version
                staleness[lag] = staleness.get(lag, 0) + 1
            version[0] += 1

    for number in range(WORKERS):
        env.process(worker(number))
    start_s = time.perf_counter()
    env.run(until=env.process(server()))
    return time.perf_counter() - start_s


# -- size --------------------------------------------------------------------------------------


def size(is_quick: bool) -> Iterator[Row]:
    num_updates = 50 if is_quick else 1_000
    command = [sys.executable, __file__, "--measure-size", str(num_updates)]
    fields = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, megabytes = float(fields[0]), float(fields[1])
    title = f"10,000 workers, {num_updates:,} updates of k-sync:9000"
    yield [f"{title}, seconds", f"{seconds:.1f}", "<= 60", "yes" if seconds <= 60 else "no"]
    yield [f"{title}, MB", f"{megabytes:.0f}", "<= 1000", "yes" if megabytes <= 1000 else "no"]


def measure_size(num_updates: int) -> None:
    start_s = time.perf_counter()
    conditions = Conditions(delays=(parse_delay("exp:1s"),) * 10_000)
    TimingRun(parse("k-sync:9000", 10_000), conditions).run(num_updates)
    seconds = time.perf_counter() - start_s
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# -- theory ------------------------------------------------------------------------------------


def theory(is_quick: bool) -> Iterator[Row]:
    for name in ("full-sync", "k-sync", "k-batch-sync", *ASYNCHRONOUS):
        worst_case, num_right, num_cases, most_errors = "", 0, 0, 0.0
        for case in cases(name, is_quick):
            deviation, num_errors, is_right = compare(*case, is_quick)
            num_cases += 1
            num_right += is_right
            if num_errors > most_errors:
                most_errors, worst_case = (
                    num_errors,
                    f"{case[0]}, P {case[1]}, {case[2]}: {100 * deviation:+.2f} %",
                )
        measured = f"{num_right} of {num_cases}; furthest {most_errors:.1f} s.e. ({worst_case})"
        yield [name, measured, "all", "yes" if num_right == num_cases else "no"]


def cases(name: str, is_quick: bool) -> Iterator[tuple[str, int, str]]:
    for num_workers in THEORY_WORKERS[:3] if is_quick else THEORY_WORKERS:
        ranks = sorted({1, max(1, num_workers // 4), max(1, num_workers // 2), num_workers})
        texts = [name] if name in ("full-sync", "async") else [f"{name}:{k}" for k in ranks]
        for text in texts:
            for delay in THEORY_DELAYS:
                conditions = Conditions(delays=(parse_delay(delay),) * num_workers)
                if expected_update_s(parse(text, num_workers), conditions)[0] is not None:
                    yield text, num_workers, delay


def compare(text: str, num_workers: int, delay: str, is_quick: bool) -> tuple[float, float, bool]:
    """Return a run's deviation from theory, relative and in standard errors, and whether it is
    within the limits."""
    protocol = parse(text, num_workers)
    conditions = Conditions(delays=(parse_delay(delay),) * num_workers, seed=1)
    expected_s, _ = expected_update_s(protocol, conditions)
    assert expected_s is not None
    num_updates = 1_000 if is_quick else 20_000
    limit = _MOST_STEPS // max(num_workers, protocol.num_pushes)
    num_updates = max(1_000, min(num_updates, limit))
    counts = TimingRun(protocol, conditions).run(num_updates)
    error_s = counts.error_update_s()
    deviation_s = counts.mean_update_s() - expected_s
    # An asynchronous run begins with all workers fresh: at most one step is missing at the end.
    start_s = conditions.mean_step_s(0) / num_updates if protocol.name in ASYNCHRONOUS else 0.0
    remainder_s = max(0.0, abs(deviation_s) - start_s)
    is_right = remainder_s <= 3 * error_s + 1e-12
    if error_s < 0.003 * expected_s:
        is_right = is_right and remainder_s <= 0.01 * expected_s
    return deviation_s / expected_s, remainder_s / error_s if error_s else 0.0, is_right


# -- training ----------------------------------------------------------------------------------


def training(is_quick: bool) -> Iterator[Row]:
    num_gradients = 160 if is_quick else 800
    for text in ("k-async:4", "full-sync"):
        shares: dict[bool, list[float]] = {False: [], True: []}
        rates: dict[bool, list[float]] = {False: [], True: []}
        runs = {is_batched: start_training(text, is_batched) for is_batched in (False, True)}
        for _ in range(2 if is_quick else 7):
            for is_batched, run in runs.items():
                rate = trained_per_s(run, num_gradients)
                rates[is_batched].append(rate)
                shares[is_batched].append(rate / plain_per_s(num_gradients))
        for is_batched, wanted in ((False, WANTED_TRAINING), (True, WANTED_BATCHED)):
            title = f"softmax, 8 workers, {text}{', --batched' if is_batched else ''}"
            yield [f"{title}, gradients a second", spread(rates[is_batched], 0), "", ""]
            yield ratio_row(f"{title}, share of a plain loop", shares[is_batched], wanted)


def start_training(text: str, is_batched: bool) -> SimulatedRun:
    """Return a run on mini-batches of 64, past the start, where tracing happens once."""
    protocol, task = parse(text, 8), load_task("softmax")
    batch_size = MINI_BATCH * protocol.num_pushes
    work = TrainingWork(task, protocol, batch_size=batch_size, is_batched=is_batched)
    ledger = Ledger(work.num_samples, batch_size, protocol.num_pushes)
    conditions = Conditions(delays=(parse_delay("exp:1s"),) * 8)
    run = SimulatedRun(protocol, ledger, conditions, work=work)
    run.run(100)
    return run


def trained_per_s(run: SimulatedRun, num_gradients: int) -> float:
    before, start_s = run.counts.pushes, time.perf_counter()
    while run.counts.pushes < before + num_gradients:
        run.run(run.counts.updates + 10)
    return (run.counts.pushes - before) / (time.perf_counter() - start_s)


def plain_per_s(num_gradients: int) -> float:
    """Time forward and backward on mini-batches of the same size, without updates."""
    task = load_task("softmax")
    model = task.model()
    loader = make_loader(task.data().train, task.batch_size, is_shuffled=True)
    leased = LeasedLoader(loader, 0, torch.device("cpu"))
    leased.order.draw(0)
    num_samples = leased.order.count()[0]
    ledger = Ledger(num_samples, 4 * MINI_BATCH, 4)
    ledger.open(0)
    leases = ledger.cut_all()
    assert leases[0].num_samples == MINI_BATCH
    start_s = time.perf_counter()
    for i in range(num_gradients):
        inputs, targets = leased.fetch(leases[i % len(leases)])
        model.zero_grad()
        task.loss(model(inputs), targets).backward()
    return num_gradients / (time.perf_counter() - start_s)


if __name__ == "__main__":
    if "--measure-size" in sys.argv:
        measure_size(int(sys.argv[2]))
    else:
        main()
