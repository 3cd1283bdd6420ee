"""What runs in a rank of bench/two_machines.py: a loop, or messages, by the clock.

    torchrun ... bench/machine_steps.py --kind KIND --row ROW --folder FOLDER --steps N

    link      messages both ways at once: latency, seconds a byte
    alone     the four lines on each machine, a run of one worker each: no exchange
    bare      the same steps without Paceline, and when each gradient is there
    by hand   backward, then the sum, then the step: nothing at the same time
    DDP       with one of two sizes of bucket
    pace      the four lines, under torchrun with the row's settings

What a rank has found lies in FOLDER/found as JSON.
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

from worlds import SUBJECTS, Part, as_it_is, data_of, endless, make_model

HERE = Path(__file__).resolve()
RANKS = 2
WARM_UP, LEAST_STEPS = 4, 8
SMALL, LARGE = 4, 1 << 20
"""Messages of so many bytes say what a link costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is trained, and how.

    Attributes:
        batch: over both machines.
        every: local steps of an update.
        most_steps: where each takes seconds.
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
        """About so many steps, in which each fragment is exchanged as often as any other."""
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
"""The first of a network and batch is what the others of it are worth it against."""


class Steps:
    """The clock of a loop: the first steps do not count.

    Args:
        every: steps of an update, in the middle of which no loop is left.
    """

    def __init__(self, num_steps: int, every: int, folder: str) -> None:
        self._left, self._folder = num_steps + max(WARM_UP, every), folder
        self._num_steps = num_steps
        self._borders_s: list[float] = []
        self.more: dict[str, Any] = {}

    def border(self) -> bool:
        """Between two steps; whether there is another one."""
        if self._left == self._num_steps:
            self._start_bytes = _sent_bytes()
        if self._left <= self._num_steps:
            self._borders_s.append(time.perf_counter())
        if self._left == 0 and int(os.environ["RANK"]) == 0:
            steps_s = [after - before for before, after in pairwise(self._borders_s)]
            sent = (_sent_bytes() - self._start_bytes) / self._num_steps
            self.tell({"steps_s": steps_s, "step_s": statistics.fmean(steps_s),
                       "sent_bytes": sent, **self.more})  # fmt: skip
        self._left -= 1
        return self._left >= 0

    def tell(self, found: Mapping[str, Any]) -> None:
        """What the program outside gets."""
        Path(self._folder, "found").write_text(json.dumps(found))


def _sent_bytes() -> int:
    """By this machine, with all headers."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def be_link(row: Row, steps: Steps) -> None:
    """Both send to the other at once; the usual of several, as a step has it."""
    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()

    def seconds(num_bytes: int) -> float:
        there, here = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        start_s = time.perf_counter()
        # Gloo tells of room for a message on the connection that messages go by: room comes first.
        for work in (dist.irecv(here, other), dist.isend(there, other)):
            assert work is not None
            work.wait()
        return time.perf_counter() - start_s

    found = {
        size: statistics.median(seconds(size) for _ in range(25 if size == SMALL else 7))
        for size in (SMALL, LARGE, 2 * LARGE)
    }
    s_per_byte = (found[2 * LARGE] - found[LARGE]) / LARGE
    if dist.get_rank() == 0:
        steps.tell({"latency_s": found[SMALL], "s_per_byte": s_per_byte})


def _loop(row: Row, steps: Steps, between: Callable[[nn.Module], None]) -> nn.Module:
    """The bare loop on this rank's part."""
    dist.init_process_group("gloo")
    subject, rank = SUBJECTS[row.network], dist.get_rank()
    model = make_model(row.network)
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, rank, RANKS)
    arrived: list[tuple[int, float]] = []
    for number, one in enumerate(model.parameters()):
        one.register_post_accumulate_grad_hook(
            lambda _, number=number: arrived.append((number, time.perf_counter()))
        )
    start_s = time.perf_counter()
    for inputs, targets in endless(DataLoader(data_of(subject), batch_sampler=part,
                                              collate_fn=as_it_is)):  # fmt: skip
        if arrived:
            steps.more["ready_s"] = {number: at_s - start_s for number, at_s in arrived}
        if not steps.border():
            return model
        start_s = time.perf_counter()
        arrived.clear()
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        between(model)
        optimizer.step()
    raise AssertionError


def be_bare(row: Row, steps: Steps) -> None:
    """No exchange."""
    _loop(row, steps, lambda model: None)


def be_ddp(row: Row, steps: Steps, bucket_mb: int) -> None:
    """DistributedDataParallel, as its users tune it."""
    dist.init_process_group("gloo")
    subject = SUBJECTS[row.network]
    model = nn.parallel.DistributedDataParallel(
        make_model(row.network), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, row.batch, dist.get_rank(), RANKS)
    for inputs, targets in endless(DataLoader(data_of(subject), batch_sampler=part,
                                              collate_fn=as_it_is)):  # fmt: skip
        if not steps.border():
            return
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()


def be_by_hand(row: Row, steps: Steps) -> None:
    """The sum after the backward pass, all gradients in one."""

    def average(model: nn.Module) -> None:
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        together = torch.cat([one.reshape(-1) for one in gradients]).div_(RANKS)
        dist.all_reduce(together)
        parts = torch.split(together, [one.numel() for one in gradients])
        for one, part in zip(gradients, parts, strict=True):
            one.copy_(part.view(one.shape))

    _loop(row, steps, average)


def be_pace(row: Row, steps: Steps) -> None:
    """The four lines."""
    import paceline

    pace, subject = paceline.connect(), SUBJECTS[row.network]
    model = make_model(row.network)
    optimizer = subject.optimizer(model.parameters())
    loader = DataLoader(data_of(subject), batch_size=row.batch, collate_fn=as_it_is, drop_last=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            if not steps.border():
                return
            with pace.step():
                optimizer.zero_grad()
                subject.loss(model(inputs), targets).backward()
                optimizer.step()


def be_alone(row: Row, steps: Steps) -> None:
    """The four lines in a run of one worker, with this machine's part of the batch."""
    be_pace(replace(row, batch=row.batch // RANKS), steps)


BUCKETS_MB = {"DDP": 25, "DDP, small buckets": 4}
KINDS: Mapping[str, Callable[[Row, Steps], None]] = {
    "link": be_link, "alone": be_alone, "bare": be_bare, "by hand": be_by_hand, "pace": be_pace,
    **{name: partial(be_ddp, bucket_mb=size) for name, size in BUCKETS_MB.items()},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--folder", "--row"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = next(one for one in ROWS if one.name == options.row)
    KINDS[options.kind](row, Steps(options.steps, row.every, options.folder))


if __name__ == "__main__":
    main()
