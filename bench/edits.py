"""The cost of detecting that a loop changed its gradients between backward and step.

    python bench/edits.py [--pairs 300] [--write]

A forward and a backward pass on a worker's replica, 128 samples, one thread, in blocks of four,
watched and not watched in turn; and the watching alone, its calls timed in a row, as a share of the
step. The second figure is more precise. Writes results/edits.md.
"""

import argparse
from time import perf_counter

import torch
from torch import nn

from paceline.replica.edits import Edits
from paceline.replica.replica import Replica
from paceline.workloads import load_task
from table import interval, machine, spread, write_table

STEPS, CALLS, WANTED = 4, 400, 0.003
SHAPES = {"lenet": (128, 1, 28, 28), "resnet18": (8, 1, 28, 28)}


class Watched:
    """One worker's model, with its gradients in a slot."""

    def __init__(self, name: str) -> None:
        self.model = load_task(name, 2).model()
        self.inputs = torch.randn(SHAPES[name])
        self.targets = torch.randint(0, 10, (len(self.inputs),))
        with torch.no_grad():
            self.model(self.inputs)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        replica = Replica(self.model, optimizer, optimizer)
        replica.live_alone()
        slot = torch.zeros(replica.layout.slot_bytes, dtype=torch.uint8)
        replica.push_into(slot, lambda: None)
        self.edits = Edits(replica, is_refused=True)

    def block_s(self, *, is_watched: bool) -> float:
        """Return the seconds of a step."""
        start_s = perf_counter()
        for _ in range(STEPS):
            self.model.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
            if is_watched:
                self.edits.before_backward()
                loss.backward()
                self.edits.after_backward()
                self.edits.check()
                self.edits.pushed()
            else:
                loss.backward()
        return (perf_counter() - start_s) / STEPS

    def watching_s(self) -> float:
        """Return the seconds that the calls of a step take, timed in a row."""
        start_s = perf_counter()
        for _ in range(CALLS):
            self.edits.before_backward()
            self.edits.after_backward()
            self.edits.check()
            self.edits.pushed()
        return (perf_counter() - start_s) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    note, rows = machine(), list[list[str]]()
    for name in SHAPES:
        watched = Watched(name)
        for is_watched in (True, False):
            watched.block_s(is_watched=is_watched)
        bare_ms, ratios, watching_us = list[float](), list[float](), list[float]()
        for pair in range(options.pairs if name == "lenet" else options.pairs // 10):
            order = (True, False) if pair % 2 else (False, True)
            block_s = {is_on: watched.block_s(is_watched=is_on) for is_on in order}
            bare_ms.append(1e3 * block_s[False])
            ratios.append(block_s[True] / block_s[False])
            watching_us.append(1e6 * watched.watching_s())
        median, low, high = interval(ratios)
        share = (
            sorted(watching_us)[len(watching_us) // 2] / sorted(bare_ms)[len(bare_ms) // 2] / 1e3
        )
        rows.append(
            [
                name, spread(bare_ms), spread(watching_us, 1), f"{share:.2%}", f"<= {WANTED:.1%}",
                "yes" if share <= WANTED else "no", f"{median:.4f} ({low:.4f} to {high:.4f})",
            ]
        )  # fmt: skip
    header = [
        "model", "forward and backward, ms", "watching, us", "share", "wanted", "reached",
        "watched : not watched, 95 % interval",
    ]  # fmt: skip
    if options.write:
        title = "Finding changed gradients"
        write_table("edits", title, header, rows, f"Median (least to most). {note}")
    for row in rows:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
