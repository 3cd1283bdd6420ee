"""Compressed gradients: what the plan says that they save and cost, beside what runs take.

    python bench/compression.py [--rounds 5] [--updates 20] [--only NAME ...] [--write]

Runs of two workers (path collective, gloo) on the task mlp488k, each compressor once a round and
none, in an order of the round's own. First over this machine's loopback, then, where the user is
root, in a network namespace whose loopback carries 100 Mbit/s both ways together (tbf). Beside each
stands the verdict of its own plan; it is right where the sign of what was gained is that of what
was predicted, or what was gained cannot be told from nothing. Writes results/compression.md.
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
"""Before a command: it has a network of its own, which ends with it."""
BATCH = 64


@dataclass(slots=True)
class Row:
    """One compressor on one link, run by run.

    Attributes:
        update_s: of a run, an update.
        plans: of its plans, the figures in the trace.
    """

    update_s: list[float] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)


def take(compress: str, updates: int, prefix: Sequence[str], row: Row) -> None:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        words = [
            *prefix, sys.executable, "-m", "paceline", "train", "mlp488k", "--workers", "2",
            "--path", "collective", "--compress", compress, "--batch-size", str(BATCH),
            "--updates", str(updates), "--checkpoint-every", "never", "--threads", "1",
            "--device", "cpu", "--run-dir", str(place), "--json",
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{compress}: {done.stderr}{done.stdout}")
        row.update_s.append(json.loads(done.stdout)["time_per_update_s"])
        header = next(iter(read_trace(place / FILE_NAME)))
        assert isinstance(header, Header)
        if compress != NONE:
            row.plans.append(header.fields)


def measure(names: Sequence[str], rounds: int, updates: int, prefix: Sequence[str]) -> list[Row]:
    """None first, then each; a round has an order of its own."""
    rows = {name: Row() for name in (NONE, *names)}
    for number in range(rounds):
        order = list(rows)
        random.Random(number).shuffle(order)
        for name in order:
            take(name, updates, prefix, rows[name])
            print(".", end="", flush=True)
    print()
    return list(rows.values())


def lines(link: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[list[str]]:
    """A table's, of one link."""
    plain, *others = rows
    yield [link, NONE, f"{1e3 * statistics.median(plain.update_s):.1f}", *[""] * 6]
    for name, row in zip(names, others, strict=True):
        pairs = zip(plain.update_s, row.update_s, strict=True)
        gain, low, high = interval([1e3 * (before - after) for before, after in pairs])
        saved = statistics.median(
            1e3 * (one["plain_link_s"] - one["sent_link_s"]) for one in row.plans
        )
        spent = statistics.median(1e3 * one["coding_s"] for one in row.plans)
        is_even = low <= 0.0 <= high
        says = "wins" if saved > spent else "loses"
        is_right = is_even or (saved > spent) == (gain > 0.0)
        sent = statistics.median(one["sent_bytes"] / one["plain_bytes"] for one in row.plans)
        yield [
            link, name, f"{1e3 * statistics.median(row.update_s):.1f}", f"{sent:.1%}",
            f"{saved:.1f}", f"{spent:.1f}", says, f"{gain:.1f} [{low:.1f}, {high:.1f}]",
            "even" if is_even else "right" if is_right else "wrong",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(COMPRESSORS))
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    where, names = machine(), chosen.only
    table = [*lines(
        "loopback", names, measure(names, chosen.rounds, 5 * chosen.updates, [])
    )]  # fmt: skip
    if os.geteuid() == 0:
        rows = measure(names, chosen.rounds, chosen.updates, ON_SLOW)
        table += lines(SLOW, names, rows)
    header = [
        "link", "compressor", "ms an update", "bytes sent", "ms saved, plan", "ms spent, plan",
        "the plan says it", "ms gained [95 %]", "verdict",
    ]  # fmt: skip
    for one in [header, *table]:
        print("  ".join(f"{cell:>16}" for cell in one))
    if chosen.write:
        write_table(
            "compression", "Compressed gradients: the plan's verdict and the run's", header, table,
            f"Two workers, task mlp488k, a batch of {BATCH}, a thread each. What was gained is the "
            "time of an update of none less the compressor's, in pairs of one round; even: it "
            f"cannot be told from nothing. {where}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
