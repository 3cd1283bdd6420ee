"""Two machines and 100 Mbit/s between them: what a step takes, beside what the cost model says.

    bench/netns.sh [--steps 24] [--only ROW ...] [--write]

Predicted is computing alone, in the mean of the slower of the two, since both wait for it; and what
the exchange adds: the closed formula of the schedule with what a message costs on this link, of the
bytes of an update, over the local steps of one; of a compressor what its own run's plan has said,
before its first step. Where the gradients come in several buckets each begins when it is there and
the one before is through; of what is merged some local steps later, what these do not hide. One
rank a machine, a thread each; what runs there is machine_steps.py. Writes results/two_machines.md.
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
WITHIN, OVERLAP_AT_MOST = 0.10, 0.60
EVEN = 0.02
"""So near to the first nobody can tell which is faster, by prediction and by measurement."""
PRICE = ("sent_link_s", "coding_s")
"""In a trace's first line: what the plan says of the link's time, and of the compressor's own."""


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
    """What the plan of the run there has said that a compressor costs."""
    trace = place / "run" / FILE_NAME
    header = next(iter(read_trace(trace))) if trace.is_file() else None
    fields = getattr(header, "fields", {})
    return {name: fields[name] for name in PRICE if name in fields}


def slower_s(alone: Sequence[Mapping[str, Any]], every: int) -> float:
    """A step, where after so many of them each waits for the slower one: all pairs of what was."""
    sums = [
        [sum(steps_s[at : at + every]) for at in range(0, len(steps_s) - every + 1, every)]
        for steps_s in (one["steps_s"] for one in alone)
    ]
    mean_s: float = statistics.fmean(max(pair) for pair in product(*sums))
    return mean_s / every


def exchange_s(
    row: Row, link: LinkCost, bare: Mapping[str, Any], found: Mapping[str, Any]
) -> float:
    """What it adds to a step.

    Args:
        bare: of the loop by itself.
        found: of the run; only its plan's price is looked at.
    """
    named = list(make_model(row.network).named_parameters())
    parameters = lay_out(named, [], []).parameters
    hidden_s = int(row.settings.get("overlap", "0")) * float(bare["step_s"])
    if "compress" in row.settings:
        # Of two operations, alike in size, each has half of the steps that may hide it.
        sent_s, coding_s = float(found["sent_link_s"]), float(found["coding_s"])
        return (max(0.0, sent_s - hidden_s) + coding_s) / row.every
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
    exposed: float = max(0.0, free_s - max(ready_s.values()))
    return exposed


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
    options = parser.parse_args()
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
