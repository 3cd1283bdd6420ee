"""Memory of the store while 100 workers push.

    python bench/memory.py [--quick] [--write]

100 members of the inline engine train on an arena of shared memory like that of the local engine;
the pages touched by the end are counted. The slot of each member, which holds its gradient until it
is used, counts as the member's own. Writes results/memory.md.
"""

import argparse
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from paceline.data.arrays import ArrayDataset
from paceline.engines import inline
from paceline.engines.inline import InlineEngine
from paceline.store.layout import lay_out
from paceline.store.memory import SharedMemory
from paceline.store.parameter_store import arena_bytes
from paceline.workloads.base import Splits, Task, classification_metrics
from quiet_runs import num_pushes, run
from table import machine, write_table

WORKERS, WANTED = 100, 3.0
WIDTHS = (784, 512, 512, 10)


def build() -> nn.Module:
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(WIDTHS):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_task(momentum: float) -> Task:
    def data() -> Splits:
        inputs = torch.rand(4 * WORKERS, WIDTHS[0])
        return Splits(train=ArrayDataset(inputs, torch.zeros(len(inputs), dtype=torch.long)))

    def optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    return Task(
        name="mlp", model=build, loss=loss, data=data, learning_rate=0.01, batch_size=WORKERS,
        epochs=1, metrics=classification_metrics, optimizer=optimizer,
    )  # fmt: skip


class MeasuredEngine(InlineEngine):
    """The inline engine over shared memory, which can count touched pages."""

    used_bytes = 0

    def __init__(self, num_seats: int) -> None:
        super().__init__(num_seats)
        self.shared = SharedMemory.create()
        self.arena = self.shared  # type: ignore[assignment]  # it has all methods of an arena

    def close(self) -> None:
        MeasuredEngine.used_bytes = self.shared.used_bytes()
        super().close()


def measure(protocol: str, momentum: float, workers: int) -> list[str]:
    with mock.patch.object(inline, "InlineEngine", MeasuredEngine):
        records = run(
            make_task(momentum), workers=workers, protocol=protocol, engine="inline",
            mini_batch_size=1, epochs=1, threads=1,
        )  # fmt: skip
    num_parameters = sum(parameter.numel() for parameter in build().parameters())
    size = 4 * num_parameters
    layout = lay_out(build().named_parameters(), (), ())
    slots = arena_bytes(layout, workers) - arena_bytes(layout, 0)
    beyond_slots_bytes = MeasuredEngine.used_bytes - slots
    ratio = beyond_slots_bytes / size
    state = "none" if not momentum else "momentum: as large as the parameters, in both blocks"
    is_judged = not momentum
    return [
        protocol, str(workers), str(num_pushes(records)), state, f"{size / 2**20:.2f}",
        f"{beyond_slots_bytes / 2**20:.2f}", f"{ratio:.3f}",
        f"<= {WANTED:g}" if is_judged else "beside it",
        ("yes" if ratio <= WANTED else "no") if is_judged else "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note = machine()
    cases = [(f"k-batch-async:{WORKERS}", 0.0, WORKERS)]
    if not options.quick:
        cases += [("async", 0.0, WORKERS), ("k-batch-async:2", 0.0, 2), ("full-sync", 0.0, WORKERS)]
        cases += [(f"k-batch-async:{WORKERS}", 0.9, WORKERS)]
    rows = []
    for case in cases:
        rows.append(measure(*case))
        print(" | ".join(rows[-1]), flush=True)
    header = [
        "protocol", "workers", "pushes", "optimizer's state", "parameters, MiB",
        "store beyond the members' slots, MiB", "times the parameters", "wanted", "reached",
    ]  # fmt: skip
    note = (
        "Touched pages of the arena at the end of the run: two versions and a sum. Whole "
        f"cache lines and the last page come on top of three times the parameters. {note}"
    )
    if options.write:
        write_table("memory", "Memory of the store", header, rows, note)


if __name__ == "__main__":
    main()
