"""Live runs against theory: seconds an update and staleness of eight workers that sleep X.

    python bench/live_theory.py [--quick] [--write] [--updates 400]

Each worker computes almost nothing and sleeps X a mini-batch (``--delay``), X ~ exp(50 ms) or
25 ms + exp(25 ms), under k-sync, k-batch-sync, k-async and k-batch-async with K = 1, 2, 4, 8. The
seconds of an update are wall time, read from the trace; nothing is subtracted, and the first
updates are left out. They are compared with the closed forms of paceline.theory, and where there
is none with a Monte Carlo simulation of the same rule (seeded, below). The standard error is that
of 20 batch means. Mean staleness must be P/K - 1 and (P - 1)/K.

Under the synchronous rules all eight start again after each update, on the few cores there are. The
time of that alone is measured as well, as the floor: eight processes with a socket each, which
compute and sleep the same, started again by one more process, and nothing else.
Writes results/live_theory.md.
"""

import argparse
import heapq
import math
import multiprocessing
import random
import select
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from paceline.conditions.delays import Delay, parse_delay
from paceline.theory import staleness_versions, update_s
from quiet_runs import point_task, run, staleness, update_times_s
from table import machine, write_table

WORKERS = 8
DELAYS = ("exp:50ms", "25ms+exp:25ms")
PROTOCOLS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
PUSHES = (1, 2, 4, 8)
NUM_BATCHES, TOLERANCE, STALE_TOLERANCE = 20, 0.10, 0.05
NUM_DRAWN = 40_000


