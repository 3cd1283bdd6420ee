"""A hundred thousand damaged files: is each refused in words, or loaded as what it was?

    python bench/fuzz.py [--share 1.0] [--write]

Bits are flipped, ends and middles cut off, pieces swapped, doubled or made up, words and numbers of
JSON replaced. Where a format has checksums, every second input has them computed again, so that it
passes the door and what reads behind it is on its own; formats without pass all. A fault is any
exception but Paceline's own, a hang of 20 s, an input whose checksum is wrong and that loads as
something else, and one that passes and does not add up (a sample lost or used twice);
tests/support/fuzzing.py says what each reader does. Writes results/fuzz.md; ends with 1 at a fault.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from fuzzing import READERS, Tally, attack
from table import machine, write_table

INPUTS = {
    "settings": 15_000, "trace": 15_000, "checkpoint": 12_000, "ledger": 15_000, "resume": 3_000,
    "replay": 3_000, "data": 15_000, "measurements": 12_000, "model": 12_000,
}  # fmt: skip
WHAT = {
    "settings": "paceline.toml, paceline.yaml: every setting",
    "trace": "trace.jsonl: report, picture, JSON, one sample's way, profile",
    "checkpoint": "each file of the newest of two: settings, coordinator, model, optimizer, worker",
    "ledger": "the coordinator's state: the epoch is then finished, each sample once",
    "resume": "each file of the only one: the run goes on to its end",
    "replay": "trace.jsonl: the run is made again",
    "data": "idx files, plain and gzip",
    "measurements": "tables of bench throughput, outcomes of --fast auto",
    "model": "model.safetensors, for an export",
}
NOTE = (
    "Past the door: checksums were computed again after the damage, or there are none. Loaded: "
    "what was there nevertheless (an older checkpoint, the whole beginning of a trace, a part that "
    "the reader does not use), or past the door something that adds up."
)
PART = 500
"""Inputs a task of the pool."""


def part(name: str, num_inputs: int, seed: int) -> Tally:
    torch.set_num_threads(1)
    reader = next(one for one in READERS if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        return attack(reader, Path(folder), num_inputs, seed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, rows, faults = machine(), [], []
    total = Tally()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = {
            name: [
                pool.submit(part, name, PART, seed)
                for seed in range(max(1, round(options.share * INPUTS[name] / PART)))
            ]
            for name in INPUTS
        }
        for name, running in parts.items():
            one = Tally()
            for tally in (future.result() for future in running):
                one.add(tally)
            total.add(one)
            faults += one.faults
            rows.append(_row(name, one))
            print(" | ".join(rows[-1]), flush=True)
    rows.append(_row("all", total))
    print(" | ".join(rows[-1]))
    print("\n".join(faults))
    if options.write:
        header = ["what is read", "inputs", "past the door", "refused in words", "loaded", "faults"]
        write_table("fuzz", "Damaged files", header, rows, f"{NOTE} {note}")
    sys.exit(bool(faults))


def _row(name: str, one: Tally) -> list[str]:
    what = f"{name}: {WHAT[name]}" if name in WHAT else name
    numbers = (one.tried, one.sealed, one.refused, one.loaded, len(one.faults))
    return [what, *(f"{number:,}" for number in numbers)]


if __name__ == "__main__":
    main()
