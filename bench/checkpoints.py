"""``kill -9`` while a checkpoint is saved: how many of so many runs are whole afterwards.

A process saves checkpoints of LeNet's size one after the other, by the code of a live run, and is
killed at a random moment. In memory that outlives it, it notes when it begins a checkpoint (the
first file is opened next) and when its pointer has moved. After each kill the newest checkpoint is
loaded: manifest, sha256 of each file, and the tensors, which must all be of one version.

    python bench/checkpoints.py [--kills 200] [--write]
"""

import argparse
import json
import mmap
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import LAYOUT, MODEL, OPTIMIZER, write
from paceline.store.layout import Layout, lay_out
from table import machine, write_table

MEAN_S = 0.03
"""Kills come after a random time of this mean."""


def lenet_layout() -> Layout:
    """LeNet's parameters, with a momentum each."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(256, 120), nn.Linear(120, 84),
        nn.Linear(84, 10),
    )  # fmt: skip
    named = list(model.named_parameters())
    state = [(i, "momentum_buffer", one, False) for i, (_, one) in enumerate(named)]
    return lay_out(named, [], state)


def save_for_ever(folder: Path, words: Any) -> None:
    """The process that is killed: version n fills every tensor with n."""
    layout = lay_out_once()
    rows = {"at": 0, "numbers": [], **layout.rows()}
    memory = bytearray(layout.block_bytes)
    block = torch.frombuffer(memory, dtype=torch.float32)
    checkpoints = CheckpointFolder(folder)
    version = 0 if checkpoints.is_empty else int(checkpoints.newest().json("run.json")["version"])
    while True:
        version += 1
        block.fill_(float(version))
        words[0] = 1
        aside = checkpoints.begin()
        (aside / LAYOUT).write_text(json.dumps(rows))
        request = {
            "aside": str(aside), "folder": str(folder), "keep": 2, "sync": [],
            "files": {"run.json": {"version": version}},
        }  # fmt: skip
        answer = write(request, memory)
        assert "sealed" in answer, answer
        words[0] = 0
        words[1] = 1


def lay_out_once() -> Layout:
    torch.set_num_threads(1)
    return lenet_layout()


def is_whole(folder: Path) -> bool:
    """Whether the newest checkpoint can be loaded and is of one version."""
    found = CheckpointFolder(folder).newest()
    version = float(found.json("run.json")["version"])
    tensors = [*load_file(found.path / MODEL).values(), *load_file(found.path / OPTIMIZER).values()]
    return len(tensors) == 20 and all(bool((one == version).all()) for one in tensors)


def kill_once(folder: Path, words: mmap.mmap, rng: random.Random) -> bool:
    """Let it save for a while, kill it; whether that was in the middle of a checkpoint."""
    words[0] = words[1] = 0
    child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(folder, words))
    child.start()
    while not words[1]:  # it has saved one since it began
        os.sched_yield()
    time.sleep(rng.expovariate(1 / MEAN_S))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    return words[0] == 1


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--write", action="store_true")
    options = arguments.parse_args()
    rng, words = random.Random(0), mmap.mmap(-1, 2)
    around = machine()
    inside = whole = with_note = 0
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        folder = Path(scratch) / "checkpoints"
        for _ in range(options.kills):
            inside += kill_once(folder, words, rng)
            whole += is_whole(folder)
            with_note += bool(CheckpointFolder(folder).newest().note)
        left = sorted(one.name for one in folder.iterdir())
    row = [str(options.kills), str(inside), str(whole), str(with_note)]
    print(row, f"files left beside: {len(left)}")
    if options.write:
        write_table(
            "checkpoints",
            "Kills while a checkpoint is saved",
            ["kill -9", "between the opening of a file and the move of the pointer",
             "loadable, of one version", "that needed an older one"],
            [row],
            f"{around}. LeNet with momentum, 355 KB a checkpoint in 2 files of tensors and 3 of "
            "JSON, saved one after the other; killed after an exponential time of mean "
            f"{MEAN_S * 1000:.0f} ms.",
        )  # fmt: skip


if __name__ == "__main__":
    main()
