"""Two machines and 100 Mbit/s between them: what a step takes, beside what the cost model says.

    bench/netns.sh [--steps 24] [--only ROW ...] [--write]

    link      messages both ways at once: latency, seconds a byte
    alone     the four lines on each machine, a run of one worker each: no exchange
    bare      the same steps without Paceline, and when each gradient is there
    by hand   backward, then the sum, then the step: nothing at the same time
    DDP       the better of two sizes of bucket
    rows      the four lines, under torchrun with these settings

Predicted is computing alone, in the mean of the slower of the two, since both wait for it; and what
the exchange adds: the closed formula of the schedule with what a message costs on this link, of the
bytes of an update, over the local steps of one; of a compressor the price that its own run's plan
has found. Where the gradients come in several buckets each begins when it is there and the one
before is through; of what is merged some local steps later, what these do not hide. One rank a
machine, a thread each. Writes results/two_machines.md. Above 300 lines, since what runs in a rank
and what is said of it are read together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from paceline import compression as compressors
from paceline.collectives import parse
from paceline.collectives.base import LinkCost
from paceline.collectives.transfers import Operation
from paceline.engines.torchrun.buckets import make_buckets
from paceline.exchange.compressed import CompressedGradient
from paceline.store.fragments import Fragments
from paceline.store.layout import lay_out
from paceline.trace import FILE_NAME, read_trace
from table import machine, write_table
from worlds import SUBJECTS, Part, as_it_is, data_of, endless, make_model

HERE = Path(__file__).resolve()
MACHINES, RANKS, FIRST_ADDRESS, PORT = ("first", "second"), 2, "10.0.0.1", "29500"
WARM_UP, LEAST_STEPS = 4, 8
WITHIN, OVERLAP_AT_MOST = 0.10, 0.60
EVEN = 0.02
"""So near to the first nobody can tell which is faster, by prediction and by measurement."""
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


# -- in a rank ------------------------------------------------------------------------------------


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
    """Both send to the other at once; the least of several, since what disturbs only adds."""
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
        size: min(seconds(size) for _ in range(25 if size == SMALL else 7))
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


# -- from outside ---------------------------------------------------------------------------------


def measure(kind: str, row: Row, num_steps: int) -> list[dict[str, Any]]:
    """What rank 0 has found; alone, what each machine has."""
    are_apart = kind == "alone"
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, name if are_apart else "both") for name in MACHINES]
        machines, logs = [], [Path(folder, f"log-{name}") for name in MACHINES]
        for rank, name in enumerate(MACHINES):
            places[rank].mkdir(exist_ok=True)
            world = ["1", "--node-rank", "0", "--master-addr", "127.0.0.1"]
            if not are_apart:
                world = [str(RANKS), "--node-rank", str(rank), "--master-addr", FIRST_ADDRESS]
            with logs[rank].open("w") as log:
                machines.append(subprocess.Popen(
                    [name, sys.executable, "-m", "torch.distributed.run", "--nnodes", *world,
                     "--nproc-per-node", "1", "--master-port", PORT, str(HERE), "--kind", kind,
                     "--row", row.name, "--folder", str(places[rank]), "--steps", str(num_steps)],
                    env=_environment(row, places[rank]), stdout=log, stderr=log,
                ))  # fmt: skip
        for one in machines:
            one.wait()
        found = [place / "found" for place in dict.fromkeys(places)]
        if not all(one.is_file() for one in found):
            said = "\n".join(log.read_text() for log in logs)
            sys.exit(f"{kind}, {row.name}, came to no end:\n{said}")
        return [{**json.loads(one.read_text()), **_price_in(one.parent)} for one in found]


def _environment(row: Row, place: Path) -> dict[str, str]:
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONWARNINGS": "ignore", "PACELINE_CHECKPOINT_EVERY": "never",
        "PACELINE_RUN_DIR": f"{place}/run",
        **{f"PACELINE_{name.upper()}": value for name, value in row.settings.items()},
    }  # fmt: skip


def _price_in(place: Path) -> dict[str, Any]:
    """What the plan of the run there has found that a compressor costs."""
    trace = place / "run" / FILE_NAME
    header = next(iter(read_trace(trace))) if trace.is_file() else None
    return {
        name: value for name, value in getattr(header, "fields", {}).items() if name == "coding_s"
    }


def slower_s(alone: Sequence[Mapping[str, Any]], every: int) -> float:
    """A step, where after so many of them each waits for the slower one: all pairs of what was."""
    sums = [
        [sum(steps_s[at : at + every]) for at in range(0, len(steps_s) - every + 1, every)]
        for steps_s in (one["steps_s"] for one in alone)
    ]
    return statistics.fmean(max(pair) for pair in product(*sums)) / every


def exchange_s(
    row: Row, link: LinkCost, bare: Mapping[str, Any], found: Mapping[str, Any]
) -> float:
    """What it adds to a step.

    Args:
        bare: of the loop by itself.
        found: of the run; only its plan's price of coding is looked at.
    """
    named = list(make_model(row.network).named_parameters())
    parameters = lay_out(named, [], []).parameters
    hidden_s = int(row.settings.get("overlap", "0")) * bare["step_s"]
    if (compression := compressors.parse(row.settings.get("compress", "none"))) is not None:
        cpu = torch.device("cpu")
        count = row.num_fragments
        price = CompressedGradient(compression, parameters, 0, RANKS, cpu, count).price(link)
        assert price.sent_s is not None
        # Of two operations, alike in size, each has half of the steps that may hide it.
        return (max(0.0, price.sent_s - hidden_s) + found["coding_s"]) / row.every
    schedule = parse(row.settings.get("collective", "ring"), RANKS)  # gloo's own is a ring

    def seconds(num_bytes: int) -> float:
        return schedule.formula_s(Operation.ALL_REDUCE, num_bytes, link)

    if row.every > 1:
        fragments = Fragments(parameters, row.num_fragments).each
        exposed_s = [max(0.0, seconds(one.stop - one.start) - hidden_s) for one in fragments]
        return sum(exposed_s) / len(exposed_s) / row.every
    ready_s = {int(number): at_s for number, at_s in bare["ready_s"].items()}
    free_s = 0.0
    for bucket in make_buckets(parameters, torch.device("cpu")):
        there_s = max(ready_s[number] for number in bucket.numbers)
        free_s = max(free_s, there_s) + seconds(bucket.span.stop - bucket.span.start)
    return max(0.0, free_s - max(ready_s.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one row; seconds of a step."""

    row: Row
    alone_s: float
    step_s: float
    predicted_s: float
    sent_bytes: float

    @property
    def is_near(self) -> bool:
        return abs(self.predicted_s / self.step_s - 1.0) <= WITHIN

    def cells(self, first: "Found") -> list[str]:
        row, verdict = self.row, "-"
        if first is not self:
            gains = first.predicted_s / self.predicted_s, first.step_s / self.step_s
            verdict, measured = ("worth it" if gain > 1.0 else "not worth it" for gain in gains)
            if max(abs(gain - 1.0) for gain in gains) <= EVEN:
                verdict = "even"
            verdict += ", right" if verdict in ("even", measured) else ", wrong"
        return [
            row.name, f"{row.network} {row.batch}", f"{1000 * self.alone_s:.1f}",
            f"{1000 * self.step_s:.1f}", f"{1000 * self.predicted_s:.1f}",
            f"{self.predicted_s / self.step_s:.3f}", f"{self.sent_bytes / 1e6:.3f}",
            verdict, "yes" if self.is_near and "wrong" not in verdict else "no",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24, help="of a row, that count")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--write", action="store_true")
    for name in ("--kind", "--folder", "--row"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        torch.set_num_threads(1)
        row = next(one for one in ROWS if one.name == options.row)
        KINDS[options.kind](row, Steps(options.steps, row.every, options.folder))
        return
    note = machine()
    torch.set_num_threads(1)
    rows = [one for one in ROWS if not options.only or one.name in options.only]
    (link_found,) = measure("link", ROWS[0], 0)
    link = LinkCost(latency_s=link_found["latency_s"], s_per_byte=link_found["s_per_byte"])
    said = (f"a message takes {1e6 * link.latency_s:.0f} us and a byte {1e9 * link.s_per_byte:.1f} "
            f"ns, both ways at once")  # fmt: skip
    print(said, flush=True)
    found, overlap = run_rows(rows, link, options.steps)
    if options.write:
        write_table(
            "two_machines", f"Two machines, {os.environ['RATE']} between them",
            ["under torchrun", "network, batch", "computing alone, ms", "a step, ms",
             "predicted, ms", "predicted : measured", "MB sent a step", "predicted against the "
             "first of its network and batch", "reached"],
            found,
            f"Wanted: predicted within {WITHIN:.0%}, and whether it is worth it predicted rightly; "
            f"of the overlapped rows what is exposed at most {OVERLAP_AT_MOST:.0%} of what is when "
            f"the sum begins after the backward pass. {overlap} On this link {said}. One rank a "
            f"machine (a network namespace), {options.steps} steps a row ({LEAST_STEPS} on deep). "
            f"{note}",
        )  # fmt: skip


def run_rows(rows: Sequence[Row], link: LinkCost, steps: int) -> tuple[list[list[str]], str]:
    """The cells of each, and what of the exchange the backward pass hides."""
    apart: dict[tuple[str, int], tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    firsts: dict[tuple[str, int], Found] = {}
    cells, overlaps = [], []
    for row in rows:
        of_row = row.whole(max(LEAST_STEPS, steps))
        key = (row.network, row.batch)
        if key not in apart:
            pushes = max(one.every for one in rows if (one.network, one.batch) == key)
            alone = measure("alone", row, max(of_row, 2 * pushes))
            apart[key] = alone, measure("bare", row, of_row)[0]
        (alone, bare), (pace,) = apart[key], measure("pace", row, of_row)
        alone_s = slower_s(alone, row.every)
        found = Found(
            row=row, alone_s=alone_s, step_s=pace["step_s"],
            predicted_s=alone_s + exchange_s(row, link, bare, pace), sent_bytes=pace["sent_bytes"],
        )  # fmt: skip
        cells.append(found.cells(firsts.setdefault(key, found)))
        print(" | ".join(cells[-1]), flush=True)
        if "overlapped" in row.name:
            others_s = {kind: measure(kind, row, of_row)[0]["step_s"]
                        for kind in ("by hand", *BUCKETS_MB)}  # fmt: skip
            overlaps.append(told_of_overlap(found, bare["step_s"], others_s))
            print(overlaps[-1], flush=True)
    return cells, " ".join(overlaps)


def told_of_overlap(found: Found, bare_s: float, others_s: Mapping[str, float]) -> str:
    """What is exposed, of what is without any overlap; and DDP's at its best."""
    exposed_s, all_s = found.step_s - bare_s, others_s["by hand"] - bare_s
    ddp_s = min(others_s[kind] for kind in BUCKETS_MB) - bare_s
    reached = "reached" if exposed_s <= OVERLAP_AT_MOST * all_s else "not reached"
    return (
        f"Exposed on {found.row.network}, {found.row.batch} a batch: {1000 * exposed_s:.0f} ms of "
        f"{1000 * all_s:.0f} ms, {exposed_s / all_s:.0%}, {reached} (DDP's better bucket "
        f"{1000 * ddp_s:.0f} ms, {ddp_s / all_s:.0%})."
    )


if __name__ == "__main__":
    main()
