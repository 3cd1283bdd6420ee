"""Checks that everything works on a GPU, and measures it there; called by bench/gpu.sh.

    python bench/gpu.py [--device cuda] [--out FILE]

Each check trains a model and is compared with a plain PyTorch loop on the same device. A check that
fails is reported in its row and does not stop the others; the exit code is then 1. Writes
results/gpu.md, or FILE.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import table
from gpu_networks import NETWORKS
from gpu_speed import SPEED
from paceline.config import resolve
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.launch.launcher import launch_run
from paceline.program import TaskProgram
from paceline.report.live import QuietObserver
from paceline.report.summary import Summary
from paceline.script.worker import Pace
from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import SupersededRecord
from paceline.workloads.images import build_lenet

Row = list[str]
BATCH, STEPS, PAIRS = 256, 100, 15


def train(device: str, **settings: Any) -> tuple[Summary, dict[str, torch.Tensor], list[Any]]:
    """Train LeNet on the package's digits; return summary, parameters and trace records."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run_settings = resolve(
            {"device": device, "seed": 0, "run_dir": str(run_dir), **settings}, env={}, is_call=True
        ).settings
        task = settings.pop("task", "softmax")
        summary = launch_run(TaskProgram(task=task), run_settings, QuietObserver())
        assert isinstance(summary, Summary)
        records = list(read_trace(run_dir / FILE_NAME))
        return summary, load_file(run_dir / "model.safetensors"), records


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def two_workers_equal_one(device: str) -> Row:
    """Check that full-sync on two workers averages the same samples as one worker."""
    flags: dict[str, Any] = {"epochs": 2, "batch_size": 256}
    _, single, _ = train(device, workers=1, **flags)
    _, double, _ = train(device, workers=2, protocol="full-sync", **flags)
    difference = largest_difference(single, double)
    return ["two workers (full-sync) against one", f"largest difference {difference:.1e}",
            "<= 1e-4", verdict(difference <= 1e-4)]  # fmt: skip


def every_protocol_trains(device: str) -> list[Row]:
    rows = []
    for protocol in ("full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2",
                     "k-batch-async:2", "stale-synchronous:2", "local-sgd:4"):  # fmt: skip
        summary, _, _ = train(device, workers=3, protocol=protocol, epochs=3)
        accuracy = summary.test_accuracy or 0.0
        rows.append([f"{protocol}, three workers, 3 epochs", f"test accuracy {accuracy:.3f}, "
                     f"{summary.samples_per_s or 0:,.0f} images/s", ">= 0.75",
                     verdict(accuracy >= 0.75)])  # fmt: skip
    return rows


def cancellation(device: str) -> Row:
    """Check that an 8x slow straggler is cancelled, and how much of its work was thrown away."""
    _, _, records = train(
        device, workers=3, protocol="k-sync:2", epochs=3, slow=("0=8x",), delay=("5ms",)
    )
    wasted_ms = [
        1000 * record.wasted_s for record in records if isinstance(record, SupersededRecord)
    ]
    median = statistics.median(wasted_ms) if wasted_ms else math.nan
    return ["superseded work, straggler 8x",
            f"{len(wasted_ms)} steps left, median {median:.1f} ms in",
            ">= 1 left", verdict(bool(wasted_ms))]  # fmt: skip


def loops(device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the bare loop and the same with the four lines, one step a call; LeNet, fp32."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (20_000, 1, 28, 28), dtype=torch.uint8, generator=generator)
    data = ArrayDataset(images, torch.randint(0, 10, (20_000,), generator=generator))

    def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[object]]:
        torch.manual_seed(0)
        model = build_lenet("default").to(device)
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate_batch),
        )

    loss_fn = nn.CrossEntropyLoss()

    def bare() -> Any:
        model, optimizer, loader = parts()
        while True:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_fn(model(inputs.to(device)), targets.to(device)).backward()
                optimizer.step()
                yield

    def paced() -> Any:
        pace = Pace(SoloExchange(), Context(device=str(device)))
        model, optimizer, loader = pace.prepare(*parts())
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss_fn(model(inputs.to(device)), targets.to(device)).backward()
                    optimizer.step()
                yield

    return bare().__next__, paced().__next__


def overhead(name: str) -> Row:
    """Time blocks of steps in turn, each ended by a synchronisation."""
    device = torch.device(name)

    def block_ms(step: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / STEPS

    bare, paced = loops(device)
    block_ms(bare), block_ms(paced)
    pairs = [(block_ms(bare), block_ms(paced)) for _ in range(PAIRS)]
    median, low, high = table.interval([paced_ms / bare_ms for bare_ms, paced_ms in pairs])
    bare_spread = table.spread([bare_ms for bare_ms, _ in pairs])
    return ["one worker, four lines : bare loop, LeNet 256", f"{median:.3f} ({low:.3f} to "
            f"{high:.3f}), bare {bare_spread} ms a step", "<= 1.05",
            verdict(median <= 1.05)]  # fmt: skip


def collective(device: str) -> Row:
    """Check the all-reduce between GPUs by NCCL, one a worker; needs two of them."""
    count = torch.cuda.device_count() if device.startswith("cuda") else 0
    if count < 2:
        return ["all-reduce between GPUs (NCCL)", f"not run: {count} GPU here", ">= 2 GPUs", ""]
    flags: dict[str, Any] = {"epochs": 2, "batch_size": 256, "protocol": "full-sync"}
    _, single, _ = train(device, workers=1, **flags)
    _, double, _ = train(device, workers=2, path="collective", **flags)
    difference = largest_difference(single, double)
    return ["all-reduce between GPUs (NCCL)", f"largest difference {difference:.1e}", "<= 1e-4",
            verdict(difference <= 1e-4)]  # fmt: skip


def verdict(is_reached: bool) -> str:
    return "yes" if is_reached else "no"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default=str(table.RESULTS / "gpu.md"))
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("no GPU is here: bench/gpu.sh --device cpu tries the script itself")
    checks: tuple[Callable[[str], Row | list[Row]], ...] = (
        two_workers_equal_one, every_protocol_trains, cancellation, overhead, collective, *SPEED,
        *NETWORKS,
    )  # fmt: skip
    rows: list[Row] = []
    for check in checks:
        start = time.perf_counter()
        try:
            result = check(options.device)
        except Exception as error:  # a check may fail in any way; the others go on
            traceback.print_exc()
            result = [check.__name__, f"{type(error).__name__}: {error}"[:120], "", "no"]
        new_rows = [result] if isinstance(result[0], str) else result
        rows += new_rows
        for row in new_rows:
            print(" | ".join(row), f"({time.perf_counter() - start:.0f} s)", flush=True)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    table.write_rows(
        Path(options.out), "On a GPU", ["check", "measured", "wanted", "reached"], rows,
        f"{name}; {table.machine()}",
    )  # fmt: skip
    sys.exit(any(row[-1] == "no" for row in rows))


if __name__ == "__main__":
    main()
