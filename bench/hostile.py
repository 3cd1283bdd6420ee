"""Prepared folders, files and settings, and two runs at once in one folder, two hundred times each.

    python bench/hostile.py [--share 1.0] [--seed 0] [--write]

tests/support/planting.py plants the files and judges the result. As root a part of them belongs to
a second user without rights, who exchanges folders meanwhile; without root that part is left out
and reported. Writes results/hostile.md; exits with 1 at a fault.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from planting import VERBS, run_all
from table import machine, write_table

TRIES, RACES = 200, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the tries and races to run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    num_tries, num_races = (max(1, round(options.share * n)) for n in (TRIES, RACES))
    result = run_all(num_tries, num_races, options.seed, list(VERBS))
    rows = [
        [
            f"planted: {kind}",
            str(count),
            str(count - result.refused[kind]),
            str(result.refused[kind]),
        ]
        for kind, count in sorted(result.tries.items())
    ]
    rows += [
        [f"at once: {kind}", str(n), str(n), str(n)] for kind, n in sorted(result.races.items())
    ]
    for row in rows:
        print(" | ".join(row))
    for fault in result.faults:
        print(f"fault: {fault}", file=sys.stderr)
    left_out = f", {result.left_out} left out for want of root's rights" if result.left_out else ""
    text = (
        f"Faults: {len(result.faults)} in {num_tries} tries and {num_races} races; a fault is a "
        "changed decoy (content, mode, owner), a planted pickle that ran, a traceback, an end more "
        f"than 5 s later than undisturbed (the latest: {result.longest_s:.1f} s), or a race in "
        "which not exactly one went on and the other said one sentence. Of the tries "
        f"{result.second_user} are a second user's{left_out}. {note}"
    )
    print(text)
    if options.write:
        header = ("what", "how often", "went on", "refused in words")
        write_table("hostile", "Prepared folders", header, rows, text)
    sys.exit(bool(result.faults))


if __name__ == "__main__":
    main()
