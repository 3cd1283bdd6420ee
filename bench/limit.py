"""Distance to the limit: a step of Paceline against tuned DDP and against no exchange at all.

    python bench/limit.py [--blocks 7] [--only NAME] [--write]

Two workers of one thread each, full-sync, eager, fp32. Against them, in turn, block by block:

    again   Paceline once more: how far equal figures differ on this machine
    DDP     two processes over gloo, with the best of twelve settings, found before
    one     one process with two threads
    bound   two processes, each with its half of every batch, without exchange, in plain PyTorch
    read    two processes, each adds the other's fresh gradient to a sum once

Paceline's workers keep the memory that a step frees (`--keep-memory`); so do, here, the processes
of DDP and of the bound. An exchange has to read the other's gradient at least once, so bound + read
is the lower limit of an exchange alone. Paceline may be below it since its worker steps its share
of the parameters, a bound process all of them. Writes results/limit.md.
"""

import argparse
import statistics

import torch

from table import interval, machine, spread, write_table
from worlds import World

CASES = {
    ("lenet", 256): 30, ("mlp", 32): 40, ("mlp", 128): 30, ("mlp", 256): 20, ("mlp-adamw", 64): 80,
    ("resnet18", 64): 3, ("cnn", 64): 30, ("gpt", 24): 12,
}  # fmt: skip
"""(model, global batch) -> steps of a block."""
ROLES = {"pace": "pace", "again": "pace", "ddp": "ddp", "one": "one", "bound": "bound",
         "read": "read"}  # fmt: skip
MAX_OF_LIMIT = 1.08


def measure(model: str, batch: int, steps: int, blocks: int) -> list[str]:
    total = steps * (blocks + 1)
    worlds = {
        name: World(role, model=model, batch=batch, total=total, tune=steps // 4 or 1)
        for name, role in ROLES.items()
    }
    times: dict[str, list[float]] = {name: [] for name in worlds}
    for number in range(blocks + 1):
        for name in worlds if number % 2 else reversed(worlds):
            seconds = worlds[name].steps(steps)
            if number:  # the first block warms up
                times[name].append(1000 * seconds / steps)
    best = worlds["ddp"].best
    assert best is not None
    for world in worlds.values():
        world.end()
    settings = f"{best[0]} MB, view {best[1]}, static {best[2]}"
    return _row(f"{model} {batch}", times, settings, step_shares(worlds["pace"].median_s))


def step_shares(parts_s: dict[str, float]) -> dict[str, float]:
    """Return the shares of a typical step: computing (with writing the gradient to shared memory),
    waiting for the other, and the exchange: mean, step of its half of the parameters, and reading
    them back.
    """
    return {name: seconds / sum(parts_s.values()) for name, seconds in parts_s.items()}


def _row(name: str, times: dict[str, list[float]], best: str, parts: dict[str, float]) -> list[str]:
    median_ms = statistics.median(times["pace"])

    def ratios(above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(times[above], times[below], strict=True)]

    limits = [a + b for a, b in zip(times["bound"], times["read"], strict=True)]
    ddp_ratio = interval(ratios("ddp", "pace"))
    limit_ratios = [a / b for a, b in zip(times["pace"], limits, strict=True)]
    is_reached = ddp_ratio[0] >= 1.0 and statistics.median(limit_ratios) <= MAX_OF_LIMIT
    return [
        name, *(spread(times[role]) for role in ("pace", "ddp")), best,
        *(spread(times[role]) for role in ("one", "bound", "read")),
        spread(ratios("again", "pace")),
        f"{ddp_ratio[0]:.2f} [{ddp_ratio[1]:.2f}, {ddp_ratio[2]:.2f}]", spread(limit_ratios),
        ", ".join(f"{part} {median_ms * share:.2f}" for part, share in parts.items()),
        "yes" if is_reached else "no",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--only", default="", help="run rows whose name begins with this")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, rows = machine(), []
    for (model, batch), steps in CASES.items():
        if f"{model} {batch}".startswith(options.only):
            rows.append(measure(model, batch, steps, options.blocks))
            print(" | ".join(rows[-1]), flush=True)
    if options.write:
        header = [
            "model, global batch", "Paceline ms a step", "DDP ms", "DDP's best settings",
            "one process, 2 threads, ms", "bound ms", "read ms", "again : Paceline",
            "DDP : Paceline [95 %]", "Paceline : (bound + read)",
            "where Paceline's step goes, ms", "reached",
        ]  # fmt: skip
        method = (
            f"Reached: the median of DDP : Paceline is at least 1, and Paceline takes at most "
            f"{MAX_OF_LIMIT} of bound + read. {options.blocks} blocks of each in turn; median "
            "(least to most). "
        )
        write_table("limit", "How near to the limit", header, rows, method + note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
