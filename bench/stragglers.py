"""One of four workers five times slower: time to a fixed number of updates, with and without it.

    python bench/stragglers.py [--quick] [--write] [--updates N] [--pairs N]

A mini-batch takes 40 ms (``--delay 40ms``), or 200 ms on worker 0 (``--slow 0=5x``), and computes
almost nothing. Runs with and without the straggler in turn; the time is from the first grant to
the last update. ``least`` is the limit of the rule itself: a protocol that uses every push cannot
replace the work that the straggler no longer does, so k-batch-async has 3 + 1/5 workers left of 4.
Writes results/stragglers.md.
"""

import argparse
import statistics

from quiet_runs import first_grant_s, point_task, run, update_times_s
from table import machine, spread, write_table

WORKERS, STEP_S, FACTOR = 4, 0.040, 5
CASES = {
    "k-sync:3": 1.0,
    "k-batch-sync:3": 1.0,
    "k-batch-async:3": WORKERS / (WORKERS - 1 + 1 / FACTOR),
    "full-sync": float(FACTOR),
}
"""Protocol -> least ratio that its rule allows for these steps."""
WANTED = 1.1
JUDGED = ("k-sync:3", "k-batch-sync:3", "k-batch-async:3")


def run_seconds(protocol: str, num_updates: int, slow: tuple[str, ...]) -> float:
    records = run(
        point_task(40 * num_updates), workers=WORKERS, protocol=protocol, mini_batch_size=1,
        delay=(f"{1000 * STEP_S:g}ms",), slow=slow, updates=num_updates, path="store",
    )  # fmt: skip
    return update_times_s(records)[-1] - first_grant_s(records)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    num_updates, num_pairs = (10, 1) if options.quick else (options.updates, options.pairs)
    note = machine()
    rows = []
    for protocol, limit in CASES.items():
        without, with_straggler = [], []
        for _ in range(num_pairs):
            without.append(run_seconds(protocol, num_updates, ()))
            with_straggler.append(run_seconds(protocol, num_updates, (f"0={FACTOR}x",)))
        ratios = [a / b for a, b in zip(with_straggler, without, strict=True)]
        is_reached = statistics.median(ratios) <= WANTED
        rows.append([
            protocol, spread(without), spread(with_straggler), spread(ratios), f"{limit:.2f}",
            f"<= {WANTED}" if protocol in JUDGED else "beside them",
            ("yes" if is_reached else "no") if protocol in JUDGED else "",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "protocol", "s without", "s with one 5x slow", "ratio", "least", "wanted", "reached",
    ]  # fmt: skip
    note = (
        f"{num_updates} updates, {WORKERS} workers, {num_pairs} pairs in turn; median (least to "
        f"most). {note}"
    )
    if options.write:
        write_table("stragglers", "One worker five times slower", header, rows, note)


if __name__ == "__main__":
    main()
