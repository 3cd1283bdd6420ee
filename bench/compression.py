"""Compressed gradients: the plan's prediction of gain and cost, against the runs.

    python bench/compression.py [--rounds 5] [--updates 20] [--only NAME ...] [--write]

Runs of two workers (path collective, gloo) on the task mlp488k, each compressor and none once a
round, in a random order for each round. First over this machine's loopback, then, if the user is
root, in a network namespace whose loopback carries 100 Mbit/s both ways together (tbf). The verdict
of each run's own plan is right if the sign of the gain is the predicted one, or the gain cannot be
distinguished from zero. Writes results/compression.md.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Header
from table import interval, machine, write_table

COMPRESSORS = ("fp16", "bf16", "int8", "int4", "topk:1%", "powersgd:2")
NONE = "none"
SLOW = "100 Mbit/s"
ON_SLOW = (
    "unshare", "--net", "sh", "-c",
    "ip link set lo mtu 1500 up && "
    'tc qdisc add dev lo root tbf rate 100mbit burst 64kb latency 2s && exec "$@"', "sh",
)  # fmt: skip
"""Prefix of a command that gives it a network namespace of its own."""
BATCH = 64


@dataclass(slots=True)
class Row:
    """One compressor on one link, run by run.

    Attributes:
        update_s: seconds an update, of each run.
        plans: the figures of each run's plan, from its trace.
    """

    update_s: list[float] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)


def run_once(compress: str, updates: int, prefix: Sequence[str], row: Row) -> None:
    """Run a compressor once."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            *prefix, sys.executable, "-m", "paceline", "train", "mlp488k", "--workers", "2",
            "--path", "collective", "--compress", compress, "--batch-size", str(BATCH),
            "--updates", str(updates), "--checkpoint-every", "never", "--threads", "1",
            "--device", "cpu", "--run-dir", str(run_dir), "--json",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{compress}: {result.stderr}{result.stdout}")
        row.update_s.append(json.loads(result.stdout)["time_per_update_s"])
        header = next(iter(read_trace(run_dir / FILE_NAME)))
        assert isinstance(header, Header)
        if compress != NONE:
            row.plans.append(header.fields)


def measure(names: Sequence[str], rounds: int, updates: int, prefix: Sequence[str]) -> list[Row]:
    """Measure none and each compressor, in a random order for each round."""
    rows = {name: Row() for name in (NONE, *names)}
    for number in range(rounds):
        order = list(rows)
        random.Random(number).shuffle(order)
        for name in order:
            run_once(name, updates, prefix, rows[name])
            print(".", end="", flush=True)
    print()
    return list(rows.values())


def table_rows(link: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the table's rows of one link."""
    plain, *compressed = rows
    yield [link, NONE, f"{1e3 * statistics.median(plain.update_s):.1f}", *[""] * 6]
    for name, row in zip(names, compressed, strict=True):
        pairs = zip(plain.update_s, row.update_s, strict=True)
        gain, low, high = interval([1e3 * (before - after) for before, after in pairs])
        saved = statistics.median(
            1e3 * (plan["plain_link_s"] - plan["sent_link_s"]) for plan in row.plans
        )
        spent = statistics.median(1e3 * plan["coding_s"] for plan in row.plans)
        is_zero = low <= 0.0 <= high
        prediction = "wins" if saved > spent else "loses"
        is_right = is_zero or (saved > spent) == (gain > 0.0)
        sent = statistics.median(plan["sent_bytes"] / plan["plain_bytes"] for plan in row.plans)
        yield [
            link, name, f"{1e3 * statistics.median(row.update_s):.1f}", f"{sent:.1%}",
            f"{saved:.1f}", f"{spent:.1f}", prediction, f"{gain:.1f} [{low:.1f}, {high:.1f}]",
            "even" if is_zero else "right" if is_right else "wrong",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(COMPRESSORS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note, names = machine(), options.only
    table = [*table_rows(
        "loopback", names, measure(names, options.rounds, 5 * options.updates, [])
    )]  # fmt: skip
    if os.geteuid() == 0:
        slow_rows = measure(names, options.rounds, options.updates, ON_SLOW)
        table += table_rows(SLOW, names, slow_rows)
    header = [
        "link", "compressor", "ms an update", "bytes sent", "ms saved, plan", "ms spent, plan",
        "the plan says it", "ms gained [95 %]", "verdict",
    ]  # fmt: skip
    for row in [header, *table]:
        print("  ".join(f"{cell:>16}" for cell in row))
    if options.write:
        write_table(
            "compression", "Compressed gradients: the plan's verdict and the run's", header, table,
            f"Two workers, task mlp488k, a batch of {BATCH}, a thread each. What was gained is the "
            "time of an update of none less the compressor's, in pairs of one round; even: it "
            f"cannot be told from nothing. {machine_note}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