def simulate_s(protocol: str, delay: Delay, num_pushes: int) -> float:
    """Simulate 40,000 updates of the two rules without a closed form; return seconds an update."""
    rng = random.Random(0)
    if protocol == "k-batch-sync":
        return statistics.fmean(
            _batch_sync_s(delay, num_pushes, rng) for _ in range(NUM_DRAWN // num_pushes)
        )
    assert protocol == "k-async"
    ready_times_s = [delay.sample(rng) for _ in range(WORKERS)]
    heapq.heapify(ready_times_s)
    now_s = 0.0
    for _ in range(NUM_DRAWN):
        for _ in range(num_pushes):
            now_s = heapq.heappop(ready_times_s)
        for _ in range(num_pushes):
            heapq.heappush(ready_times_s, now_s + delay.sample(rng))
    return now_s / NUM_DRAWN


def _batch_sync_s(delay: Delay, num_pushes: int, rng: random.Random) -> float:
    """Simulate one update: each worker that is done starts again; the K-th push ends the update."""
    ready_times_s = [delay.sample(rng) for _ in range(WORKERS)]
    heapq.heapify(ready_times_s)
    for _ in range(num_pushes - 1):
        heapq.heappush(ready_times_s, heapq.heappop(ready_times_s) + delay.sample(rng))
    return ready_times_s[0]


def mean_and_error_s(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the mean gap between updates, and its standard error from batch means, as gaps are
    correlated."""
    size = (len(times_s) - 1) // NUM_BATCHES
    borders = [times_s[i * size] for i in range(NUM_BATCHES + 1)]
    means = [(b - a) / size for a, b in pairwise(borders)]
    return statistics.fmean(means), statistics.stdev(means) / math.sqrt(NUM_BATCHES)


def floor_s(protocol: str, text: str, num_pushes: int, num_updates: int) -> list[float]:
    """Return the time of each update of the bare processes."""
    parent_ends, worker_ends = zip(*(socket.socketpair() for _ in range(WORKERS)), strict=True)
    context = multiprocessing.get_context("fork")
    is_batch = protocol == "k-batch-sync"
    workers = [
        context.Process(target=_bare_worker, args=(worker_ends[i], i, text, is_batch), daemon=True)
        for i in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    poll = select.poll()
    by_number = {end.fileno(): end for end in parent_ends}
    for number in by_number:
        poll.register(number, select.POLLIN)
    times_s = []
    for version in range(num_updates):
        for end in parent_ends:
            end.send(_WORD.pack(version))
        num_done = 0
        while num_done < num_pushes:
            for number, _ in poll.poll():
                num_done += _WORD.unpack(by_number[number].recv(_WORD.size))[0] == version
        times_s.append(time.perf_counter())
    for worker in workers:
        worker.kill()
        worker.join()
    for end in (*parent_ends, *worker_ends):
        end.close()
    return times_s


_WORD = struct.Struct("q")


def _bare_worker(own: socket.socket, seat: int, text: str, is_batch: bool) -> None:
    """Compute, sleep X and report, again and again; start over when the next version arrives."""
    torch.set_num_threads(1)
    task = point_task(1)
    model, (inputs, _) = task.model(), task.data().train[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    delay, rng = parse_delay(text), random.Random(f"1/{seat}")
    version, is_idle = -1, True
    while True:
        if is_idle:
            version, is_idle = _WORD.unpack(own.recv(_WORD.size))[0], False
        optimizer.zero_grad()
        model(inputs).sum().backward()
        if select.select([own], [], [], delay.sample(rng))[0]:
            version = _WORD.unpack(own.recv(_WORD.size))[0]
            continue
        own.send(_WORD.pack(version))
        is_idle = not is_batch


def measure(protocol: str, text: str, num_pushes: int, num_updates: int) -> list[str]:
    skipped = max(10, num_updates // 10)
    num_total = num_updates + skipped
    records = run(
        point_task(4 * WORKERS * num_total * num_pushes), workers=WORKERS, mini_batch_size=1,
        protocol=f"{protocol}:{num_pushes}", delay=(text,), updates=num_total, seed=1,
    )  # fmt: skip
    mean_s, error_s = mean_and_error_s(update_times_s(records)[skipped:])
    delay = parse_delay(text)
    expected_s = update_s(protocol, delay, WORKERS, num_pushes)
    source = "closed form"
    if expected_s is None:
        expected_s, source = simulate_s(protocol, delay, num_pushes), "Monte Carlo"
    is_near = abs(mean_s - expected_s) <= TOLERANCE * expected_s + 2 * error_s
    floor = ""
    if protocol in ("k-sync", "k-batch-sync"):
        floor_figures = mean_and_error_s(floor_s(protocol, text, num_pushes, num_total)[skipped:])
        floor = f"{1000 * floor_figures[0]:.2f} +- {1000 * floor_figures[1]:.2f}"
    lag = statistics.fmean(staleness(records, skipped))
    lag_expected = staleness_versions(protocol, WORKERS, num_pushes)
    assert lag_expected is not None
    is_lag_near = abs(lag - lag_expected) <= STALE_TOLERANCE * lag_expected
    return [
        protocol, str(num_pushes), text, f"{1000 * mean_s:.2f} +- {1000 * error_s:.2f}",
        f"{1000 * expected_s:.2f}", source, f"{100 * (mean_s / expected_s - 1):+.1f} %",
        "yes" if is_near else "no", floor, f"{lag:.3f}", f"{lag_expected:.3f}",
        "yes" if is_lag_near else "no",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--only", default="", help="run rows whose protocol:K@delay contains this")
    options = parser.parse_args()
    num_updates = 60 if options.quick else options.updates
    pushes = (1, 8) if options.quick else PUSHES
    note = machine()
    rows = []
    for text in DELAYS[:1] if options.quick else DELAYS:
        for protocol in PROTOCOLS:
            for num_pushes in pushes:
                if options.only in f"{protocol}:{num_pushes}@{text}":
                    rows.append(measure(protocol, text, num_pushes, num_updates))
                    print(" | ".join(rows[-1]), flush=True)
    header = [
        "protocol", "K", "X", "measured, ms an update", "expected, ms", "from", "difference",
        f"within {TOLERANCE:.0%} + 2 s.e.", "floor, ms", "staleness, versions", "expected",
        "within 5 %",
    ]  # fmt: skip
    note = (
        f"{WORKERS} workers, {num_updates} updates a row after the first tenth; wall time, nothing "
        f"subtracted; +- one standard error of {NUM_BATCHES} batch means. {note}"
    )
    if options.write:
        write_table("live_theory", "Live runs against theory", header, rows, note)


if __name__ == "__main__":
    main()
