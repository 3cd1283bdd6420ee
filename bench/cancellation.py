"""The delay until superseded work is left: ResNet-18, real compute, two workers, k-sync:1.

    python bench/cancellation.py [--quick] [--write] [--updates 150]

The first push makes the update and the other worker is cancelled in the middle of its pass. The
delay is from the coordinator's Cancel in the trace until it hears that the member has left its
step, so it includes the message. Both workers begin each pass after a pause of up to one pass
(outside the step, seeded), so that cancellations fall in all parts of it; one that falls in the
pause is not counted. Hooks time each layer's forward and backward in the same passes; a layer's
time is its median. Writes results/cancellation.md.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.events import Cancel, Grant
from paceline.program import ScriptProgram
from paceline.trace.records import Ordered, Record, SupersededRecord
from paceline.workloads.resnets import build_resnet18
from quiet_runs import run
from table import machine, write_table

BATCH, NUM_SAMPLES = 16, 100_000
WANTED, SKIPPED_STEPS = 1.2, 3


class LayerTimes:
    """Seconds of each layer's forward and backward, by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._start_s: dict[str, float] = {}
        for name, layer in model.named_modules():
            if not list(layer.children()):
                layer.register_forward_pre_hook(self._begin(f"{name} forward"))
                layer.register_forward_hook(self._end(f"{name} forward"))
                layer.register_full_backward_pre_hook(self._begin(f"{name} backward"))
                layer.register_full_backward_hook(self._end(f"{name} backward"))

    def _begin(self, key: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            self._start_s[key] = time.perf_counter()

        return begin

    def _end(self, key: str) -> Callable[..., None]:
        def end(*_: Any) -> None:
            self.seconds[key].append(time.perf_counter() - self._start_s[key])

        return end


def run_worker(folder: Path, pause_s: float) -> None:
    """Run the README's loop with a pause before each step and clocks on the layers."""
    # The images need no gradient, so the first layer's backward ends when it begins.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    pace = paceline.connect()
    model = build_resnet18("default")
    times = LayerTimes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = ArrayDataset(
        torch.rand(1, 1, 28, 28).expand(NUM_SAMPLES, 1, 28, 28),
        torch.zeros(1, dtype=torch.long).expand(NUM_SAMPLES),
    )
    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate_batch)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    rng = random.Random(pace.worker)
    paused_s = []
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            start_s = time.perf_counter()
            time.sleep(rng.uniform(0.0, pause_s))
            paused_s.append(time.perf_counter() - start_s)
            with pace.step():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    report = {"paused_s": paused_s, "layers": times.seconds}
    (folder / str(pace.worker)).write_text(json.dumps(report))


def measure_pass_s() -> float:
    """Time a forward and backward with one thread, the upper limit of the pauses."""
    torch.set_num_threads(1)
    model, inputs = build_resnet18("default"), torch.rand(BATCH, 1, 28, 28)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model(inputs).sum().backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def pair_up(records: Sequence[Record]) -> Iterator[tuple[float, SupersededRecord]]:
    """Pair the time of each cancellation with the member's record of leaving its step."""
    serials: dict[int, int] = {}
    cancelled_s: dict[tuple[int, int], float] = {}
    for record in records:
        if isinstance(record, Ordered) and isinstance(record.order, Grant):
            serials[record.order.ticket.member] = record.order.ticket.serial
        elif isinstance(record, Ordered) and isinstance(record.order, Cancel):
            member = record.order.member
            cancelled_s[member, serials[member]] = record.t_s
        elif isinstance(record, SupersededRecord) and record.ticket[:2] in cancelled_s:
            yield cancelled_s.pop(record.ticket[:2]), record


def measure(num_updates: int) -> tuple[list[float], int, dict[str, float]]:
    """Return seconds from each Cancel to leaving, the number in a pause, and layer -> seconds."""
    with tempfile.TemporaryDirectory() as folder:
        program = ScriptProgram(
            path=str(Path(__file__).resolve()), args=("--worker", folder, str(measure_pass_s()))
        )
        records = run(
            program, workers=2, protocol="k-sync:1", batch_size=BATCH, updates=num_updates,
            threads=1,
        )  # fmt: skip
        reports = [json.loads((Path(folder) / str(seat)).read_text()) for seat in range(2)]
    delays_s, num_in_pause = [], 0
    for cancelled_s, departure in pair_up(records):
        member, serial = departure.ticket.member, departure.ticket.serial
        if serial < SKIPPED_STEPS:
            continue
        # wasted_s counts from the grant; the pass began after its pause.
        start_s = departure.t_s - departure.wasted_s + reports[member]["paused_s"][serial]
        if cancelled_s < start_s:
            num_in_pause += 1
        else:
            delays_s.append(departure.t_s - cancelled_s)
    layers: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, seconds in report["layers"].items():
            layers[name] += seconds[SKIPPED_STEPS:]
    return delays_s, num_in_pause, {k: statistics.median(v) for k, v in layers.items() if v}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--updates", type=int, default=150)
    options = parser.parse_args()
    note = machine()
    delays_s, num_in_pause, layers = measure(12 if options.quick else options.updates)
    name, longest_s = max(layers.items(), key=lambda item: item[1])
    p99_s = sorted(delays_s)[min(len(delays_s) - 1, int(0.99 * len(delays_s)))]
    rows = [[
        str(len(delays_s)), str(num_in_pause), f"{1000 * statistics.median(delays_s):.1f}",
        f"{1000 * p99_s:.1f}", f"{1000 * max(delays_s):.1f}", f"{name}: {1000 * longest_s:.1f}",
        f"{p99_s / longest_s:.2f}", f"<= {WANTED}", "yes" if p99_s <= WANTED * longest_s else "no",
    ]]  # fmt: skip
    print(" | ".join(rows[0]))
    header = [
        "cancelled in a pass", "in the pause", "median, ms", "p99, ms", "most, ms",
        "longest layer, ms", "p99 : longest layer", "wanted", "reached",
    ]  # fmt: skip
    note = f"ResNet-18, {BATCH} images a worker, one thread each. {note}"
    if options.write:
        write_table("cancellation", "From release to leaving the pass", header, rows, note)


if __name__ == "__main__":
    if "--worker" in sys.argv and "WORLD_SIZE" in os.environ:
        run_worker(Path(sys.argv[-2]), float(sys.argv[-1]))
    else:
        main()
