"""Prepared folders, files and settings, and two runs at once in one folder, two hundred times each.

    python bench/hostile.py [--share 1.0] [--seed 0] [--write]

What is planted where, by whom, and how it is judged is in tests/support/planting.py. As root a part
of it belongs to a second user without rights, and folders are exchanged by that user meanwhile;
without root that part is left out, and said so. Writes results/hostile.md; ends with 1 at a fault.
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
    parser.add_argument("--share", type=float, default=1.0, help="of the tries and races")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    num_tries, num_races = (max(1, round(options.share * one)) for one in (TRIES, RACES))
    found = run_all(num_tries, num_races, options.seed, list(VERBS))
    rows = [
        [f"planted: {kind}", str(count), str(count - found.refused[kind]), str(found.refused[kind])]
        for kind, count in sorted(found.tries.items())
    ]
    rows += [
        [f"at once: {kind}", str(n), str(n), str(n)] for kind, n in sorted(found.races.items())
    ]
    for row in rows:
        print(" | ".join(row))
    for fault in found.faults:
        print(f"fault: {fault}", file=sys.stderr)
    left_out = f", {found.left_out} left out for want of root's rights" if found.left_out else ""
    text = (
        f"Faults: {len(found.faults)} in {num_tries} tries and {num_races} races; a fault is a "
        "changed decoy (content, mode, owner), a planted pickle that ran, a traceback, an end more "
        f"than 5 s later than undisturbed (the latest: {found.longest_s:.1f} s), or a race in "
        "which not exactly one went on and the other said one sentence. Of the tries "
        f"{found.second_user} are a second user's{left_out}. {note}"
    )
    print(text)
    if options.write:
        header = ("what", "how often", "went on", "refused in words")
        write_table("hostile", "Prepared folders", header, rows, text)
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
