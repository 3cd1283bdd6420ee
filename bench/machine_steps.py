"""The loops and messages that a rank of bench/two_machines.py runs and times.

    torchrun ... bench/machine_steps.py --kind KIND --row ROW --folder FOLDER --steps N

    link      messages both ways at once: latency, seconds a byte
    alone     the four lines on each machine, a run of one worker each: no exchange
    bare      the same steps without Paceline, and when each gradient is ready
    by hand   backward, then the sum, then the step: nothing overlaps
    DDP       with one of two sizes of bucket
    pace      the four lines, under torchrun with the row's settings

A rank writes its result to FOLDER/found as JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from worlds import SUBJECTS, Part, data_of, endless, identity, make_model

HERE = Path(__file__).resolve()
RANKS = 2
WARM_UP, LEAST_STEPS = 4, 8
SMALL, LARGE = 4, 1 << 20
"""Bytes of the messages that measure the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A network and the settings of its run.

    Attributes:
        batch: over both machines.
        every: local steps of an update.
        most_steps: limit where each step takes seconds.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    network: str = "mlp488k"
    batch: int = 256
    every: int = 1
    most_steps: int = 1000

    @property
    def num_fragments(self) -> int:
        return int(self.settings.get("fragments", "1"))

    def whole(self, num_steps: int) -> int:
        """Return about ``num_steps`` steps, in which every fragment is exchanged equally often."""
        cycle = self.every * self.num_fragments
        return -(-min(num_steps, self.most_steps) // cycle) * cycle


SLOW_LOCAL = {"protocol": "local-sgd:8"}
STREAMED = {"protocol": "local-sgd:32", "outer": "nesterov:0.7,0.9"}
ROWS = (
    Row(name="full-sync"),
    Row(name="full-sync, ring", settings={"collective": "ring"}),
    Row(name="full-sync, hub", settings={"collective": "hub"}),
    *(
        Row(name=f"full-sync, {name}", settings={"compress": name})
        for name in ("bf16", "int8", "int4", "topk:1%", "powersgd:2")
    ),
    Row(name="local-sgd:8", settings=SLOW_LOCAL, every=8),
    Row(name="DiLoCo:8", settings={**SLOW_LOCAL, "outer": "nesterov:0.7,0.9"}, every=8),
    Row(name="DiLoCo:32", settings=STREAMED, every=32),
    Row(name="DiLoCo:32, fragments 4", settings={**STREAMED, "fragments": "4"}, every=8),
    Row(name="DiLoCo:32, fragments 4, overlap 7",
        settings={**STREAMED, "fragments": "4", "overlap": "7"}, every=8),
    Row(name="DiLoCo:32, fragments 4, overlap 7, int4",
        settings={**STREAMED, "fragments": "4", "overlap": "7", "compress": "int4"}, every=8),
    *(Row(name=f"full-sync, overlapped, {size}", network="deep", batch=size, most_steps=LEAST_STEPS)
      for size in (8192, 16384)),
)  # fmt: skip
"""The first row of a network and batch is the baseline of the others."""


class Steps:
    """The clock of a loop, which ignores the first steps.

    Args:
        every: steps of an update; a loop does not end within one.
    """

    def __init__(self, num_steps: int, every: int, folder: str) -> None:
        self._left, self._folder = num_steps + max(WARM_UP, every), folder
        self._num_steps = num_steps
        self._borders_s: list[float] = []
        self.extra: dict[str, Any] = {}

    def border(self) -> bool:
        """Mark the border between two steps; return whether another step follows."""
        if self._left == self._num_steps:
            self._start_bytes = _sent_bytes()
        if self._left <= self._num_steps:
            self._borders_s.append(time.perf_counter())
        if self._left == 0 and int(os.environ["RANK"]) == 0:
            steps_s = [after - before for before, after in pairwise(self._borders_s)]
            sent = (_sent_bytes() - self._start_bytes) / self._num_steps
            self.write({"steps_s": steps_s, "step_s": statistics.fmean(steps_s),
                        "sent_bytes": sent, **self.extra})  # fmt: skip
        self._left -= 1
        return self._left >= 0

    def write(self, result: Mapping[str, Any]) -> None:
        """Write the result for the parent program."""
        Path(self._folder, "found").write_text(json.dumps(result))


def _sent_bytes() -> int:
    """Return the bytes this machine has sent, with all headers."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure_link(row: Row, steps: Steps) -> None:
    """Send both ways at once, as a step does; take the median of several."""
    dist.init_process_group("gloo")
    peer = 1 - dist.get_rank()

    def seconds(num_bytes: int) -> float:
        outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        start_s = time.perf_counter()
        # Gloo announces a receive buffer on the connection that carries messages: post it first.
        for work in (dist.irecv(incoming, peer), dist.isend(outgoing, peer)):
            assert work is not None
            work.wait()
        return time.perf_counter() - start_s

    medians_s = {
        size: statistics.median(seconds(size) for _ in range(25 if size == SMALL else 7))
        for size in (SMALL, LARGE, 2 * LARGE)
    }
    s_per_byte = (medians_s[2 * LARGE] - medians_s[LARGE]) / LARGE
    if dist.get_rank() == 0:
        steps.write({"latency_s": medians_s[SMALL], "s_per_byte": s_per_byte})


def run_loop(row: Row, steps: Steps, between: Callable[[nn.Module], None]) -> nn.Module:
    """Run the bare loop on this rank's part."""
    dist.init_process_group("gloo")
    subject, rank = SUBJECTS[row.network], dist.get_rank()
    model = make_model(row.network)
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, rank, RANKS)
    arrived: list[tuple[int, float]] = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: arrived.append((number, time.perf_counter()))
        )
    start_s = time.perf_counter()
    for inputs, targets in endless(DataLoader(data_of(subject), batch_sampler=part,
                                              collate_fn=identity)):  # fmt: skip
        if arrived:
            steps.extra["ready_s"] = {number: at_s - start_s for number, at_s in arrived}
        if not steps.border():
            return model
        start_s = time.perf_counter()
        arrived.clear()
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        between(model)
        optimizer.step()
    raise AssertionError


