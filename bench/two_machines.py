"""Two machines with 100 Mbit/s between them: the time of a step against the cost model.

    bench/netns.sh [--steps 24] [--only ROW ...] [--write]

The prediction is computing alone, in the mean of the slower of the two, since both wait for it,
plus what the exchange adds: the closed formula of the schedule with the measured cost of a message
on this link, for the bytes of an update, over its local steps; for a compressor, the price in the
plan of its own run, from before its first step. Of several buckets of gradients each begins when it
is ready and the one before is done; of an exchange that is merged some local steps later, the part
counts that these do not hide. One rank a machine, a thread each, runs machine_steps.py. Writes
results/two_machines.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from machine_steps import BUCKETS_MB, HERE, LEAST_STEPS, RANKS, ROWS, Row
from paceline.collectives import parse
from paceline.collectives.base import LinkCost
from paceline.collectives.transfers import Operation
from paceline.engines.torchrun.buckets import make_buckets
from paceline.store.fragments import Fragments
from paceline.store.layout import lay_out
from paceline.trace import FILE_NAME, read_trace
from table import machine, write_table
from worlds import make_model

MACHINES, FIRST_ADDRESS, PORT = ("first", "second"), "10.0.0.1", "29500"
WITHIN, MAX_EXPOSED = 0.10, 0.60
EVEN = 0.02
"""Within this of the first row, neither prediction nor measurement tells which is faster."""
PRICE = ("sent_link_s", "coding_s")
"""Fields of a trace's header: the plan's time of the link, and of the compressor itself."""


def measure(kind: str, row: Row, num_steps: int) -> list[dict[str, Any]]:
    """Return the result of rank 0, or of each machine where it runs alone."""
    is_alone = kind == "alone"
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name if is_alone else "both") for name in MACHINES]
        processes, logs = [], [Path(folder, f"log-{name}") for name in MACHINES]
        for rank, name in enumerate(MACHINES):
            folders[rank].mkdir(exist_ok=True)
            rendezvous = ["1", "--node-rank", "0", "--master-addr", "127.0.0.1"]
            if not is_alone:
                rendezvous = [str(RANKS), "--node-rank", str(rank), "--master-addr", FIRST_ADDRESS]
            with logs[rank].open("w") as log:
                processes.append(subprocess.Popen(
                    [name, sys.executable, "-m", "torch.distributed.run", "--nnodes", *rendezvous,
                     "--nproc-per-node", "1", "--master-port", PORT, str(HERE), "--kind", kind,
                     "--row", row.name, "--folder", str(folders[rank]), "--steps", str(num_steps)],
                    env=_environment(row, folders[rank]), stdout=log, stderr=log,
                ))  # fmt: skip
        for process in processes:
            process.wait()
        files = [run_folder / "found" for run_folder in dict.fromkeys(folders)]
        if not all(file.is_file() for file in files):
            text = "\n".join(log.read_text() for log in logs)
            sys.exit(f"{kind}, {row.name}, came to no end:\n{text}")
        return [{**json.loads(file.read_text()), **_price_in(file.parent)} for file in files]


def _environment(row: Row, folder: Path) -> dict[str, str]:
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONWARNINGS": "ignore", "PACELINE_CHECKPOINT_EVERY": "never",
        "PACELINE_RUN_DIR": f"{folder}/run",
        **{f"PACELINE_{name.upper()}": value for name, value in row.settings.items()},
    }  # fmt: skip


def _price_in(folder: Path) -> dict[str, Any]:
    """Return the cost of a compressor by the plan of the run in ``folder``."""
    trace = folder / "run" / FILE_NAME
    header = next(iter(read_trace(trace))) if trace.is_file() else None
    fields = getattr(header, "fields", {})
    return {name: fields[name] for name in PRICE if name in fields}


def slower_s(alone: Sequence[Mapping[str, Any]], every: int) -> float:
    """Return a step's time if each ``every`` steps wait for the slower machine: over all pairs."""
    sums = [
        [sum(steps_s[start : start + every]) for start in range(0, len(steps_s) - every + 1, every)]
        for steps_s in (result["steps_s"] for result in alone)
    ]
    mean_s: float = statistics.fmean(max(pair) for pair in product(*sums))
    return mean_s / every


