"""Checks of one worker's speed on a GPU: batch transfer, mixed precision, ``--fast auto``.

Called by gpu.py, which writes the table; on a CPU (--device cpu) the checks test themselves.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import table
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, as_input, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.trainer import make_loader
from paceline.workloads import load_task

Row = list[str]
Step = Callable[[], Tensor]
BATCH = 256


def bytes_become_the_same_floats(device: str) -> Row:
    """Check that every byte, at the scales of the data sets, gives the CPU's bits."""
    values = torch.arange(256, dtype=torch.uint8)
    scales = (1 / 255, 1 / 16)
    num_different = sum(
        int((as_input(values.to(device), scale).cpu() != as_input(values, scale)).sum())
        for scale in scales
    )
    return ["bytes normalised on the device", f"{num_different} of {256 * len(scales)} differ", "0",
            _verdict(num_different == 0)]  # fmt: skip


def image_loader(num_samples: int = 20_480, side_px: int = 28) -> "DataLoader[Any]":
    generator = torch.Generator().manual_seed(1)
    shape = (num_samples, 1, side_px, side_px)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    data = ArrayDataset(pixels, torch.randint(0, 10, (num_samples,), generator=generator))
    return DataLoader(data, batch_size=BATCH, collate_fn=collate_batch, shuffle=True)


def make_step(task_name: str, context: Context, loader: Any, fast: str = "none") -> Step:
    """Return a step of the standard loop."""
    task = load_task(task_name, 1, "default")
    pace = Pace(SoloExchange(), context)
    torch.manual_seed(0)
    model = task.model().to(pace.device)
    optimizer = task.optimizer(model.parameters(), 0.01)
    model, optimizer, loader = pace.prepare(
        model, optimizer, loader, fast=fast,
        forward=lambda model, batch: task.loss(model(batch[0]), batch[1]),
    )  # fmt: skip

    def loop() -> Iterator[Tensor]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    if context.precision:
                        with pace.autocast():
                            loss = task.loss(model(inputs), targets)
                    else:
                        loss = task.loss(model(inputs), targets)
                    pace.backward(loss)
                    optimizer.step()
                yield loss.detach()

    return loop().__next__


def ratio(first: Step, second: Step, num_steps: int, num_pairs: int) -> tuple[float, float, float]:
    """Return the ratio of seconds, blocks in turn, with the interval of the median."""

    def block_s(step: Step) -> float:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            last = step()
        float(last)  # waits for the device
        return time.perf_counter() - start_s

    block_s(first), block_s(second)
    return table.interval([block_s(first) / block_s(second) for _ in range(num_pairs)])


def copies_ahead(device: str) -> Row:
    """Check that copying the next batch early keeps the losses and is not slower."""
    late, early = (
        make_step("lenet", Context(device=device, copies_ahead=is_ahead), image_loader())
        for is_ahead in (False, True)
    )
    difference = max(abs(float(late()) - float(early())) for _ in range(100))
    median, low, high = ratio(late, early, num_steps=50, num_pairs=9)
    return ["copies ahead, LeNet 256", f"{median:.3f}x ({low:.3f} to {high:.3f}), losses differ "
            f"by {difference:.1e} in 100 steps", ">= 0.98, <= 1e-4",
            _verdict(median >= 0.98 and difference <= 1e-4)]  # fmt: skip


def mixed_precision(device: str) -> list[Row]:
    """Check that the transformer learns in 16 bits as in 32."""
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        splits = load_task("transformer").data()
        loader = make_loader(splits.train, 32, is_shuffled=True)
        step = make_step("transformer", Context(device=device, precision=precision), loader)
        first = float(step())
        for _ in range(80):
            loss = float(step())
        is_right = math.isfinite(loss) and loss < 0.75 * first
        rows.append([f"transformer, {precision}", f"loss {first:.2f} to {loss:.2f} in 80 updates",
                     "falls by a quarter", _verdict(is_right)])  # fmt: skip
    return rows


def fast_auto(device: str) -> list[Row]:
    """Check that the result of a trial is never slower than the plain loop."""
    rows = []
    for name, precision in (("lenet", None), ("resnet18", None), ("resnet18", "auto")):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            plain = make_step(name, Context(device=device), image_loader(5_120))
            start_s = time.perf_counter()
            context = Context(device=device, precision=precision)
            fast = make_step(name, context, image_loader(5_120), fast="auto")
            trial_s = time.perf_counter() - start_s
        median, low, high = ratio(plain, fast, num_steps=10, num_pairs=7)
        rows.append([f"{name} 256, --fast auto" + " --precision auto" * bool(precision),
                     f"{median:.2f}x ({low:.2f} to {high:.2f}), trial {trial_s:.0f} s", ">= 0.99",
                     _verdict(median >= 0.99)])  # fmt: skip
    return rows


def _verdict(is_reached: bool) -> str:
    return "yes" if is_reached else "no"


SPEED: tuple[Callable[[str], Row | list[Row]], ...] = (
    bytes_become_the_same_floats, copies_ahead, mixed_precision, fast_auto,
)  # fmt: skip
