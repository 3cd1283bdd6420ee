"""The cost of loops of other kinds: without a loader, against DDP; four lines, against none.

    python bench/any_loop.py [--rounds 8] [--write]

Two halves. In the first two workers train a GPT (4 layers, 128 wide, 64 tokens, batch 24, AdamW) in
a loop without a loader, `for number in pace.updates(n)`, where each draws 12 pieces a step; against
the same loop under DDP that keeps freed memory, too, with the best of twelve settings, found
before, and Paceline once more.
All are alive at once and take blocks of steps in turn. In the second one worker runs three kinds
of loops, each with the four lines, bare, and bare again, as in bench/overhead.py: over a loader,
over numbers, and with two optimizers (a GAN). Writes results/any_loop.md.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import overhead
from overhead import BATCH, LEARNING_RATE, Step, make_data, makers_of, measure
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.workloads.images import build_lenet
from table import interval, machine, spread, write_table
from worlds import World

MODEL, GLOBAL_BATCH, STEPS = "gpt", 24, 12
ROLES = {"pace": "pace", "again": "pace", "ddp": "ddp"}
WANTED_OF_DDP = 1.0
BLOCKS_A_ROUND, PAIRS_A_ROUND, LIMIT_S_A_ROUND = 3, 50, 22.5
NOISE, WIDTH = 64, 608
"""Sizes with which a step of the GAN takes some 30 ms, as one of LeNet does."""
loss_of = nn.functional.cross_entropy

# -- beside DDP --------------------------------------------------------------------------------


def ddp_rows(rounds: int) -> list[list[str]]:
    total = STEPS * (rounds + 1)
    worlds = {
        name: World(
            role, model=MODEL, batch=GLOBAL_BATCH, total=total, tune=STEPS // 4, draws=True
        )
        for name, role in ROLES.items()
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in worlds}
    for number in range(rounds + 1):
        for name in worlds if number % 2 else reversed(worlds):
            seconds = worlds[name].steps(STEPS)
            if number:  # the first block warms up
                times[name].append(1000 * seconds / STEPS)
    cap, view, static = worlds["ddp"].best or (25, False, False)
    for world in worlds.values():
        world.end()
    rows = []
    for name, title, wanted in (
        ("ddp", f"DDP ({cap} MB, view {view}, static {static})", f">= {WANTED_OF_DDP}"),
        ("again", "Paceline again", "1 inside"),
    ):
        ratios = [a / b for a, b in zip(times[name], times["pace"], strict=True)]
        median, low, high = interval(ratios)
        is_reached = low >= WANTED_OF_DDP if name == "ddp" else low <= 1.0 <= high
        rows.append([
            f"GPT over numbers, 2 workers; {title} : Paceline", spread(times[name]),
            spread(times["pace"]), f"{median:.4f}", f"{low:.4f} to {high:.4f}", str(len(ratios)),
            wanted, "yes" if is_reached else "no",
        ])  # fmt: skip
    return rows


# -- one worker --------------------------------------------------------------------------------


def draw_batch(data: ArrayDataset) -> tuple[Tensor, Tensor]:
    """Draw a batch."""
    return collate_batch(data.__getitems__(torch.randint(len(data), (BATCH,)).tolist()))


def make_lenet() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build_lenet("default")
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def bare_numbers(data: ArrayDataset) -> Step:
    model, optimizer = make_lenet()

    def step() -> None:
        inputs, targets = draw_batch(data)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()

    return step


def paced_numbers(data: ArrayDataset) -> Step:
    pace = Pace(SoloExchange(), Context())
    model, optimizer = pace.prepare(*make_lenet())

    def loop() -> Iterator[None]:
        for _ in pace.updates(1_000_000_000):
            with pace.step():
                inputs, targets = draw_batch(data)
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            yield

    return loop().__next__


@dataclass(frozen=True, slots=True)
class Gan:
    """Two networks, their optimizers, and the loader of real images."""

    generator: nn.Module
    discriminator: nn.Module
    generator_optimizer: torch.optim.Optimizer
    discriminator_optimizer: torch.optim.Optimizer
    loader: Any

    def step(self, images: Tensor) -> None:
        """Step both; the generator's loss uses the updated discriminator."""
        generated = self.generator(torch.randn(len(images), NOISE))
        self.discriminator_optimizer.zero_grad()
        real, fake = self.discriminator(images), self.discriminator(generated.detach())
        (nn.functional.softplus(-real) + nn.functional.softplus(fake)).mean().backward()
        self.discriminator_optimizer.step()
        self.generator_optimizer.zero_grad()
        nn.functional.softplus(-self.discriminator(generated)).mean().backward()
        self.generator_optimizer.step()