def exchange_s(
    row: Row, link: LinkCost, bare: Mapping[str, Any], result: Mapping[str, Any]
) -> float:
    """Return the time that the exchange adds to a step.

    Args:
        bare: result of the loop by itself.
        result: result of the run, of which only the plan's price is used.
    """
    named_parameters = list(make_model(row.network).named_parameters())
    parameters = lay_out(named_parameters, [], []).parameters
    hidden_s = int(row.settings.get("overlap", "0")) * float(bare["step_s"])
    if "compress" in row.settings:
        # Two operations of similar size: each has half of the steps that may hide it.
        sent_s, coding_s = float(result["sent_link_s"]), float(result["coding_s"])
        return (max(0.0, sent_s - hidden_s) + coding_s) / row.every
    schedule = parse(row.settings.get("collective", "ring"), RANKS)  # gloo itself uses a ring

    def seconds(num_bytes: int) -> float:
        return schedule.formula_s(Operation.ALL_REDUCE, num_bytes, link)

    if row.every > 1:
        fragments = Fragments(parameters, row.num_fragments).each
        exposed_s = [max(0.0, seconds(span.stop - span.start) - hidden_s) for span in fragments]
        return sum(exposed_s) / len(exposed_s) / row.every
    ready_s = {int(number): at_s for number, at_s in bare["ready_s"].items()}
    free_s = 0.0
    for bucket in make_buckets(parameters, torch.device("cpu")):
        bucket_ready_s = max(ready_s[number] for number in bucket.numbers)
        free_s = max(free_s, bucket_ready_s) + seconds(bucket.span.stop - bucket.span.start)
    exposed: float = max(0.0, free_s - max(ready_s.values()))
    return exposed


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """The result of one row; seconds of a step."""

    row: Row
    alone_s: float
    step_s: float
    predicted_s: float
    sent_bytes: float

    @property
    def is_near(self) -> bool:
        return abs(self.predicted_s / self.step_s - 1.0) <= WITHIN

    def cells(self, first: "RowResult") -> list[str]:
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
    parser.add_argument("--steps", type=int, default=24, help="counted steps of a row")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    torch.set_num_threads(1)
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    (link_found,) = measure("link", ROWS[0], 0)
    link = LinkCost(latency_s=link_found["latency_s"], s_per_byte=link_found["s_per_byte"])
    link_text = (
        f"a message takes {1e6 * link.latency_s:.0f} us and a byte "
        f"{1e9 * link.s_per_byte:.1f} ns, both ways at once"
    )
    print(link_text, flush=True)
    cells, overlap = run_rows(rows, link, options.steps)
    if options.write:
        write_table(
            "two_machines", f"Two machines, {os.environ['RATE']} between them",
            ["under torchrun", "network, batch", "computing alone, ms", "a step, ms",
             "predicted, ms", "predicted : measured", "MB sent a step", "predicted against the "
             "first of its network and batch", "reached"],
            cells,
            f"Wanted: predicted within {WITHIN:.0%}, and whether it is worth it predicted rightly; "
            f"of the overlapped rows what is exposed at most {MAX_EXPOSED:.0%} of what is when "
            f"the sum begins after the backward pass. {overlap} On this link {link_text}. One rank "
            f"a machine (a network namespace), {options.steps} steps a row ({LEAST_STEPS} on deep)."
            f" {note}",
        )  # fmt: skip


def run_rows(rows: Sequence[Row], link: LinkCost, steps: int) -> tuple[list[list[str]], str]:
    """Return the cells of each row, and the part of the exchange that the backward pass hides."""
    baselines: dict[tuple[str, int], tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    firsts: dict[tuple[str, int], RowResult] = {}
    cells, overlaps = [], []
    for row in rows:
        num_steps = row.whole(max(LEAST_STEPS, steps))
        key = (row.network, row.batch)
        if key not in baselines:
            most_every = max(
                peer_row.every for peer_row in rows if (peer_row.network, peer_row.batch) == key
            )
            alone = measure("alone", row, max(num_steps, 2 * most_every))
            baselines[key] = alone, measure("bare", row, num_steps)[0]
        (alone, bare), (pace,) = baselines[key], measure("pace", row, num_steps)
        alone_s = slower_s(alone, row.every)
        result = RowResult(
            row=row, alone_s=alone_s, step_s=pace["step_s"],
            predicted_s=alone_s + exchange_s(row, link, bare, pace), sent_bytes=pace["sent_bytes"],
        )  # fmt: skip
        cells.append(result.cells(firsts.setdefault(key, result)))
        print(" | ".join(cells[-1]), flush=True)
        if "overlapped" in row.name:
            peer_step_s = {kind: measure(kind, row, num_steps)[0]["step_s"]
                           for kind in ("by hand", *BUCKETS_MB)}  # fmt: skip
            overlaps.append(describe_overlap(result, bare, peer_step_s))
            print(overlaps[-1], flush=True)
    return cells, " ".join(overlaps)


def describe_overlap(
    result: RowResult, bare: Mapping[str, Any], peer_step_s: Mapping[str, float]
) -> str:
    """Describe the exposed part of the exchange without overlap, the least, and the best of DDP.

    Nothing is hidden but what is sent between the first gradient and the last.
    """
    bare_s, ready_s = bare["step_s"], bare["ready_s"].values()
    exposed_s, full_s = result.step_s - bare_s, peer_step_s["by hand"] - bare_s
    least_s = max(0.0, full_s - (max(ready_s) - min(ready_s)))
    ddp_s = min(peer_step_s[kind] for kind in BUCKETS_MB) - bare_s
    reached = "reached" if exposed_s <= MAX_EXPOSED * full_s else "not reached"
    return (
        f"Exposed on {result.row.network}, {result.row.batch} a batch: {1000 * exposed_s:.0f} ms "
        f"of {1000 * full_s:.0f} ms, {exposed_s / full_s:.0%}, {reached} (DDP's better bucket "
        f"{1000 * ddp_s:.0f} ms, {ddp_s / full_s:.0%}; however buckets are cut, at least "
        f"{least_s / full_s:.0%}: the backward pass is too short)."
    )


if __name__ == "__main__":
    main()