def run_bare(row: Row, steps: Steps) -> None:
    """Run without exchange."""
    run_loop(row, steps, lambda model: None)


def run_ddp(row: Row, steps: Steps, bucket_mb: int) -> None:
    """Run DistributedDataParallel, as its users tune it."""
    dist.init_process_group("gloo")
    subject = SUBJECTS[row.network]
    model = nn.parallel.DistributedDataParallel(
        make_model(row.network), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, dist.get_rank(), RANKS)
    for inputs, targets in endless(DataLoader(data_of(subject), batch_sampler=part,
                                              collate_fn=identity)):  # fmt: skip
        if not steps.border():
            return
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()


def run_by_hand(row: Row, steps: Steps) -> None:
    """Sum all gradients in one tensor after the backward pass."""

    def average(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(RANKS)
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    run_loop(row, steps, average)


def run_pace(row: Row, steps: Steps) -> None:
    """Run the loop with the four lines."""
    import paceline

    pace, subject = paceline.connect(), SUBJECTS[row.network]
    model = make_model(row.network)
    optimizer = subject.optimizer(model.parameters())
    loader = DataLoader(data_of(subject), batch_size=row.batch, collate_fn=identity, drop_last=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            if not steps.border():
                return
            with pace.step():
                optimizer.zero_grad()
                subject.loss(model(inputs), targets).backward()
                optimizer.step()


def run_alone(row: Row, steps: Steps) -> None:
    """Run the four lines with one worker, on this machine's part of the batch."""
    run_pace(replace(row, batch=row.batch // RANKS), steps)


BUCKETS_MB = {"DDP": 25, "DDP, small buckets": 4}
KINDS: Mapping[str, Callable[[Row, Steps], None]] = {
    "link": measure_link, "alone": run_alone, "bare": run_bare, "by hand": run_by_hand,
    "pace": run_pace,
    **{name: partial(run_ddp, bucket_mb=size) for name, size in BUCKETS_MB.items()},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--folder", "--row"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = next(row for row in ROWS if row.name == options.row)
    KINDS[options.kind](row, Steps(options.steps, row.every, options.folder))


if __name__ == "__main__":
    main()
