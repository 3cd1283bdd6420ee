"""A hundred thousand damaged files: each is refused with a message, or loaded unchanged.

    python bench/fuzz.py [--share 1.0] [--write]

Bits are flipped, ends and middles cut off, pieces swapped, doubled or made up, words and numbers of
JSON replaced. If a format has checksums, every second input has them recomputed, so that it passes
the check and tests the code behind it; formats without checksums pass all. A fault is any exception
except Paceline's own, a hang of 20 s, an input with a wrong checksum that loads as something else,
and one that passes and is inconsistent (a sample lost or used twice); tests/support/fuzzing.py
defines what each reader does. Writes results/fuzz.md; exits with 1 at a fault.
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
DESCRIPTIONS = {
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
"""Inputs of one task of the pool."""


def attack_part(name: str, num_inputs: int, seed: int) -> Tally:
    torch.set_num_threads(1)
    reader = next(reader for reader in READERS if reader.name == name)
    with tempfile.TemporaryDirectory() as folder:
        return attack(reader, Path(folder), num_inputs, seed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0, help="share of the inputs to try")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, rows, faults = machine(), [], []
    total = Tally()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures_by_name = {
            name: [
                pool.submit(attack_part, name, PART, seed)
                for seed in range(max(1, round(options.share * INPUTS[name] / PART)))
            ]
            for name in INPUTS
        }
        for name, futures in futures_by_name.items():
            subtotal = Tally()
            for tally in (future.result() for future in futures):
                subtotal.add(tally)
            total.add(subtotal)
            faults += subtotal.faults
            rows.append(_row(name, subtotal))
            print(" | ".join(rows[-1]), flush=True)
    rows.append(_row("all", total))
    print(" | ".join(rows[-1]))
    print("\n".join(faults))
    if options.write:
        header = ["what is read", "inputs", "past the door", "refused in words", "loaded", "faults"]
        write_table("fuzz", "Damaged files", header, rows, f"{NOTE} {note}")
    sys.exit(bool(faults))


def _row(name: str, tally: Tally) -> list[str]:
    label = f"{name}: {DESCRIPTIONS[name]}" if name in DESCRIPTIONS else name
    numbers = (tally.tried, tally.sealed, tally.refused, tally.loaded, len(tally.faults))
    return [label, *(f"{number:,}" for number in numbers)]


if __name__ == "__main__":
    main()