def make_gan(data: ArrayDataset) -> Gan:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 784), nn.Sigmoid(), nn.Unflatten(1, (1, 28, 28)),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Flatten(), nn.Linear(784, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1),
    )  # fmt: skip
    return Gan(
        generator, discriminator, torch.optim.Adam(generator.parameters(), lr=2e-4),
        torch.optim.Adam(discriminator.parameters(), lr=2e-4),
        DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate_batch),
    )  # fmt: skip


def bare_gan(data: ArrayDataset) -> Step:
    gan = make_gan(data)

    def loop() -> Iterator[None]:
        while True:
            for images, _ in gan.loader:
                gan.step(images)
                yield

    return loop().__next__


def paced_gan(data: ArrayDataset) -> Step:
    pace = Pace(SoloExchange(), Context())
    parts = make_gan(data)
    gan = Gan(*pace.prepare(
        parts.generator, parts.discriminator, parts.generator_optimizer,
        parts.discriminator_optimizer, parts.loader,
    ))  # fmt: skip

    def loop() -> Iterator[None]:
        for _ in pace.epochs(1_000_000):
            for images, _ in gan.loader:
                with pace.step():
                    gan.step(images)
                yield

    return loop().__next__


Maker = Callable[[ArrayDataset], Step]
KINDS: dict[str, tuple[Maker, Maker]] = {
    "LeNet over a loader": (overhead.with_four_lines, overhead.bare),
    "LeNet over numbers": (paced_numbers, bare_numbers),
    "GAN, two optimizers": (paced_gan, bare_gan),
}


def print_rows(rows: list[list[str]]) -> None:
    for row in rows:
        print(" | ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, added = machine(), []
    rows = ddp_rows(BLOCKS_A_ROUND * options.rounds)
    print_rows(rows)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = make_data(60_000)
    for name, (four_lines, bare) in KINDS.items():
        makers = makers_of(partial(four_lines, data), partial(bare, data))
        times = measure(makers, PAIRS_A_ROUND * options.rounds, LIMIT_S_A_ROUND * options.rounds)
        rows += overhead.rows_of(times, f"{name}, 1 worker; ")
        print_rows(rows[-2:])
        added.append(f"{name}: {overhead.added_us(times):.0f} us")
    print("; ".join(added))
    header = [
        "loops", "ms a step", "held against, ms a step", "median ratio", "95 % interval", "pairs",
        "wanted", "reached",
    ]  # fmt: skip
    num_blocks = BLOCKS_A_ROUND * options.rounds
    method = (
        f"Of DDP the lower end is wanted, of one worker the upper one. {num_blocks} blocks of "
        f"{STEPS} steps beside DDP, blocks of {overhead.STEPS} for one worker, in turn; median "
        "(least to most); interval of the median by bootstrap, beside DDP over blocks, for one "
        "worker over the medians of builds. Four lines add, a step: "
    )
    if options.write:
        write_table(
            "any_loop", "Loops of other kinds", header, rows, f"{method}{'; '.join(added)}. {note}"
        )


if __name__ == "__main__":
    main()
